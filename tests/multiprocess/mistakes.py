"""The mistakes of newcomers, each with the argument that its error names and a part of the line to write.

``tests/training/test_mistakes.py`` makes them in one process. As a program, run by ``jaxche launch``, this file makes
them in each of two processes and writes what came.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

import jaxche

if __name__ == "__main__":
    jaxche.initialize()

X = np.linspace(0, 1, 16 * 3, dtype=np.float32).reshape(16, 3)
ARRAYS = {"x": X, "y": X[:, :1]}
DATA = jaxche.Batches(ARRAYS, batch_size=4)
LINEN = nn.Dense(1)
VARIABLES = LINEN.init(jax.random.key(0), X)
PARAMS = VARIABLES["params"]


def error_of(apply, batch):
    return (apply(batch["x"]) - batch["y"]) ** 2


def loss_fn(params, batch):
    return error_of(lambda x: LINEN.apply({"params": params}, x), batch).mean()


def model():
    return nnx.Linear(3, 1, rngs=nnx.Rngs(0))


def trainer(loss=loss_fn, tx=None, **options):
    return jaxche.Trainer(loss, optax.sgd(0.1) if tx is None else tx, replicas=jaxche.devices()[:2], **options)


def fit(loss=loss_fn, data=DATA, params=PARAMS, model_state=None, **options):
    one = trainer(loss)
    return one.fit(one.init(params, model_state), data, **{"progress": False} | options)


def fit_nnx(loss, *more):
    door = jaxche.NNXLoss(model(), loss, *more)
    return fit(door, params=door.params, model_state=door.model_state)


def batches(**entries):
    return [ARRAYS | entries]


def with_number(number):
    x = X.copy()
    x[9, 1] = number
    return jaxche.Batches(ARRAYS | {"x": x}, batch_size=4, seed=None)


def with_metric(value):
    return lambda params, batch: (loss_fn(params, batch), {"metric": value(error_of(lambda x: x[:, :1], batch))})


def closed_over_rngs():
    rngs = nnx.Rngs(0)
    return fit_nnx(lambda model, batch: error_of(model, batch).mean() * jax.random.uniform(rngs.dropout()))


def closed_over_metric():
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))

    def loss(model, batch):
        value = error_of(model, batch).mean()
        metrics.update(loss=value)
        return value

    return fit_nnx(loss)


def norm_over_an_axis():
    module = nn.BatchNorm(use_running_average=False, axis_name="batch")
    variables = nn.BatchNorm(use_running_average=False).init(jax.random.key(0), X)
    loss = jaxche.linen_loss(module, lambda apply, batch: apply(batch["x"]).mean())
    return fit(loss, params=variables["params"], model_state={"batch_stats": variables["batch_stats"]})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class EquinoxLike:
    weight: Any = dataclasses.field(default_factory=lambda: jnp.ones(3))
    activation: Any = jax.nn.relu

    def __call__(self, x):
        return self.activation(x @ self.weight)


class KerasLike:
    trainable_variables = (np.ones(3, np.float32),)

    def __call__(self, x):
        return x


class Tensor:
    """Like one of torch: an array for NumPy, and none for JAX."""

    shape, dtype = (16, 3), "torch.float32"

    def __len__(self):
        return 16

    def __array__(self, dtype=None, copy=None):
        return X


class Loader:
    """Like a DataLoader or a tf.data.Dataset: a length, and no indices."""

    def __iter__(self):
        return iter([ARRAYS])

    def __len__(self):
        return 1


class Images:
    """Like a data set of torch, whose indices are those of examples."""

    def __len__(self):
        return 16

    def __getitem__(self, i):
        return X[i], 3


Images.__module__ = "torch.utils.data.dataset"


def other_trainer():
    adam = trainer(tx=optax.adam(0.1))
    return adam.fit(trainer().init(PARAMS), DATA)


def under_jit():
    one = trainer()
    state = one.init(PARAMS)
    return jax.jit(lambda x: one.fit(state, DATA)[1][-1].loss + x)(1.0)


def train_state():
    return TrainState.create(apply_fn=LINEN.apply, params=PARAMS, tx=optax.sgd(0.1))


def with_state(state, batch):
    return error_of(lambda x: state.apply_fn({"params": state.params}, x), batch).mean()


def with_number_of(params, batch):
    loss = loss_fn(params, batch)
    return loss, {"loss": float(loss)}


def optimizer():
    return nnx.Optimizer(model(), optax.sgd(0.1), wrt=nnx.Param)


# (name, what to do, the argument or value that the error names, a part of what to write)
MISTAKES = [
    ("loss per example", lambda: fit(lambda p, b: p["kernel"][:, 0]), "loss of shape (3,)", "return loss.mean()"),
    ("loss of shape (1, 1)", lambda: fit(lambda p, b: p["bias"][None]), "loss of shape (1, 1)", "return loss.mean()"),
    ("metric per class", lambda: fit(with_metric(lambda e: e[:3, 0])), "'metric' has shape (3,)", "metric.mean()"),
    # Streams, which one process takes as they are.
    (
        "generator for two epochs",
        lambda: fit(data=(b for b in [ARRAYS]), epochs=2),
        "can be read once",
        "lambda epoch:",
    ),
    (
        "stream of texts",
        lambda: fit(data=jaxche.Stream([{"x": ["a"]}], shards=False)),
        "batch['x'] is texts",
        "Leave it",
    ),
    ("number as stream", lambda: jaxche.Stream(3), "source is an int", "jaxche.Stream(lambda epoch:"),
    ("empty list", lambda: fit(data=[]), "len(data) is 0", "at least one batch"),
    ("epochs=0", lambda: fit(epochs=0), "epochs=0", "epochs=3"),
    ("misspelt policy", lambda: trainer(policy="synch"), "'synch'", "sync"),
    ("optimizer not called", lambda: trainer(tx=optax.sgd), "tx=<function sgd>", "tx=optax.sgd("),
    ("name of an optimizer", lambda: trainer(tx="adam"), "tx='adam'", "tx=optax.adam("),
    ("optax.lbfgs", lambda: trainer(tx=optax.lbfgs()), "tx searches along its direction", "linesearch=None"),
    ("learning rate as tx", lambda: trainer(tx=0.1), "tx=0.1", "tx=optax.adam("),
    ("scalar in a batch", lambda: fit(data=batches(scale=1.0)), "['scale'] is a scalar", "np.full(n, x)"),
    ("unequal axes", lambda: fit(data=batches(y=X[:5])), "['y']: 5", "the same examples"),
    ("integers in params", lambda: fit(params=PARAMS | {"n": np.arange(3)}), "params['n'] is int", "model_state="),
    ("NaN in the data", lambda: fit(data=with_number(np.nan)), "NaN in ['x'] of batch 2 of epoch 0 (row 1)", "nan_to"),
    ("Inf in the data", lambda: fit(data=with_number(np.inf)), "infinity in ['x'] of batch 2", "nan_to_num"),
    ("NNXLoss of linen", lambda: jaxche.NNXLoss(LINEN, loss_fn), "model=Dense(...)", "jaxche.linen_loss("),
    ("linen_loss of nnx", lambda: jaxche.linen_loss(model(), loss_fn), "module=Linear(...)", "jaxche.NNXLoss("),
    ("nnx.Optimizer as tx", lambda: trainer(tx=optimizer()), "tx is an Optimizer", "tx=optimizer.tx"),
    ("linen module as loss", lambda: trainer(LINEN), "loss_fn is a model, Dense(...)", "jaxche.linen_loss(module"),
    ("nnx model as loss", lambda: trainer(model()), "loss_fn is a model, Linear(...)", "jaxche.NNXLoss(model"),
    ("strings", lambda: fit(data=batches(text=np.array(["a"] * 16))), "['text'] of a batch is <U1[16]", "np.int32"),
    ("list of strings", lambda: fit(data=batches(text=["a"] * 16)), "['text'][0] of a batch is 'a'", "np.int32"),
    ("torch tensors", lambda: fit(data=batches(x=Tensor())), "['x'] of a batch is a Tensor", "np.asarray(x)"),
    ("nested metrics", lambda: fit(with_metric(lambda e: {"a": e.mean()})), "'metric' is a dict", '"metric_a"'),
    ("string metric", lambda: fit(with_metric(lambda e: "good")), "'metric' is 'good'", "leave it out"),
    ("no return", lambda: fit(lambda p, b: None), "loss_fn returned None", "return loss"),
    ("TrainState", lambda: fit(with_state), "loss_fn reads .apply_fn", "trainer.init(state.params"),
    ("unknown third", lambda: trainer(lambda p, b, dropout: 0.0), "'dropout'", "def loss_fn(params, batch, rng)"),
    ("rngs of linen", lambda: trainer(lambda p, b, rngs: 0.0), "'rngs'", "def loss_fn(params, batch, rng)"),
    ("one argument", lambda: trainer(lambda batch: 0.0), "loss_fn takes (batch)", "def loss_fn(params, batch)"),
    ("closed over Rngs", closed_over_rngs, "RngCount", "def loss_fn(model, batch, rngs)"),
    ("closed over MultiMetric", closed_over_metric, "MetricState", 'return loss, {"accuracy": accuracy}'),
    ("axis of pmap", norm_over_an_axis, "axis 'batch'", "nn.BatchNorm(use_running_average=False)"),
    (
        "pmean",
        lambda: fit(lambda p, b: jax.lax.pmean(loss_fn(p, b), "batch")),
        "axis 'batch'",
        "leave out jax.lax.pmean",
    ),
    ("dict of arrays as data", lambda: fit(data=ARRAYS), "data is a dict of 'x', 'y'", "jaxche.Batches(arrays"),
    ("array as data", lambda: fit(data=X), "data is one array of shape (16, 3)", "jaxche.Batches(array"),
    (
        "all variables",
        lambda: fit(params=VARIABLES | {"batch_stats": {"mean": X}}),
        "'batch_stats'",
        'variables["params"]',
    ),
    ("key missing", lambda: fit(data=[ARRAYS, ARRAYS, {"x": X}]), "batch 2 of epoch 0 has ['x']", "add ['y']"),
    ("nnx model as params", lambda: trainer().init(model()), "params is an nnx model", "jaxche.NNXLoss(model"),
    ("linen module as params", lambda: trainer().init(LINEN), "params is a linen module", "module.init("),
    (
        "init itself as params",
        lambda: trainer().init(LINEN.init),
        "params=<method Module.init>",
        "trainer.init(lambda: module",
    ),
    (
        "TrainState as params",
        lambda: trainer().init(train_state()),
        "params is a TrainState",
        "trainer.init(state.params",
    ),
    ("Equinox as params", lambda: trainer().init(EquinoxLike()), "params.activation is a function", "eqx.partition("),
    ("Keras as params", lambda: trainer().init(KerasLike()), "params is a model", "model.trainable_variables"),
    ("fit(params)", lambda: trainer().fit(PARAMS, DATA), "state={", "state = trainer.init(params)"),
    (
        "fit(TrainState)",
        lambda: trainer().fit(train_state(), DATA),
        "state=TrainState(...)",
        "trainer.init(train_state.p",
    ),
    ("fit of what fit returned", lambda: trainer().fit(fit(), DATA), "state=(", "state, history = trainer.fit("),
    ("state of another", other_trainer, "state is of a trainer with another tx", "trainer.replace(state, opt_state="),
    ("fit under jit", under_jit, "trainer.fit was called inside", "outside"),
    ("float of the loss", lambda: fit(with_number_of), "loss_fn needs the number", 'return loss, {"loss": loss}'),
    ("arity of a callback", lambda: fit(callbacks=[lambda info: None]), "callbacks[0] takes (info)", "(state, info)"),
    (
        "callback alone",
        lambda: fit(callbacks=print),
        "callbacks=<builtin_function_or_method print>",
        "callbacks=[print]",
    ),
    ("class as callback", lambda: fit(callbacks=[jaxche.LivePlot]), "callbacks[0]=LivePlot", "callbacks=[LivePlot()]"),
    (
        "array of a callback",
        lambda: fit(callbacks=[print, lambda state, info: jnp.ones(2)]),
        "callbacks[1] returned",
        "return bool((values < limit).all())",
    ),
    (
        "metric without a name",
        lambda: fit(lambda p, b: (loss_fn(p, b), 0.5)),
        "without a name",
        '{"accuracy": accuracy}',
    ),
    ("logits", lambda: fit(lambda p, b: (loss_fn(p, b), b["x"])), "returned float32[4, 3] beside", "outputs=lambda"),
    (
        "three results",
        lambda: fit(lambda p, b: (loss_fn(p, b), {}, {})),
        "a tuple of 3",
        "return loss or (loss, metrics)",
    ),
    ("weights per token", lambda: fit(lambda p, b: jaxche.Weighted(1.0, X)), "weight of the loss", "mask.sum()"),
    ("data set of torch", lambda: fit(data=Images()), "data[i] is one example", "torch.utils.data.DataLoader(dataset"),
    ("name of a file as data", lambda: fit(data="train.npz"), "data='train.npz' is a text", "jaxche.Batches(arrays"),
    ("negative seed", lambda: jaxche.Batches(ARRAYS, 4, seed=-1), "seed=-1 must be at least 0", "seed=None"),
    (
        "schedule as tx",
        lambda: trainer(tx=optax.linear_schedule(0.1, 0.0, 9)),
        "tx=<function",
        "adam(learning_rate=sch",
    ),
    (
        "number of replicas",
        lambda: jaxche.Trainer(loss_fn, optax.sgd(0.1), replicas=2),
        "replicas=2 is not a list",
        "replicas=jaxche.devices()[:2]",
    ),
    (
        "evaluate, swapped",
        lambda: trainer().evaluate(DATA, None),
        "state=Batches(",
        "then trainer.evaluate(state, ...)",
    ),
    ("params of parameters", lambda: trainer().params(PARAMS), "state={", "state = trainer.init(params)"),
    ("outputs of nothing", lambda: trainer(outputs=[]), "outputs=[] is not a function", "outputs=lambda info, batches"),
]

WORKS = {
    "generator": lambda: fit(data=(b for b in [ARRAYS])),
    "DataLoader": lambda: fit(data=Loader()),
    "tf.data": lambda: fit(data=map(dict, [ARRAYS])),
    "random key": lambda: fit(lambda params, batch, key: loss_fn(params, batch) + 0 * jax.random.uniform(key)),
    "rngs of nnx": lambda: fit_nnx(lambda model, batch, rngs: error_of(model, batch).mean() * rngs.params.normal(())),
    "params of linen": lambda: fit(
        jaxche.linen_loss(LINEN, lambda apply, batch, params: error_of(apply, batch).mean() + optax.tree.norm(params))
    ),
    "varying batches": lambda: fit(data=[jax.tree.map(lambda x, n=n: x[:n], ARRAYS) for n in (3, 5, 3, 2)]),
    "last partial batch": lambda: fit(data=jaxche.Batches(ARRAYS, 5)),
    "None leaf": lambda: fit(data=[ARRAYS | {"mask": None}] * 2),
    "float64": lambda: fit(data=jaxche.Batches(jax.tree.map(np.float64, ARRAYS), 4)),
}


def came(do):
    """The error, as its type and message."""
    try:
        do()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return ["none", ""]


def main(folder):
    rank = jax.process_index()
    found = {name: came(do) for name, do, *_ in MISTAKES}

    # What one process alone does wrong.
    def wrong(params, batch):
        return None

    alone = {
        "loss": came(lambda: fit(wrong if rank else loss_fn)),
        "data": came(lambda: fit(data=[] if rank else DATA)),
        "batch": came(lambda: fit(data=[{"x": X}] * 4 if rank else DATA)),
        "callbacks": came(lambda: fit(callbacks=[lambda info: None] if rank else [])),
    }
    Path(folder, f"{rank}.json").write_text(json.dumps({"found": found, "alone": alone}))


if __name__ == "__main__":
    main(sys.argv[1])
