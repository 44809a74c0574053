"""A coordination service of one process."""

from types import SimpleNamespace

import pytest


@pytest.fixture
def service(monkeypatch, store):
    """Joins a run whose store has the texts of the others for an all-gather, and gives the state of this process.

    No barrier waits; the timeouts of those that were called are in ``waits``, and each raises ``broken``, if any.
    """

    def join(process_id, num_processes, name, texts, broken=None):
        def wait_at_barrier(name, timeout_ms):
            state.waits.append(timeout_ms)
            if broken is not None:
                raise broken

        for rank, text in texts.items():
            store.key_value_set(f"jaxche/share/{name}/{rank}", text)
        monkeypatch.setattr(store, "wait_at_barrier", wait_at_barrier, raising=False)
        state = SimpleNamespace(client=store, process_id=process_id, num_processes=num_processes, waits=[])
        monkeypatch.setattr("jax._src.distributed.global_state", state)
        return state

    return join
