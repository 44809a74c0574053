"""A record of the batches that were read, and a clock that only sleeps move on."""

import collections
import threading

import pytest

from jaxche.replicas import _group_merge, _replica
from jaxche.training import _rounds


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


class ThreadClock:
    """A clock of each thread that only its own sleeps move on: a paced step takes its pace, on however busy a machine.

    The main thread starts all replicas together and waits for them, so it reads the clock that is ahead, and sets all
    to it. A merge of a group starts when its last member has come, and takes ``merge_s``.
    """

    def __init__(self, merge_s):
        self.merge_s, self._lock = merge_s, threading.Lock()
        self._start = self._end = 0.0
        self._ahead, self._members = {}, collections.defaultdict(list)

    def perf_counter(self):
        with self._lock:
            if threading.current_thread() is threading.main_thread():
                self._start = self._end = max(self._end, self._latest(self._ahead))
                self._ahead.clear()
            return self._latest([threading.get_ident()])

    def sleep(self, seconds):
        self._set([threading.get_ident()], self.perf_counter() + seconds)

    def begins(self):
        """This thread drives a replica, maybe after another one."""
        with self._lock:
            self._end = max(self._end, self._ahead.pop(threading.get_ident(), self._start))

    def joins(self, merge):
        """This thread waits for the others of its group."""
        with self._lock:
            self._members[merge].append(threading.get_ident())

    def merges(self, merge):
        """The last thread has come."""
        with self._lock:
            members = self._members.pop(merge)
            latest = self._latest(members)
        self._set(members, latest + self.merge_s)

    def _latest(self, threads):
        return max((self._ahead.get(thread, self._start) for thread in threads), default=self._start)

    def _set(self, threads, now):
        with self._lock:
            self._ahead.update(dict.fromkeys(threads, now))


@pytest.fixture
def thread_clock(monkeypatch):
    """Times rounds by a :class:`ThreadClock`."""
    clock, run = ThreadClock(merge_s=0.005), _replica.Replica.run
    join, merge = _group_merge.GroupMerge.join, _group_merge.GroupMerge._merge
    for module in (_group_merge, _replica, _rounds):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(_replica.Replica, "run", lambda self, *given: clock.begins() or run(self, *given))
    monkeypatch.setattr(_group_merge.GroupMerge, "join", lambda self, *given: clock.joins(self) or join(self, *given))
    monkeypatch.setattr(_group_merge.GroupMerge, "_merge", lambda self: clock.merges(self) or merge(self))
    return clock
