"""Totals of batches on the host: weighted sums, nnx metrics, metrics that merge; also handed on as JSON."""

import json
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxche import Weighted
from jaxche.training._metrics import arguments_of, as_metric, named_floats, outputs_of, total_of


@flax.struct.dataclass
class Mean:
    """In the form of clu's metrics."""

    total: jnp.ndarray
    count: jnp.ndarray

    def merge(self, other):
        return Mean(self.total + other.total, self.count + other.count)

    def compute(self):
        return {"mean": self.total / self.count}


def batches(sizes=(8, 8, 3)):
    rng = np.random.default_rng(0)
    return [
        {"logits": rng.normal(size=(n, 5)).astype(np.float32), "labels": rng.integers(0, 5, n).astype(np.int32)}
        for n in sizes
    ]


def relayed(outputs, examples, metrics, cuts):
    """The result if several processes each add some of the batches."""
    saved, start = None, 0
    for stop in [*cuts, len(outputs)]:
        total = total_of(outputs[0], metrics)
        if saved is not None:
            total.load(json.loads(json.dumps(saved)), outputs[start])
        for one, n in zip(outputs[start:stop], examples[start:stop], strict=True):
            total.add(one, n)
        saved, start = total.save(), stop
    return total.result()


CUTS = [(), (1,), (1, 2)]


@pytest.mark.parametrize("cuts", CUTS)
def test_means_weigh_examples_and_weighted_values_their_weights(cuts):
    examples = [8, 8, 3]
    outputs = [
        {"mean": np.float32(v), "tokens": Weighted(np.float32(t), np.float32(w)), "none": Weighted(0.0, 0.0)}
        for v, t, w in [(0.1, 6, 2), (0.7, 4, 8), (3.0, 5, 0)]
    ]
    found = relayed(outputs, examples, None, cuts)
    wanted = sum(float(one["mean"]) * n for one, n in zip(outputs, examples, strict=True)) / 19
    assert found == {"mean": wanted, "tokens": 15 / 10, "none": pytest.approx(math.nan, nan_ok=True)}


def test_a_mean_without_any_weight_is_nan_and_a_warning_has_its_name(caplog):
    outputs = [{"loss": Weighted(0.0, 0.0), "some": Weighted(1.0, w), "recall": Weighted(0.0, 0)} for w in (0.0, 1.0)]
    found = relayed(outputs, [8, 8], None, ())
    assert math.isnan(found["loss"])
    assert math.isnan(found["recall"])
    assert found["some"] == 2.0
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert "'loss', 'recall' is NaN" in record.message
    assert "weight 0 in all batches" in record.message


@pytest.mark.parametrize("cuts", CUTS)
def test_sums_are_in_float64(cuts):
    values = [np.float32(16777216), np.float32(1), np.float32(1)]
    assert relayed([{"x": Weighted(v, np.float32(1))} for v in values], [1] * 3, None, cuts) == {"x": 16777218 / 3}


METRICS = {
    "multi": lambda: nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")),
    "accuracy": nnx.metrics.Accuracy,
    "welford": lambda: nnx.metrics.Welford("loss"),
}


@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", METRICS)
def test_nnx_metrics_are_those_of_one_object_over_all_batches(name, cuts):
    given = [jax.tree.map(jnp.asarray, one | {"loss": one["logits"].sum(1)}) for one in batches()]
    metrics, twin = METRICS[name](), METRICS[name]()
    twin.update(**given[0])
    metrics.update(**given[0])  # is not counted: an evaluation starts again
    found = relayed(given, [8, 8, 3], metrics, cuts)
    assert named_floats(metrics.compute(), name) == named_floats(twin.compute(), name)
    twin.reset()
    for one in given:
        twin.update(**one)
    assert found == named_floats(twin.compute(), name)
    wanted = np.concatenate([one["logits"].argmax(1) == one["labels"] for one in given]).mean()
    losses = np.concatenate([one["loss"] for one in given])
    if name == "welford":
        assert found["welford_mean"] == pytest.approx(losses.mean(), rel=1e-5)
        assert found["welford_standard_deviation"] == pytest.approx(losses.std(), rel=1e-5)
    else:
        assert found["accuracy"] == pytest.approx(wanted)


