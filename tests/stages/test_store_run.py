"""The identity of a run in a store: what an earlier run left is not seen, and who comes back goes on."""

import re
import threading
import time

import obstore.store
import pytest

from jaxche.stages import Tag, _objects
from jaxche.stages import _store_run as module
from jaxche.stages._objects import Objects, open_objects
from jaxche.stages._store_run import Hello, StoreRun


class Killed(BaseException):
    """The process is no more."""


class Process:
    """A start of the process of some stages, which agrees on a run and then lets others in until it is killed."""

    def __init__(self, store, stages, n_stages=3, timeout_s=20.0):
        self.run = StoreRun(Objects(store, "memory://", "run"), stages, n_stages, timeout_s)
        self._killed, self._agreed, self.error = threading.Event(), threading.Event(), None
        self._looks = threading.Semaphore(0)  # released when it has looked for the others once more
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self):
        try:
            self.run.agree(self._pause)
            self._agreed.set()
            while True:
                self.run.admit()
                self._pause(0.005)
        except Killed:
            pass
        except Exception as error:
            self.error = error
        self._agreed.set()

    def _pause(self, seconds):
        self._looks.release()
        if self._killed.wait(seconds):
            raise Killed

    @property
    def identity(self):
        """The identity of its run, once there is one."""
        assert self._agreed.wait(20)
        if self.error is not None:
            raise self.error
        return self.run._identity

    def waits(self):
        """Whether it looks five times more, and still does not know the run."""
        while self._looks.acquire(blocking=False):
            pass
        return all(self._looks.acquire(timeout=20) for _ in range(5)) and not self._agreed.is_set()

    def kill(self):
        self._killed.set()
        self._thread.join()


@pytest.fixture
def start(monkeypatch):
    """Starts processes that share a store, and ends them with the test."""
    monkeypatch.setattr(module, "_ADMIT_S", 0.005)
    monkeypatch.setattr(module, "_MAX_WAIT_S", 0.01)
    store, started = obstore.store.MemoryStore(), []

    def starting(*stages, **options):
        started.append(Process(store, stages, **options))
        return started[-1]

    starting.store = store
    yield starting
    for process in started:
        process.kill()


def identity_of(*processes):
    [identity] = {process.identity for process in processes}
    assert re.fullmatch("[0-9a-f]{32}", identity)
    return identity


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_all_agree_in_whatever_order_they_come_and_nobody_before_all_are_there(start, order):
    here = [start(order[0]), start(order[1])]
    assert all(process.waits() for process in here)
    identity_of(*here, start(order[2]))


@pytest.mark.parametrize("stages", [((0, 1), (2,)), ((0, 2), (1,)), ((0, 1, 2),)])
def test_a_process_may_hold_several_stages(start, stages):
    identity_of(*[start(*own) for own in stages])


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_who_is_started_again_takes_over_the_run_of_the_others(start, stage):
    here = [start(i) for i in range(3)]
    identity = identity_of(*here)
    here[stage].kill()
    again = start(stage)
    assert identity_of(again) == identity
    for other in {0, 1, 2} - {stage}:  # one that was there from the beginning is enough
        here[other].kill()
        here[other] = start(other)
        assert identity_of(here[other]) == identity


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_where_all_begin_anew_what_was_before_is_gone(start, order):
    first = [start(i) for i in range(3)]
    identity = identity_of(*first)
    first[0].run.objects.create("stage-001-receives/step-0000000000.micro-00000.forward.from-stage-000", [b"old"])
    for process in first:
        process.kill()
    again = [start(order[0])]
    assert again[0].waits()
    again += [start(order[1]), start(order[2])]
    assert identity_of(*again) != identity
    assert not [entry["path"] for chunk in start.store.list() for entry in chunk if identity in entry["path"]]


def test_who_comes_back_when_some_are_gone_for_good_does_not_take_their_word(start, monkeypatch, caplog):
    first = [start(i) for i in range(3)]
    identity_of(*first)
    for process in first:
        process.kill()
    monkeypatch.setattr(_objects, "_LATE_S", 0.0)
    alone = start(1, timeout_s=0.1)
    with pytest.raises(TimeoutError, match=r"waited 0.1 s for the process of stage 0, 2 in memory:// \(run run\)"):
        assert alone.identity
    assert caplog.messages == ["still waiting for the process of stage 0, 2 in memory:// (run run), for up to 0.1 s"]


