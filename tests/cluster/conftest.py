"""A coordination service in one process."""

import pytest


class Service:
    """Holds what the other processes say under a name; no barrier ever waits, or all are broken.

    Args:
      name: under which the others speak.
      texts: what each of them says, by number.
      broken: the error of every barrier.
    """

    def __init__(self, name, texts, broken=None):
        self.keys = {f"jaxche/share/{name}/{rank}": text for rank, text in texts.items()}
        self.broken, self.waits = broken, []

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self.keys, "as the real one refuses it"
        self.keys[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in self.keys.items() if key.startswith(folder)]

    def wait_at_barrier(self, name, timeout_ms):
        self.waits.append(timeout_ms)
        if self.broken is not None:
            raise self.broken


@pytest.fixture
def service():
    return Service