class Largest(nnx.Metric):
    """A metric of one's own, whose order matters: the last batch in which the maximum was reached."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.most, self.at, self.seen = (nnx.metrics.MetricState(jnp.float32(x)) for x in (-np.inf, 0, 0))

    def update(self, *, logits, **_):
        larger = logits.max() >= self.most[...]
        self.at[...] = jnp.where(larger, self.seen[...], self.at[...])
        self.most[...] = jnp.maximum(self.most[...], logits.max())
        self.seen[...] += 1

    def compute(self):
        return {"most": self.most[...], "at": self.at[...]}


@pytest.mark.parametrize("cuts", CUTS)
def test_a_metric_of_ones_own_is_updated_in_the_order_of_the_data(cuts):
    given = [{"logits": np.full((2, 2), x, np.float32)} for x in (1, 3, 3, 2)]
    assert relayed(given, [2] * 4, Largest(), cuts) == {"most": 3.0, "at": 2.0}


@pytest.mark.parametrize("cuts", CUTS)
def test_metrics_with_merge_are_merged(cuts):
    found = relayed([Mean(np.float32(t), np.int32(n)) for t, n in [(6, 2), (4, 8), (2, 2)]], [2, 8, 2], None, cuts)
    assert found == {"mean": 1.0}


def test_nested_metrics_of_one_name_have_the_names_around_them():
    nested = {"train": {"loss": 1.0, "accuracy": 0.5}, "held": {"loss": 5.0}}
    assert named_floats(nested, "all") == {"train_loss": 1.0, "train_accuracy": 0.5, "held_loss": 5.0}
    assert named_floats({"train": {"loss": 1.0}, "held": {"accuracy": 0.5}}, "all") == {"loss": 1.0, "accuracy": 0.5}


def test_what_a_metric_function_may_return():
    loss, metrics = jnp.float32(2), {"a": 0.5, "b": Weighted(jnp.float32(3), jnp.float32(4))}
    assert outputs_of(loss) == outputs_of((loss, {})) == outputs_of({"loss": loss}) == {"loss": 2}
    assert outputs_of(2.0) == {"loss": 2}
    assert outputs_of(Weighted(loss, loss)) == {"loss": Weighted(2, 2)}
    assert outputs_of((loss, (metrics, {"mean": jnp.zeros(3)}))) == {"loss": 2, "a": 0.5, "b": Weighted(3, 4)}
    assert outputs_of((Weighted(loss, loss), metrics))["loss"] == Weighted(2, 2)
    assert outputs_of((loss, {"a": 0.5, "loss": 9.0})) == {"loss": 2, "a": 0.5}
    merging = Mean(loss, loss)
    assert outputs_of(merging) is merging


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (None, "metric_fn returned None; return a dict of means"),
        (jnp.zeros(3), "metric_fn returned .*; return a dict"),
        ({}, "metric_fn returned {}; return a dict"),
        ((1.0, 2.0), r"metric_fn returned \(1.0, 2.0\); return a dict"),
        (
            {"per_class": jnp.zeros(3)},
            r"'per_class' has shape \(3,\); .*: write per_class.mean\(\), or",
        ),
        ({"name": "x"}, "metric 'name' is a str; return"),
        ({1: 1.0}, "metric 1 has a name that is no text; write {'1': ...}"),
        ({"key": jax.random.key(0)}, "metric 'key' has dtype key<fry>; metrics are real numbers"),
        ({"z": jnp.complex64(1j)}, r"metric 'z' has dtype complex64; .*, e\.g\. jnp\.abs\(z\)"),
        ({"z": Weighted(jnp.complex64(1j), 1.0)}, "metric 'z' has dtype complex64"),
        ({"nested": {"a": 1.0}}, "metric 'nested' is a dict; return"),
    ],
)
def test_other_results_are_refused(result, message):
    with pytest.raises(ValueError, match=message):
        outputs_of(result)


def test_other_functions_and_arguments_are_refused():
    with pytest.raises(ValueError, match="metric_fn='accuracy' is not a function; write def metric_fn"):
        as_metric("accuracy")
    with pytest.raises(ValueError, match=r"metric_fn takes \(params\); write def metric_fn\(params, batch\)"):
        as_metric(lambda params: 0.0)
    with pytest.raises(ValueError, match="with metrics= it returns the arguments of their update"):
        arguments_of(jnp.zeros(3))
    with pytest.raises(ValueError, match=r"metric 'confusion' computes an array of shape \(2, 2\)"):
        named_floats({"confusion": jnp.zeros((2, 2))}, "multi")


def test_a_metric_function_gets_what_it_names():
    call = as_metric(lambda params, batch, rng: (params, batch, rng))
    assert call(1, 2, 3, 4) == (1, 3, 4)
    assert as_metric(lambda params, batch, model_state: (params, batch, model_state))(1, 2, 3, 4) == (1, 3, 2)
    assert as_metric(lambda *given: given)(1, 2, 3, 4) == (1, 3)
