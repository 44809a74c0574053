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
# # Sharding and memory
#
# The memory that a training step needs on each device, and the bytes that it sends, under every strategy, before anything is
# trained. Then *islands*: replicas that are sharded themselves, and train at their own speeds.
#
# **Needs** `pip install '.[plot]' ipykernel` in a clone and a fresh kernel. Eight fake devices of the processor stand for two
# nodes of four: shapes, bytes and collectives are those of real ones, speeds are not.

# %%
import jaxche

devices = jaxche.fake_devices(8)  # before the first array; raises an error if JAX has started

# %%
import jax
import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import HTML

# %% [markdown]
# ## What each device stores
#
# `strategy.draw` shows which part of parameters, gradients and optimizer state each device stores.

# %%
strategies = [jaxche.NoShard(), jaxche.ShardGradOp(), jaxche.FullShard(), jaxche.HybridShard(intra_node_size=4)]
HTML("<br>".join(strategy.draw(strategy.mesh(devices)) for strategy in strategies))

# %% [markdown]
# ## A model to shard
#
# Six residual blocks as plain functions; for linen and nnx models use `linen_loss` and `NNXLoss`.

# %%
WIDTH, DEPTH, CLASSES = 128, 6, 10


def init(key):
    keys = jax.random.split(key, 2 * DEPTH + 1)
    blocks = [
        {
            "up": jax.random.normal(keys[2 * i], (WIDTH, 4 * WIDTH)) / WIDTH**0.5,
            "down": jax.random.normal(keys[2 * i + 1], (4 * WIDTH, WIDTH)) / (4 * WIDTH) ** 0.5,
        }
        for i in range(DEPTH)
    ]
    return {"blocks": blocks, "out": jax.random.normal(keys[-1], (WIDTH, CLASSES)) / WIDTH**0.5}


def loss_fn(params, batch):
    x = batch["x"]
    for block in params["blocks"]:
        x = x + 0.1 * jax.nn.relu(x @ block["up"]) @ block["down"]
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], batch["y"]).mean()


tx = optax.adamw(1e-3)
shapes = jax.eval_shape(init, jax.random.key(0))  # no array is made
batch = {"x": jax.ShapeDtypeStruct((64, WIDTH), jnp.float32), "y": jax.ShapeDtypeStruct((64,), jnp.int32)}
f"{sum(x.size for x in jax.tree.leaves(shapes)):,} parameters"

# %% [markdown]
# ## The cost of each strategy
#
# Each step is compiled, and none is run. The bytes are those of the compiled program, beside the theoretical ones. With
# `memory=` the table shows which strategies fit, and recommends one.

# %%
costs = jaxche.sharding.compare_strategies(loss_fn, tx, shapes, batch, devices=devices, memory="8MiB")
costs

# %% [markdown]
# One strategy in detail, with the parameters that are not sharded, and the reason:

# %%
jaxche.sharded_step(loss_fn, tx, jaxche.FullShard(min_size=4096), jaxche.FullShard().mesh(devices)).explain(
    shapes, batch
)

# %% [markdown]
# The table as a picture: the memory of a device under each strategy.

# %%
from jaxche.drawing import COLOURS, figure_of, label_outside

kinds = {"params": "parameters", "gradients": "gradients", "opt_state": "optimizer state", "temporaries": "activations"}
with figure_of([["memory"]], heights=[2.3]) as (figure, axes):
    left = np.zeros(len(costs.rows))
    names = [row["strategy"] for row in costs.rows]
    for (kind, label), colour in zip(kinds.items(), COLOURS, strict=False):
        size = np.array([row[kind] for row in costs.rows]) / 2**20
        axes["memory"].barh(names, size, left=left, color=colour, label=label, edgecolor="white")
        left += size
    axes["memory"].axvline(8, color="black", ls="--", lw=1, label="8 MiB")
    axes["memory"].invert_yaxis()
    axes["memory"].set(xlabel="MiB a device", title="What a step keeps on each of eight devices")
    label_outside(axes["memory"])
figure

# %% [markdown]
# ## A sharded step
#
# `sharded_step` trains as one device does: the same loss and the same parameters, in slices.

# %%
mesh = jaxche.FullShard().mesh(devices)
step = jaxche.sharded_step(loss_fn, tx, jaxche.FullShard(), mesh)
state = step.init(lambda: init(jax.random.key(0)))  # each device makes its own slices
rng = np.random.default_rng(0)
x = rng.normal(size=(1024, WIDTH)).astype(np.float32)
data = jaxche.Batches({"x": x, "y": np.abs(x[:, :CLASSES]).argmax(1).astype(np.int32)}, batch_size=32)
for epoch in range(2):
    for i in range(len(data)):
        state, metrics = step(state, data.epoch(epoch)[i])
    print(f"epoch {epoch}: loss {metrics['loss']:.3f}")
jax.debug.visualize_array_sharding(state.params["blocks"][0]["up"])

# %% [markdown]
# ## Islands
#
# Two nodes of different speeds: inside a node parameters and optimizer state are sharded, and its devices take every step
# together. The nodes train at their own speeds, and one weighted mean merges them, slice by slice. Here one node takes 150 ms
# a step and the other 375 ms, on the clock of a virtual fleet.

# %%
islands = [jaxche.FullShard().mesh(devices[:4]), jaxche.FullShard().mesh(devices[4:])]
fleet = jaxche.VirtualFleet([150.0, 375.0], sync_ms=10.0)
trainer = jaxche.Trainer(loss_fn, tx, replicas=islands, strategy=jaxche.FullShard(), fleet=fleet)
state, history = trainer.fit(trainer.init(lambda: init(jax.random.key(0))), data, epochs=3, progress=False)
print(f"efficiency {history.efficiency:.0%}, counts of the last whole round {history[-2].counts}")
history.plot()

# %% [markdown]
# The memory table at the end comes from the compiled step: each device of an island stores a quarter of the state and a working
# copy of that quarter. Because of the copy, a round that fails does not change the state.
#
# On the command line, for a function that makes your model: `jaxche plan train.py:make_model --memory 16GiB`.
