"""A record of the batches that were read."""

import pytest


class Recorder:
    """Passes batches through and notes which were read."""

    def __init__(self, data):
        self._data, self.reads = data, []

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        return self.epoch(0)[i]

    def epoch(self, e):
        return _Epoch(self, e)


class _Epoch:
    def __init__(self, recorder, e):
        self._recorder, self._epoch = recorder, e

    def __getitem__(self, i):
        self._recorder.reads.append((self._epoch, i))
        return self._recorder._data.epoch(self._epoch)[i]


@pytest.fixture
def recorder():
    return Recorder
