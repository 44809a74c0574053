"""Settings of a trainer from options."""

import pytest

import jaxche
from jaxche.averaging import MERGE_RULES, WIRES
from jaxche.cadence import TUNERS, ApplyPolicy
from jaxche.cli import _settings
from jaxche.cli._main import make_parser
from jaxche.cli._settings import auto_paces, cadence, check_paces, default_ratios, policies, require, trainers
from jaxche.cluster import SCHEDULERS
from jaxche.scaling import AdaScale


def parse(*words):
    return make_parser().parse_args(["train", *words])


def test_option_values_match_the_packages():
    """`--help` lists them without importing these packages."""
    assert tuple(policy.value for policy in ApplyPolicy) == _settings.POLICIES
    assert (MERGE_RULES, tuple(TUNERS), SCHEDULERS) == (_settings.MERGE_RULES, _settings.TUNERS, _settings.SCHEDULERS)
    assert tuple(WIRES) == _settings.WIRES
    for word, name in _settings.SCALING_RULES.items():
        assert name.lower().startswith(word)
        assert callable(getattr(jaxche, name)().lr_factor)


def test_base_pace_exceeds_the_slowest_step():
    assert auto_paces([3.0, 4.0], (1, 2.5)) == (20.0, 50.0)
    assert auto_paces([15.5, 16.0], (1, 2.5)) == (21.0, 52.5)
    assert auto_paces([40.0], (1,)) == (52.0,)


def test_ratios_are_relative_to_the_fastest():
    assert auto_paces([3.0, 3.0], (2, 4)) == (20.0, 40.0)
    assert auto_paces([3.0, 3.0], (2.5, 1)) == (50.0, 20.0)
    assert default_ratios(3) == (1.0, 1.75, 2.5)
    assert default_ratios(1) == (1.0,)
    assert default_ratios(4) == (1.0, 1.5, 2.0, 2.5)


def test_number_of_ratios():
    with pytest.raises(ValueError, match=r"--ratios has 2 value\(s\) for 3 replicas; write --ratios 1,1\.75,2\.5"):
        auto_paces([3.0] * 3, (1, 2))


def test_paces_longer_than_a_step():
    check_paces((20.0, 50.0), (3.0, 49.0))


def test_paces_shorter_than_a_step():
    with pytest.raises(ValueError, match=r"rank 1 is to take 2 ms a step, but a step takes 3\.1 ms here; .* 20,5"):
        check_paces((20.0, 2.0), (3.0, 3.1))
    with pytest.raises(ValueError, match="for 3 replicas"):
        check_paces((20.0, 50.0), (3.0, 3.0, 3.0))


def test_options_become_settings():
    assert cadence(parse(), 2) is None
    assert cadence(parse("--anchor", "9"), 1) is None
    che = cadence(parse("--max-batch-diff", "5"), 3)
    assert (che.world_size, che.anchor, che.overhead_target) == (3, 1, 0.015)
    assert (che.tuner, che.max_batch_diff) == ("progress", 5)
    assert cadence(parse("--overhead-target", "0.2"), 2).tuner == "steady"
    assert cadence(parse("--overhead-target", "0.2", "--tuner", "seed"), 2).tuner == "seed"
    of_gradients = cadence(parse("--average", "gradients", "--max-batch-diff", "5"), 2)
    assert (of_gradients.tuner, of_gradients.anchor, of_gradients.overhead_target) == ("steady", 2, 0.015)
    assert policies(parse()) == ("cadence",)
    default = {"average": "parameters", "scaling": None, "che": None, "seed": 0, "ema": None}
    assert trainers(parse(), 2) == [default | {"policy": "cadence"}]
    assert trainers(parse("--policy", "sync"), 2) == [default | {"policy": "sync", "average": "gradients"}]
    assert trainers(parse("--scaling", "adascale"), 2) == [default | {"policy": "cadence", "scaling": AdaScale()}]
    assert trainers(parse("--ema", "0.05"), 2) == [default | {"policy": "cadence", "ema": 0.05}]
    with pytest.raises(ValueError, match="--scaling adascale"):
        trainers(parse("--scaling", "adamscale", "--opt-state", "reset"), 2)
    sync, compared = trainers(parse("--compare", "sync,cadence", "--merge", "batch", "--wire", "int4"), 2)
    assert sync == default | {"policy": "sync", "average": "gradients"}
    assert compared == default | {"policy": "cadence", "merge": "batch", "wire": "int4"}
    with pytest.raises(ValueError, match="--merge and --wire acts on averaged parameters, but policy sync averages"):
        trainers(parse("--policy", "sync", "--merge", "batch", "--wire", "int4"), 2)


def test_sync_has_no_cadence():
    for word, value in (("anchor", "4"), ("overhead-target", "0.1"), ("tuner", "steady"), ("max-batch-diff", "4")):
        with pytest.raises(ValueError, match=f"--{word} sets the length of rounds"):
            trainers(parse("--policy", "sync", f"--{word}", value), 2)
    sync, compared = trainers(parse("--compare", "sync,cadence", "--anchor", "4"), 2)
    assert sync["policy"] == "sync"
    assert compared["che"].anchor == 4


def test_options_of_auto():
    words = ("--policy", "auto", "--merge", "fednova", "--opt-state", "local")
    options = {"policy": "auto", "seed": 0, "ema": None, "merge": "fednova", "opt_state": "local"}
    assert trainers(parse(*words), 2) == [options]
    for word, value in (("average", "gradients"), ("scaling", "linear"), ("anchor", "4"), ("tuner", "steady")):
        with pytest.raises(ValueError, match=f"--{word} is of one policy"):
            trainers(parse(*words, f"--{word}", value), 2)
    with pytest.raises(ValueError, match="--max-batch-diff is of one policy"):
        trainers(parse("--policy", "auto", "--max-batch-diff", "4"), 2)
    # In a comparison they are of the other policies.
    auto, _ = trainers(parse("--compare", "auto,cadence", "--anchor", "4", "--merge", "batch", "--ema", "0.1"), 2)
    assert auto == {"policy": "auto", "seed": 0, "ema": 0.1, "merge": "batch"}


def test_packages_of_a_task_that_are_missing_are_named(monkeypatch):
    monkeypatch.setitem(_settings.TASKS, "digits", ("digits", ("no_such_package.inner", "numpy")))
    with pytest.raises(ImportError, match=r"task digits needs no_such_package.inner; write: pip install"):
        require("digits")
