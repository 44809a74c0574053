"""A coordination service of one process."""

import pytest


class Service:
    """The state of ``jax.distributed`` and its client, which has the texts of the others; no barrier waits.

    Args:
      process_id: the number of this process.
      num_processes: the number of processes.
      name: of the all-gather.
      texts: of the other processes, by number.
      broken: the error of every barrier.
    """

    def __init__(self, process_id, num_processes, name, texts, broken=None):
        self.client, self.process_id, self.num_processes = self, process_id, num_processes
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
def service(monkeypatch):
    """Joins a :class:`Service`."""

    def join(*args):
        state = Service(*args)
        monkeypatch.setattr("jax._src.distributed.global_state", state)
        return state

    return join
