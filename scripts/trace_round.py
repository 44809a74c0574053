"""Which modules one warm round of two replicas runs through, and how many functions of each.

    .venv/bin/python scripts/trace_round.py

A reader who follows a round has to open these files. The first rounds compile; the round that is traced does not.
"""

import collections
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxche

ROOT = Path(jaxche.__file__).parent


def mean_square(w, x):
    return jnp.mean((x @ w - 1.0) ** 2)


def traced_round():
    """The functions of jaxche that a warm round calls, by module."""
    functions, warm = collections.defaultdict(set), False

    def record(frame, event, _):
        path = Path(frame.f_code.co_filename)
        if warm and event == "call" and path.is_relative_to(ROOT):
            functions[str(path.relative_to(ROOT))].add(frame.f_code.co_qualname)

    # Before the threads of replicas start: a thread keeps the profile function that it starts with.
    threading.setprofile(record)
    sys.setprofile(record)
    try:
        data = jaxche.Batches(np.ones((64, 2), np.float32), batch_size=2)
        trainer = jaxche.Trainer(mean_square, optax.sgd(0.1), replicas=jaxche.fake_devices(2))
        state = trainer.init(jnp.zeros(2))
        for _ in range(2):
            state, _ = trainer.round(state, data, counts=(3, 2))
        warm = True
        trainer.round(state, data)
    finally:
        warm = False
        sys.setprofile(None)
        threading.setprofile(None)
    return functions


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)
    found = traced_round()
    for module, names in sorted(found.items()):
        print(f"{module:36s} {len(names):3d}  {', '.join(sorted(names))}"[:160])
    print(f"{len(found)} modules, {sum(map(len, found.values()))} functions")
