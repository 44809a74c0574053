import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxche.stages import SCHEDULES, Task, gpipe, one_f_one_b, simulate_schedule

sizes = st.tuples(st.integers(1, 8), st.integers(1, 20))
names = st.sampled_from(sorted(SCHEDULES))


@given(names, sizes)
def test_every_micro_batch_goes_forward_and_then_backward_once(name, size):
    stages, micro_batches = size
    schedule = SCHEDULES[name](stages, micro_batches)
    assert len(schedule) == stages
    for tasks in schedule:
        assert sorted(tasks) == sorted(Task(kind, m) for kind in "FB" for m in range(micro_batches))
        for m in range(micro_batches):
            assert tasks.index(Task("F", m)) < tasks.index(Task("B", m))
        # Both in the order of the micro-batches, so that sums of gradients are the same bit for bit.
        for kind in "FB":
            assert [task.micro for task in tasks if task.kind == kind] == list(range(micro_batches))


@given(names, sizes, st.data())
def test_no_schedule_deadlocks_and_work_bounds_its_time(name, size, data):
    stages, micro_batches = size
    times = [data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages)) for _ in range(2)]
    simulation = simulate_schedule(SCHEDULES[name](stages, micro_batches), *times)
    work = [micro_batches * (f + b) for f, b in zip(*times, strict=True)]
    assert max(work) <= simulation.makespan <= sum(work)
    assert simulation.bubble == pytest.approx(1 - sum(work) / (stages * simulation.makespan))


@given(sizes)
def test_kept_activations(size):
    stages, micro_batches = size
    ones = [1] * stages
    assert simulate_schedule(gpipe(stages, micro_batches), ones, ones).peak == (micro_batches,) * stages
    peak = simulate_schedule(one_f_one_b(stages, micro_batches), ones, ones).peak
    assert peak == tuple(min(stages - s, micro_batches) for s in range(stages))


@given(names, sizes, st.integers(1, 5), st.integers(1, 5))
def test_equal_stages_reach_the_textbook_bubble(name, size, forward, backward):
    stages, micro_batches = size
    simulation = simulate_schedule(SCHEDULES[name](stages, micro_batches), [forward] * stages, [backward] * stages)
    assert simulation.makespan == (micro_batches + stages - 1) * (forward + backward)
    assert simulation.bubble == pytest.approx(float(Fraction(stages - 1, micro_batches + stages - 1)))


@given(st.permutations(range(8)))
@settings(max_examples=50)
def test_the_simulation_sees_every_deadlock_of_two_stages(order):
    """Stage 0 sends in order; a stage 1 that answers out of order only works while stage 0 can go ahead."""
    first = tuple(task for m in range(8) for task in (Task("F", m), Task("B", m)))
    second = tuple(task for m in order for task in (Task("F", m), Task("B", m)))
    if list(order) == list(range(8)):
        assert simulate_schedule((first, second), [1, 1], [1, 1]).makespan == 32
    else:
        with pytest.raises(ValueError, match=r"deadlock, .* \(stage 0 at B\d, stage 1 at F\d\)"):
            simulate_schedule((first, second), [1, 1], [1, 1])


def test_tasks_begin_when_the_chart_says():
    simulation = simulate_schedule(one_f_one_b(2, 2), [1, 1], [2, 2])
    assert simulation.starts == ((0.0, 1.0, 4.0, 7.0), (1.0, 2.0, 4.0, 5.0))
    picture = simulation.draw("ms")
    assert all(f">{task}<" in picture for task in ("F0", "F1", "B0", "B1"))
    assert ">ms<" in picture
    assert "bubble 33.3%" in picture
    assert simulation._repr_html_() == simulation.draw()


def test_times_of_other_stages_are_refused():
    with pytest.raises(ValueError, match="backward has 1 times for 2 stages; give one a stage"):
        simulate_schedule(gpipe(2, 1), [1, 1], [2])


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_numbers_of_a_schedule_are_whole(make):
    for stages, micro_batches, message in (
        ("a", 2, "stages='a' must be a whole number; write e.g. stages=2"),
        (0, 2, "stages=0 must be at least 1"),
        (2, 2.5, "micro_batches=2.5 must be a whole number; write e.g. micro_batches=8"),
        (2, None, "micro_batches=None must be a whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            make(stages, micro_batches)


@pytest.mark.parametrize(
    ("schedule", "forward", "message"),
    [
        (5, [1.0], r"schedule=5 must be the tasks of each stage; write e\.g\. jaxche\.stages\.gpipe\(2, 8\)"),
        ([5], [1.0], r"schedule=\[5\] must be the tasks"),
        ([[("F", 0)]], [1.0], r"schedule=\[\[\('F', 0\)\]\] must be the tasks"),
        (gpipe(1, 1), 1.0, r"forward=1.0 must be a list of finite times of at least 0, e\.g\. forward=\[1.0, 2.0\]"),
        (gpipe(1, 1), ["a"], r"forward=\['a'\] must be a list of finite times"),
        (gpipe(1, 1), [math.nan], r"forward=\[nan\] must be a list of finite times"),
        (gpipe(1, 1), [-1.0], r"forward=\[-1.0\] must be a list of finite times of at least 0"),
    ],
)
def test_a_simulation_takes_tasks_and_times(schedule, forward, message):
    with pytest.raises(ValueError, match=message):
        simulate_schedule(schedule, forward, [1.0])
