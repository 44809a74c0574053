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
# # A fleet on paper
#
# What would the cadence do on *your* devices? You give the speeds of the replicas and the cost of a merge; a virtual clock adds
# up their times. The controller is that of real training.
#
# **Needs** `pip install '.[plot]' ipykernel` in a clone. It uses no JAX devices.

# %%
import numpy as np

import jaxche
from jaxche.cadence import Slowdown, VirtualFleet
from jaxche.drawing import COLOURS, figure_of, label_outside, logarithmic

# %% [markdown]
# ## Three devices of three speeds
#
# 20, 30 and 50 ms a batch, 8 ms a merge. The cadence starts without measurements, with two batches on each device.

# %%
fleet = VirtualFleet([20.0, 30.0, 50.0], sync_ms=8.0, jitter=0.02)
che = jaxche.ElChe(world_size=3, anchor=2, overhead_target=0.02, tuner="steady")
run = fleet.run(che, rounds=40)
run

# %%
run.plot()

# %% [markdown]
# The controller after the run: the *anchor* is the count of the slowest device. The others take more steps in the same time.

# %%
run.che

# %% [markdown]
# ## A slowdown
#
# In round 20 the fastest device becomes three times slower, as by another job on its node or a thermal limit. Every step time
# also varies by 5 %. The `steady` tuner uses medians of three reports: it ignores a single outlier, and follows a slowdown
# after two reports. The `seed` tuner is the original one, for comparison.

# %%
trouble = VirtualFleet([20.0, 30.0, 50.0], sync_ms=8.0, jitter=0.05, slowdown=Slowdown(rank=0, round=20, factor=3.0))
runs = {
    tuner: trouble.run(jaxche.ElChe(3, 2, overhead_target=0.02, tuner=tuner), rounds=60) for tuner in ("steady", "seed")
}
for tuner, done in runs.items():
    recovered = done.round_efficiency[25:].mean()
    print(f"{tuner:7} efficiency {done.efficiency:.1%}, after the slowdown {recovered:.1%}")
runs["steady"].plot()

# %% [markdown]
# ## The overhead target
#
# A low target means long rounds: merging and waiting take little time, but the replicas move far apart in between. A high one
# merges often. The plot has the efficiency of a run; the dashed line is the upper bound of equal batches, with merges that
# cost nothing.

# %%
targets = [0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5]
links = {"2 ms a merge": 2.0, "8 ms": 8.0, "40 ms": 40.0}
with figure_of([["efficiency", "anchor"]], heights=[2.4]) as (figure, axes):
    for (name, sync_ms), colour in zip(links.items(), COLOURS, strict=False):
        fleet = VirtualFleet([20.0, 30.0, 50.0], sync_ms=sync_ms)
        done = [fleet.run(jaxche.ElChe(3, 2, overhead_target=t, tuner="steady"), rounds=100) for t in targets]
        percent = [100 * t for t in targets]
        axes["efficiency"].plot(percent, [100 * d.efficiency for d in done], "o-", color=colour, ms=3)
        axes["anchor"].plot(percent, [d.che.anchor for d in done], "o-", color=colour, ms=3, label=name)
    axes["efficiency"].axhline(100 * done[0].equal_batch_limit, color="0.3", ls="--", lw=1)
    axes["efficiency"].set(xlabel="overhead target (%)", ylabel="efficiency (%)", title="What is used", ylim=(0, 105))
    axes["anchor"].set(xlabel="overhead target (%)", ylabel="batches", title="Anchor it settles at")
    for panel in axes.values():
        logarithmic(panel.xaxis)
    label_outside(axes["anchor"])
figure

# %% [markdown]
# ## Weights in a merge
#
# A merge is a weighted mean of replicas that took unequal numbers of steps: `"steps"` weights by steps, `"batch"` by the batch
# size, and `"fednova"` corrects for unequal numbers of steps. On shuffled data all three have the same optimum. If the data of
# the replicas differ, they do not: below, 40 batches of a round pull towards -1 and 10 towards +1. If every batch counts alike,
# the optimum is -0.6; if the data of both replicas count alike, it is 0.

# %%
counts, optima, rate = (40, 10), np.array([-1.0, 1.0]), 0.002


def settles_at(rule, p=None):
    weights, alpha = jaxche.merge_weights(rule, counts, p=p)
    x = 0.5
    for _ in range(500):
        ends = optima + (x - optima) * (1 - rate) ** np.array(counts)  # gradient descent on (x - optimum)^2 / 2
        x -= alpha * np.dot(weights, x - ends)
    return f"{'  '.join(f'{w:.2f}' for w in weights):>18}{alpha:14.2f}{x:13.2f}"


print(f"{'rule':26}{'weights':>18}{'step length':>14}{'settles at':>13}")
for rule in ("steps", "batch", "fednova"):
    print(f"{rule:26}{settles_at(rule)}")
print(f"{'fednova, p=(0.5, 0.5)':26}{settles_at('fednova', (0.5, 0.5))}")

# %% [markdown]
# ## Ten thousand ranks
#
# The controller runs on every host between two rounds, so its own time matters.

# %%
speeds = np.random.default_rng(0).uniform(20.0, 80.0, 10_000)
large = VirtualFleet(speeds, sync_ms=20.0, jitter=0.03).run(jaxche.ElChe(10_000, 4, tuner="steady"), rounds=20)
print(large)

# %% [markdown]
# On the command line: `jaxche simulate --ms 20,30,50 --sync-ms 8 --jitter 0.02 -o fleet.png`.
