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
# # Noise scale and learning rates
#
# How large may a batch be, and how much longer a step does it allow? Both follow from the noise of the gradient, which jaxche
# measures during training, from the gradients of the replicas.
#
# **Needs** `pip install '.[examples]' ipykernel` in a clone and a fresh kernel.

# %%
import jaxche

devices = jaxche.fake_devices(4)  # before the first array; raises an error if JAX has started

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from jaxche.drawing import COLOURS, figure_of, label_outside, logarithmic

images, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(images))
x, y = (images[order] / 16).astype(np.float32), labels[order].astype(np.int32)
train, held_out = {"x": x[:1440], "y": y[:1440]}, {"x": x[1440:], "y": y[1440:]}


def loss_fn(params, batch):
    hidden = jax.nn.relu(batch["x"] @ params["w1"] + params["b1"])
    logits = hidden @ params["w2"] + params["b2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


k1, k2 = jax.random.split(jax.random.key(0))
params = {
    "w1": jax.random.normal(k1, (64, 64)) / 8,
    "b1": jnp.zeros(64),
    "w2": jax.random.normal(k2, (64, 10)) / 8,
    "b2": jnp.zeros(10),
}

# %% [markdown]
# ## Measure it by hand
#
# Gradients of several small batches at the same parameters: their mean is the signal, their spread is the noise. With a
# batch of $b$ examples, the squared norm of a gradient is $|G|^2 + \operatorname{tr}\Sigma / b$; the *critical batch size*
# $\operatorname{tr}\Sigma / |G|^2$ is where both are equal. Well below it, twice the batch needs half the steps. Well above it,
# a larger batch saves hardly any steps.

# %%
BASE = 16
stacked = jax.jit(
    lambda p, batches: jax.vmap(lambda batch: jax.grad(loss_fn)(p, batch))(batches)
)  # gradients of 8 batches: leaves [8, ...]
data = jaxche.Batches(train, batch_size=BASE, seed=0)
update = jax.jit(lambda noise, grads: jaxche.noise_scale.update(noise, grads, [BASE] * 8))

noise = jaxche.noise_scale.init(params, base_batch_size=BASE)
for i in range(0, 80, 8):
    batches = jax.tree.map(lambda *leaves: np.stack(leaves), *(data[i + k] for k in range(8)))
    noise = update(noise, stacked(params, batches))
print(f"signal {noise.sqr:.4f}, noise of a batch of {BASE} {noise.var:.4f}")
print(f"critical batch size at the start: {noise.critical_batch_size:.0f} examples")

# %% [markdown]
# ## Scaling rules
#
# A rule computes a factor on the learning rate from the batch and the noise. `AdaScale` (SGD) and `AdamScale` follow the measured
# gain, so their factor stops growing where a larger batch no longer helps. Linear and square-root scaling ignore the noise.

# %%
scales = np.array([1, 2, 4, 8, 16, 32, 64])
rules = {
    "LinearScale": jaxche.LinearScale(),
    "AdaScale": jaxche.AdaScale(),
    "SqrtScale": jaxche.SqrtScale(),
    "AdamScale": jaxche.AdamScale(),
}
with figure_of([["factor", "gain"]], heights=[2.6]) as (figure, axes):
    for (name, rule), colour in zip(rules.items(), COLOURS, strict=False):
        factors = [float(rule.lr_factor(scale=float(s), noise=noise, progress=0.0)) for s in scales]
        axes["factor"].plot(scales * BASE, factors, "o-", ms=3, color=colour, label=name)
    axes["factor"].set(xlabel="batch (examples)", title="Factor on the learning rate")
    gains = [float(noise.gain(float(s))) for s in scales]
    axes["gain"].plot(scales * BASE, gains, "o-", ms=3, color=COLOURS[2], label="gain")
    axes["gain"].plot(scales * BASE, scales, color="0.5", ls=":", label="without a limit")
    axes["gain"].axvline(float(noise.critical_batch_size), color="black", ls="--", lw=1, label="critical batch")
    axes["gain"].set(xlabel="batch (examples)", title="Base steps that a step is worth")
    for panel in axes.values():
        logarithmic(panel.xaxis)
        logarithmic(panel.yaxis)
    axes["factor"].legend()
    axes["gain"].legend()
figure

# %% [markdown]
# ## In training
#
# The learning rate below was chosen for one device with batches of 16. Four replicas average their gradients: each
# update sees 64 examples. At the same rate each update is too short for such a batch; a rule scales it by the batch and the
# measured noise. Only updates count here, so times are those of a virtual fleet.

# %%
RATE, EPOCHS = 0.05, 6


def run(replicas, **options):
    fleet = jaxche.VirtualFleet([5.0] * replicas)
    trainer = jaxche.Trainer(
        loss_fn, optax.sgd(RATE), policy="sync", rows="equal", replicas=devices[:replicas], fleet=fleet, **options
    )
    state = trainer.init(params)
    state, history = trainer.fit(state, jaxche.Batches(train, BASE, seed=0), epochs=EPOCHS, progress=False)
    return trainer, state, history


runs = {
    "one device": run(1),
    "four, same rate": run(4),
    "four, AdaScale": run(4, scaling=jaxche.AdaScale()),
    "four, LinearScale": run(4, scaling=jaxche.LinearScale()),
}
print(f"{f'{EPOCHS} epochs':20}{'updates':>10}{'held-out loss':>15}")
for name, (trainer, state, history) in runs.items():
    updates = sum(max(info.counts) for info in history)
    print(f"{name:20}{updates:10}{float(loss_fn(trainer.params(state), held_out)):15.3f}")

# %%
with figure_of([["loss"]], heights=[2.4]) as (figure, axes):
    for (name, (_, _, history)), colour in zip(runs.items(), COLOURS, strict=False):
        examples = np.cumsum([info.examples for info in history])
        loss = np.array([info.loss for info in history])
        window = max(1, len(loss) // 20)
        smooth = np.convolve(loss, np.ones(window) / window, "valid")
        axes["loss"].plot(examples[window - 1 :], smooth, color=colour, label=name, lw=1.5)
    logarithmic(axes["loss"].yaxis)
    axes["loss"].set(xlabel="examples trained on", ylabel="loss", title="The same examples, updates of 16 or of 64")
    label_outside(axes["loss"])
figure

# %% [markdown]
# With a quarter of the updates the scaled runs reach the loss of the single device, or nearly. Four times the batch is still
# below the critical one, so `LinearScale` works here; `AdaScale` measures that, and takes shorter steps. The picture of its run
# has the noise and the gain of a step:

# %%
trainer, state, history = runs["four, AdaScale"]
history.plot()

# %% [markdown]
# ## How large should the batch be?
#
# From noise, speeds and the cost of a merge, `history.advice()` computes the best batch and prints the line to write:

# %%
history.advice()
