"""A script of two processes, in which one of them does something alone: the first argument says what."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxche
from jaxche.distributed import _group

jaxche.initialize()
_group._POLL_MS, _group._EXIT_MS = 200, 2_000

what, first = sys.argv[1], jax.process_index() == 0
data = jaxche.Batches(np.ones((64, 3), np.float32), batch_size=4)
if what == "one stage ends":
    stages = [lambda w, x: x @ w, lambda w, y: y @ w]
    model = jaxche.Partitioned(
        stages, lambda y, x: jnp.mean((y - 1) ** 2), jaxche.Pipeline(2), local_stages=[jax.process_index()]
    )
    stage_state = model.init([jnp.ones((3, 3)), jnp.ones((3, 1))], optax.sgd(0.1))
    for _ in range(3 if first else 2):
        stage_state, _ = model.step(stage_state, data[0])
    sys.exit()
trainer = jaxche.Trainer(lambda w, x: jnp.mean((x @ w - 1) ** 2), optax.sgd(0.1))


def callback(state, info):
    if info.round == 1 and (what == "all exit" or (what == "one exits" and not first)):
        sys.exit(3)
    if info.round == 1 and what == "one evaluates in a callback" and first:
        trainer.evaluate(state, data)


state, _ = trainer.fit(trainer.init(jnp.zeros(3)), data, epochs=2, callbacks=[callback], progress=False)
if what == "one evaluates" and first:
    trainer.evaluate(state, data)
