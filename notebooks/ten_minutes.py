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
# One Flax model, two devices, one of them 2.5 times slower. We train it three ways and look at where the time goes.
#
# Needs `pip install 'jaxche[examples]'` and a fresh kernel. There is no second device here, so we ask JAX for two
# CPU devices and let the trainer pad each step to a *pace*: 4 ms on one, 10 ms on the other.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 2)
if len(jax.devices()) < 2 and jax.default_backend() == "cpu":
    raise RuntimeError("JAX had already started with one device: restart the kernel and run this cell first")

# %%
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from sklearn.datasets import load_digits

import jaxche

images, labels = load_digits(return_X_y=True)
images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
train = jaxche.Batches({"image": images[:1440], "label": labels[:1440]}, batch_size=16, seed=0)
len(train), jax.tree.map(np.shape, train[0])

# %% [markdown]
# ## A linen model
#
# A loss takes `(params, batch)`; `linen_loss` fills in parameters, batch statistics and dropout keys for modules that
# have them.


# %%
class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(16, (3, 3), strides=2)(x))
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.relu(nn.Dense(32)(x.reshape(len(x), -1)))
        return nn.Dense(10)(nn.Dropout(0.1, deterministic=not train)(x))


net = Net()


def loss_fn(apply, batch):
    logits = apply(batch["image"], train=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, {"accuracy": (logits.argmax(-1) == batch["label"]).mean()}


variables = net.init(jax.random.key(0), train[0]["image"], train=False)
params = variables.pop("params")


def test_accuracy(trainer, state):
    logits = net.apply({"params": trainer.params(state), **trainer.model_state(state)}, images[1440:], train=False)
    return float((logits.argmax(-1) == labels[1440:]).mean())


# %% [markdown]
# ## Three policies
#
# `sync` meets after every batch and runs at the pace of the slowest. `cadence` and `async` measure both devices and
# give the fast one more steps; everybody rejoins at one weighted mean.

# %%
results = {}
for policy in ("sync", "cadence", "async"):
    trainer = jaxche.Trainer(jaxche.linen_loss(net, loss_fn), optax.adam(2e-3), policy=policy, pace_ms=(4, 10))
    state = trainer.init(params, model_state=variables)
    state, history = trainer.fit(state, train, epochs=8, progress=False)
    results[policy] = trainer, state, history
    print(
        f"{policy:8} {history.seconds:5.1f} s   efficiency {history.efficiency:4.0%}   "
        f"test accuracy {test_accuracy(trainer, state):.3f}   last counts {history[-2].counts}"
    )

# %% [markdown]
# `efficiency` is the share of the devices' summed speed that was used. The table of a history shows its last rounds:

# %%
trainer, state, history = results["cadence"]
history

# %% [markdown]
# and its picture shows the cadence finding the devices' speeds, where each rank's time went, and the loss:

# %%
history.plot()

# %% [markdown]
# The cadence is a value: what it has learnt is in it.

# %%
state.che

# %% [markdown]
# ## The same with nnx


# %%
class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), strides=2, rngs=rngs)
        self.hidden, self.out = nnx.Linear(256, 32, rngs=rngs), nnx.Linear(32, 10, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.conv(x)).reshape(len(x), -1)
        return self.out(self.drop(nnx.relu(self.hidden(x))))


def nnx_loss_fn(model, batch):
    logits = model(batch["image"])
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()


loss = jaxche.NNXLoss(NNXNet(nnx.Rngs(0)), nnx_loss_fn)
trainer = jaxche.Trainer(loss, optax.adam(2e-3), pace_ms=(4, 10))
state, history = trainer.fit(trainer.init(loss.params, loss.model_state), train, epochs=8, progress=False)

model = loss.rebuild(trainer.params(state), trainer.model_state(state))
model.eval()
accuracy = float((model(images[1440:]).argmax(-1) == jnp.asarray(labels[1440:])).mean())
print(f"{history.seconds:.1f} s, efficiency {history.efficiency:.0%}, test accuracy {accuracy:.3f}")

# %% [markdown]
# ## A run replays
#
# The counts of its rounds are all a run needs to be repeated bit for bit.

# %%
again = trainer.init(loss.params, loss.model_state)
for info in jaxche.History.from_json(history.to_json()):
    again, _ = trainer.round(again, train, counts=info.counts)
jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), trainer.params(state), trainer.params(again)))
