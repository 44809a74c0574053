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
# # Stages
#
# A model too large for one device is cut into stages on several. The stages wait for each other, unless the batch is cut
# too, into micro-batches that pass through the stages one after the other. Their order is a schedule, which can be drawn and
# simulated.
#
# **Needs** `pip install '.[plot]' ipykernel` in a clone and a fresh kernel. Each of four fake devices has one stage.

# %%
import jaxche

devices = jaxche.fake_devices(4)  # before the first array; raises an error if JAX has started

# %%
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxche.drawing import COLOURS, figure_of, label_outside
from jaxche.stages import Pace, gpipe, one_f_one_b, simulate_schedule

# %% [markdown]
# ## Schedules on paper
#
# Four stages, eight micro-batches; a backward takes twice as long as a forward. **One batch, not cut**: three of four devices
# always wait.

# %%
simulate_schedule(gpipe(4, 1), forward=[8] * 4, backward=[16] * 4)

# %% [markdown]
# **GPipe**: all forwards, then all backwards. The bubble is $(S-1)/(M+S-1)$ of the time for $S$ stages and $M$ micro-batches, and
# every stage keeps the activations of all of them.

# %%
simulate_schedule(gpipe(4, 8), forward=[1] * 4, backward=[2] * 4)

# %% [markdown]
# **1F1B**: one forward, one backward. It takes as long, and stage $s$ keeps the activations of at most $S - s$ micro-batches.
# Both make the same gradients, bit for bit.

# %%
simulate_schedule(one_f_one_b(4, 8), forward=[1] * 4, backward=[2] * 4)

# %% [markdown]
# One slow stage delays all others. So balance stages by their times, not by their numbers of layers.

# %%
simulate_schedule(one_f_one_b(4, 8), forward=[1, 1, 2, 1], backward=[2, 2, 4, 2])

# %%
layers = [3.0, 1.0, 1.0, 1.0, 2.0, 1.0, 4.0, 1.0]  # ms of each layer, as jaxche.stages.measure_costs finds them
cuts = jaxche.stages.balance_stages(layers, speeds=[1, 1, 1, 1])
cuts

# %% [markdown]
# ## The same, measured
#
# Four stages of a small network. To imitate devices of known speed on one processor, every forward task is padded to 4 ms and
# every backward task to 8 ms. Threads, transfers and sums are those of real training.

# %%
WIDTH, ROWS = 32, 8
pace = Pace(forward_ms=4.0, backward_ms=8.0)


def first(params, batch):
    return jnp.tanh(batch["x"] @ params["w"])


def hidden(params, x):
    return jnp.tanh(x @ params["w"])


def loss(y, batch):
    return jnp.mean((y - batch["x"]) ** 2)


params = [{"w": jax.random.normal(jax.random.key(i), (WIDTH, WIDTH)) / WIDTH**0.5} for i in range(4)]


def measure(micro_batches, schedule):
    """Milliseconds of a step, and the micro-batches each stage kept."""
    batch = {"x": np.random.default_rng(0).normal(size=(ROWS * micro_batches, WIDTH)).astype(np.float32)}
    protocol = jaxche.Pipeline(ROWS, schedule)
    model = jaxche.Partitioned([first, hidden, hidden, hidden], loss, protocol, paces=[pace] * 4)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        jax.block_until_ready(model.value_and_grad(params, batch))
        times.append(1e3 * (time.perf_counter() - start))
    model.close()
    return float(np.median(times[1:])), model.peak_activations


MICRO_BATCHES = (1, 2, 4, 8, 16)
rows = []
for micro_batches in MICRO_BATCHES:
    for name, schedule in (("gpipe", gpipe), ("1f1b", one_f_one_b)):
        promised = simulate_schedule(schedule(4, micro_batches), [pace.forward_ms] * 4, [pace.backward_ms] * 4)
        took, peak = measure(micro_batches, name)
        rows.append((name, micro_batches, promised, took, peak))

print(f"{'schedule':10}{'micro-batches':>14}{'theory ms':>11}{'measured ms':>13}{'ratio':>7}   activations kept")
for name, micro_batches, promised, took, peak in rows:
    ratio = took / promised.makespan
    print(f"{name:10}{micro_batches:14}{promised.makespan:11.0f}{took:13.1f}{ratio:7.2f}   {' '.join(map(str, peak))}")

# %%
with figure_of([["bubble", "kept"]], heights=[2.5]) as (figure, axes):
    m = np.linspace(1, 16, 100)
    axes["bubble"].plot(m, 100 * 3 / (m + 3), color="black", ls=":", label="theory, (S - 1) / (M + S - 1)")
    for (name, marker), colour in zip((("gpipe", "o"), ("1f1b", "x")), COLOURS, strict=False):
        own = [row for row in rows if row[0] == name]
        work = pace.forward_ms + pace.backward_ms
        bubble = [100 * (1 - row[1] * work / row[3]) for row in own]
        axes["bubble"].plot(MICRO_BATCHES, bubble, marker, color=colour, label=f"{name}, measured")
        axes["kept"].plot(MICRO_BATCHES, [row[4][0] for row in own], marker + "-", color=colour, label=name)
    axes["bubble"].set(xlabel="micro-batches", ylabel="bubble (%)", title="Time in which a stage has nothing to do")
    axes["bubble"].set_ylim(0, 100)
    axes["bubble"].legend()
    axes["kept"].set(xlabel="micro-batches", ylabel="micro-batches kept", title="Activations on the first stage")
    label_outside(axes["kept"])
figure

# %% [markdown]
# ## Train it
#
# Loss and gradients are those of the whole model under each protocol. Each stage has its optimizer state on its own device.
# `Direct` sends whole batches from device to device, and `Pipeline` micro-batches. `DataStore` connects stages in processes that
# share only a folder or a bucket.

# %%
batch = {"x": np.random.default_rng(1).normal(size=(64, WIDTH)).astype(np.float32)}
for protocol in (jaxche.Direct(), jaxche.Pipeline(micro_batch_size=8)):
    model = jaxche.Partitioned([first, hidden, hidden, hidden], loss, protocol)
    state = model.init(params, optax.adam(3e-3))
    for _ in range(100):
        state, value = model.step(state, batch)
    model.close()
    print(f"{protocol!s:38} loss after {state.step} steps: {float(value):.6f}")

# %% [markdown]
# On the command line: `jaxche train --task text --protocol pipeline`.
