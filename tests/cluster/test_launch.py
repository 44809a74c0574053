"""The ranks of the next start after a failure."""

from jaxche.cluster._launch import WorkerSpec, next_specs
from jaxche.cluster._placement import Placement

ZERO, ONE, TWO = (WorkerSpec(Placement(core=core), pace) for core, pace in ((0, 20.0), (0, 20.0), (1, 50.0)))


def test_removal_after_two_failures_in_a_row():
    specs = [ZERO, ONE, TWO]
    specs, blamed = next_specs(specs, 1, None, survivors=True)
    assert len(specs) == 3
    # Another one fails: the count begins again.
    specs, blamed = next_specs(specs, 0, blamed, survivors=True)
    assert len(specs) == 3
    assert blamed is ZERO
    specs, blamed = next_specs(specs, 0, blamed, survivors=True)
    # Equal places on one core are different specs: the other stays.
    assert [spec is other for spec, other in zip(specs, (ONE, TWO), strict=True)] == [True, True]
    assert blamed is None


def test_no_removal_of_the_last_process_or_without_survivors():
    assert next_specs([ONE], 0, ONE, survivors=True)[0] == [ONE]
    assert next_specs([ZERO, ONE], 0, ZERO, survivors=False)[0] == [ZERO, ONE]


def test_a_hang_removes_no_rank():
    assert next_specs([ZERO, TWO], None, TWO, survivors=True) == ([ZERO, TWO], None)
