"""What several tests of replicas ask of a trainer."""

import numpy as np
import pytest

from jaxche.replicas import HOST_COLUMNS, ToMerge


@pytest.fixture(scope="session")
def merge_arguments():
    """The arguments of a merge program after a round without steps."""

    def arguments(trainer, state):
        engine = trainer._engine
        local_states = engine.fitted(state.local_states)
        carries = [r.idle(local).carry for r, local in zip(engine._replicas, local_states, strict=True)]
        rows = np.zeros((len(carries), len(HOST_COLUMNS)), np.float32)
        return engine._merge.arguments(ToMerge(local_states, carries, rows))

    return arguments