def test_a_saved_state_says_what_the_run_is(start):
    first = [start(i) for i in range(3)]
    identity = identity_of(*first)
    first[2].run.objects.replace("stage-002-state/step-0000000001", [b"state"])
    for process in first:
        process.kill()
    again = start(1)
    assert identity_of(again) == identity  # and it does not wait
    late = StoreRun(again.run.root, (0,), 3, 20.0)
    assert late.find_saved()
    assert late.objects.names("stage-002-state") == ["stage-002-state/step-0000000001"]
    other = again.run.root.within("f" * 32)
    other.replace("stage-000-state/step-0000000001", [b"state"])
    with pytest.raises(ValueError, match="several runs have saved states"):
        StoreRun(again.run.root, (0,), 3, 20.0).find_saved()


def test_two_processes_of_one_stage_are_an_error_of_the_first(start, until):
    first = [start(i) for i in range(3)]
    identity = identity_of(*first)
    second = start(1)
    assert identity_of(second) == identity
    first[1]._thread.join(20)
    assert "another process that was started later holds stage 1" in str(first[1].error)
    both = start(0, 1)
    first[0]._thread.join(20)
    assert "another process that was started later holds stage 0" in str(first[0].error)
    assert until(lambda: both.error or second.error)  # as soon as one of the two has seen the other
    assert "stage 1 is in another process of memory:// (run run) already" in str(both.error or second.error)


def test_who_leaves_takes_its_hello_and_no_other(start):
    process = start(0, n_stages=1)
    identity_of(process)
    process.kill()

    def keys():
        return [entry["path"] for chunk in start.store.list() for entry in chunk]

    assert keys() == ["run/stage-000-hello"]
    again = start(0, n_stages=1)
    identity_of(again)
    process.run.leave()
    assert keys() == ["run/stage-000-hello"]
    again.kill()
    again.run.leave()
    again.run.leave()
    assert keys() == []


@pytest.mark.parametrize("begins", ["new", "saved"])
def test_who_leaves_removes_what_a_killed_start_left_half_written(tmp_path, begins):
    root = open_objects(str(tmp_path), "run", {})
    torn = [tmp_path / "run" / f"stage-00{stage}-hello#1" for stage in (0, 1)]
    for path in torn:
        path.write_bytes(b"half")
    if begins == "saved":
        root.replace(f"{'0' * 32}/stage-000-state/step-0000000001", [b"state"])
    run = StoreRun(root, (0,), 1, 20.0)
    assert run.find_saved() == (begins == "saved")
    run.agree(time.sleep)
    run.leave()
    assert [path.exists() for path in torn] == [False, True]


def test_a_hello_that_no_process_wrote_is_none():
    hello = Hello("a", (0, 1), {"2": "b"}, "0" * 32)
    assert Hello.decode(hello.encode()) == hello
    for data in (b"", b"\xff", b"[]", b"3", b'["a", 3, {}, null]', b'["a", [0], {}, "../x"]', hello.encode()[:-3]):
        assert Hello.decode(data) is None


def test_hellos_are_exchanged_at_intervals_until_a_state_is_saved(start, monkeypatch):
    monkeypatch.setattr(module, "_ADMIT_S", 1000.0)
    process = start(0, n_stages=1)
    identity_of(process)
    process.kill()
    exchanges = []
    monkeypatch.setattr(process.run, "_exchange", lambda: exchanges.append(time.monotonic()))
    process.run._next_admit = 0.0
    for _ in range(3):
        process.run.admit()
    assert len(exchanges) == 1
    process.run._next_admit = 0.0
    process.run.has_saved_state = True
    process.run.admit()
    assert len(exchanges) == 1


def test_of_two_runs_that_go_on_neither_is_taken():
    run = StoreRun(Objects(obstore.store.MemoryStore(), "memory://", "run"), (0,), 3, 1.0)
    hellos = [Hello(nonce, (stage,), {}, 32 * nonce) for stage, nonce in ((1, "a"), (2, "b"))]
    assert run._choose(hellos[:1], True) == 32 * "a"
    with pytest.raises(ValueError, match="several runs are active in memory://"):
        run._choose(hellos, True)


@pytest.mark.parametrize(
    ("key", "is_own"),
    [
        (module.tag_key(Tag(3, 0, "forward", 1)), True),
        (module.tag_key(Tag(3, 0, "backward", 2)), True),
        (module.tag_key(Tag(3, 0, "forward", 0)), False),
        (module.loss_key(3, 0, 2), True),
        (module.state_key(1, 3), True),
        (module.state_key(2, 3), False),  # the first stage of a process has the states of all
        (module.finished_key(2), True),
        (module.finished_key(0), False),
    ],
)
def test_what_a_killed_process_left_half_written_is_deleted_by_the_next_one_alone(tmp_path, key, is_own):
    partial = tmp_path / "run" / "a" / f"{key}#1"
    partial.parent.mkdir(parents=True)
    partial.touch()
    StoreRun(open_objects(str(tmp_path), "run", {}), (1, 2), 3, 1.0)._set("a")
    assert partial.exists() != is_own
