"""Refusals of a trainer's arguments; the trainer's own tests go through all of them."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.data._batches import checked_length
from jaxche.training._checks import (
    check_arrays,
    check_auto_wire,
    check_bits,
    check_fleet,
    check_joined,
    check_model_state,
    check_outputs,
    check_scaling,
    checked_callbacks,
    checked_max_rows,
    checked_paces,
)


def test_good_arguments_pass(monkeypatch):
    monkeypatch.delenv("JAXCHE_PACE_MS", raising=False)
    assert checked_paces(None, 2) == [None, None]
    assert checked_paces(20, 2) == [20, 20]
    assert checked_paces((20, 50), 2) == [20, 50]
    assert checked_paces(np.array([20.0, 50.0]), 2) == [20, 50]
    assert checked_length([1, 2]) == 2


def test_the_launchers_pace_is_for_every_local_replica(monkeypatch):
    monkeypatch.setenv("JAXCHE_PACE_MS", "12.5")
    assert checked_paces(None, 2) == [12.5, 12.5]
    assert checked_paces(3, 2) == [3, 3]  # what is written in the script wins
    for wrong in ("fast", "-1", "0", "inf", ""):
        monkeypatch.setenv("JAXCHE_PACE_MS", wrong)
        with pytest.raises(ValueError, match=f"JAXCHE_PACE_MS='{wrong}' must be a positive number of ms"):
            checked_paces(None, 2)


def test_whole_numbers_of_numpy_are_whole():
    assert checked_max_rows(np.int64(4), "speed", 2) == [4, 4]
    assert checked_max_rows(np.array([4, 8]), "speed", 2) == [4, 8]
    check_scaling(jaxche.AdaScale(), np.int64(32), "average")


# Of two processes.
ISLAND = SimpleNamespace(devices=np.array([SimpleNamespace(process_index=process) for process in range(2)]))


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: check_auto_wire("auto", None, True, None), "an elastic run admits processes without them; write wire"),
        (lambda: check_fleet(jaxche.VirtualFleet([20.0, 50.0]), 2, 2, None), "of one process, and this run has 2"),
        (lambda: check_outputs(print, False, [ISLAND]), "here a replica spans several; leave outputs= out"),
        (lambda: checked_callbacks([print, 3]), r"callbacks\[1\]=3 is not a function; write def callback"),
        (
            lambda: check_model_state({"n": (np.zeros(2),)}, {"n": [np.zeros(2)]}),
            r"the tree is .*\[\*\].* instead of .*\(\*,\).*; return the same tree",
        ),
        (lambda: checked_paces((1, 0), 2), "positive"),
        (lambda: checked_paces(float("inf"), 2), "positive"),
        (lambda: checked_paces(["20", "50"], 2), "positive"),
        (lambda: checked_paces(True, 2), "positive"),
        (lambda: checked_paces(np.array(20.0), 2), "positive"),
        (lambda: checked_paces("20", 2), r"pace_ms='20' must be .*; write e\.g\. pace_ms=\[20\.0, 20\.0\]"),
        (lambda: checked_length(jaxche.Batches), r"data=Batches is a class, .*; write data=Batches\(\.\.\.\), with"),
        (lambda: checked_length(3), "len"),
        (
            lambda: checked_length((np.zeros((9, 2)), np.zeros(9))),
            r"of the shapes \(9, 2\), \(9,\), .* write jaxche.Batches\(\(x, y\), batch_size=32",
        ),
        (
            lambda: checked_length([np.zeros((9, 2), np.float32), np.zeros((9, 1), np.int32)]),
            r"of the shapes \(9, 2\), \(9, 1\), .* write jaxche.Batches\(\(x, y\), batch_size=32",
        ),
    ],
)
def test_bad_ones_are_named(call, named):
    with pytest.raises(ValueError, match=named):
        call()


def test_batches_of_one_array_may_have_floats_of_several_widths():
    assert checked_length([np.zeros((9, 2), np.float32), np.zeros((9, 2))]) == 2


STEP = {"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "a", "SLURM_PROCID": "0"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"JAXCHE_NUM_PROCESSES": "2"}, r"one of 2 \(JAXCHE_NUM_PROCESSES\)"),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, r"one of 4 \(OMPI_COMM_WORLD_SIZE\)"),
        (STEP | {"SLURM_NTASKS": "8"}, r"one of 8 \(SLURM_NTASKS\)"),
        (STEP | {"SLURM_NTASKS": "8", "OMPI_COMM_WORLD_SIZE": "1"}, r"one of 8 \(SLURM_NTASKS\)"),
        ({}, ""),
        (STEP | {"SLURM_NTASKS": "1"}, ""),
        ({"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, ""),  # a job's own script
        (STEP | {"SLURM_NTASKS": "8", "JAXCHE_NUM_PROCESSES": "1"}, ""),
    ],
)
def test_processes_that_were_started_together_do_not_train_apart(environ, said, monkeypatch):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if not said:
        return check_joined()
    with pytest.raises(ValueError, match=f"{said}, but has not joined.*JAXCHE_NUM_PROCESSES=1 to train alone"):
        check_joined()
    return None


def test_a_name_that_is_no_argument_is_one_of_the_trainer():
    with pytest.raises(TypeError, match=r"^Trainer.__init__\(\) got an unexpected keyword argument 'tuner'"):
        jaxche.Trainer(lambda w, x: w.sum(), optax.sgd(0.1), tuner="seed")


@pytest.mark.parametrize(
    ("dtype", "wide"), [("int4", "int8"), ("uint4", "int8"), ("int2", "int8"), ("float4_e2m1fn", "float8_e4m3fn")]
)
def test_arrays_of_less_than_a_byte_a_number_are_refused_at_the_start(devices, dtype, wide):
    def loss(params, batch, model_state=None, weights=None):
        weights = model_state["q"] if weights is None else weights
        loss = jnp.mean((batch @ weights.astype(jnp.float32) @ params) ** 2)
        return loss if model_state is None else (loss, ({}, model_state))

    def frozen(params, batch, weights):
        return loss(params, batch, weights=weights)

    few = jnp.ones((4, 3), jnp.float32).astype(dtype)
    for of, state, name in (
        (lambda x: jax.tree_util.Partial(frozen, weights=x), lambda x: None, "loss_fn"),
        (lambda x: loss, lambda x: {"q": x}, "model_state"),
    ):
        line = rf"{name}.* is {dtype}, .* on a CPU device; give x\.astype\(jnp\.{wide}\)"
        with pytest.raises(ValueError, match=line):
            jaxche.Trainer(of(few), optax.sgd(0.1), replicas=devices[:1]).init(jnp.ones(3), state(few))
        whole = few.astype(wide)
        trainer = jaxche.Trainer(of(whole), optax.sgd(0.01), replicas=devices[:1])
        data = [np.ones((2, 4), np.float32)]
        end, _ = trainer.fit(trainer.init(jnp.ones(3), state(whole)), data, progress=False)
        assert end.steps == 1


def test_other_devices_may_take_arrays_of_less_than_a_byte_a_number():
    placement = SimpleNamespace(devices=np.array([[SimpleNamespace(platform="gpu")]], object))
    check_bits({"model_state": {"q": jnp.ones(2, jnp.int4), "key": jax.random.key(0)}}, [placement])


def with_statistics(params, batch, model_state):
    return jnp.mean((batch @ params) ** 2), ({}, model_state)


@pytest.mark.parametrize(
    ("loss", "model_state", "warns"),
    [
        (lambda params, batch: jnp.mean((batch @ params) ** 2), {"mean": jnp.zeros(3)}, True),
        (lambda params, batch, **named: jnp.mean((batch @ params) ** 2), {"mean": jnp.zeros(3)}, True),
        (lambda params, batch: jnp.mean((batch @ params) ** 2), {}, False),
        (with_statistics, {"mean": jnp.zeros(3)}, False),
        (jax.tree_util.Partial(with_statistics), {"mean": jnp.zeros(3)}, False),
    ],
    ids=["ignored", "named", "empty", "taken", "partial"],
)
def test_a_model_state_that_the_loss_does_not_take_is_logged(loss, model_state, warns, devices, caplog):
    jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1]).init(jnp.zeros(3), model_state=model_state)
    assert ("Write def loss_fn(params, batch, model_state)" in caplog.text) == warns


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (
            lambda trainer: trainer.init(np.zeros(2), None, "float32"),
            r"opt_state is 'float32', not an array of numbers; write opt_state=tx\.init\(params\), or",
        ),
        (
            lambda trainer: trainer.init(np.zeros(2), None, {"mu": np.array(["a"])}),
            r"opt_state\['mu'\] is <U1\[1\], not an array of numbers",
        ),
        (
            lambda trainer: trainer.init(np.zeros(2), "batch_stats"),
            r"model_state is 'batch_stats', not an array of numbers; write e\.g\. trainer\.init\(params, model_state=",
        ),
        (
            lambda trainer: trainer.init(np.zeros(2), jaxche.Batches(np.zeros((4, 2)), batch_size=2)),
            r"model_state is Batches\(4 examples in 2 batches of 2, seed=0\), not an array of numbers",
        ),
        (
            lambda trainer: trainer.measure_rates(trainer.init(np.zeros(2)), [np.zeros((2, 2))], seconds="1 s"),
            r"seconds='1 s' must be a finite number of at least 0; write e\.g\. trainer\.measure_rates\(",
        ),
        (
            lambda trainer: trainer.measure_rates(None, [np.zeros((2, 2))]),
            r"state=None is not a state of this trainer; write state = trainer\.init\(params\)",
        ),
    ],
)
@pytest.mark.parametrize("virtual", [False, True])
def test_what_is_no_array_state_or_number_is_named(call, named, virtual):
    fleet = jaxche.VirtualFleet([10.0, 20.0]) if virtual else None
    loss = lambda params, batch: jnp.mean((batch - params) ** 2)  # noqa: E731
    trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=jax.devices()[:2], fleet=fleet)
    with pytest.raises(ValueError, match=named):
        call(trainer)


def test_a_model_state_may_have_numbers_and_keys():
    state = {"n": 3, "x": np.float32(1), "key": jax.random.key(0), "shape": jax.ShapeDtypeStruct((2,), jnp.float32)}
    check_arrays("model_state", state, "")


def test_a_later_batch_of_text_is_named():
    """The first batch is checked before the first step."""
    trainer = jaxche.Trainer(lambda w, x: jnp.mean((x - w) ** 2), optax.sgd(0.1), replicas=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"a batch is 'a text', text or objects and not numbers"):
        trainer.fit(trainer.init(np.zeros(2)), [np.zeros((2, 2)), "a text"], progress=False)


@pytest.mark.parametrize("name", ["policy", "average", "merge", "opt_state", "backend"])
def test_an_array_in_place_of_a_name_is_refused_by_the_trainer(problem, name):
    with pytest.raises(ValueError, match=rf"{name}=float64\[2\] is unknown; write one of"):
        jaxche.Trainer(problem.loss, optax.sgd(0.1), **{name: np.zeros(2)})


@pytest.mark.parametrize("name", ["progress", "dry_run", "donate"])
def test_a_text_in_place_of_a_flag_is_refused_by_fit(problem, devices, name):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    state = trainer.init(problem.params)
    with pytest.raises(ValueError, match=f"{name}='false' is neither True nor False; write {name}=True, or leave it"):
        trainer.fit(state, problem.data, **{name: "false"})
    assert not state.is_deleted
