"""A run over the workers of Ray: with Ray Train, or with plain actors (``--actors``).

It uses the cluster of RAY_ADDRESS, or starts Ray on this machine:

    pip install '.[ray]'
    python examples/ray_workers.py --workers 2
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from typing import Any

import ray
import ray.train
from ray.train import ScalingConfig
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.jax import JaxTrainer


def address() -> str:
    """A free port of this node, for process 0 of the run."""
    with socket.socket() as free:
        free.bind(("", 0))
        return f"{ray.util.get_node_ip_address()}:{free.getsockname()[1]}"


def train(coordinator: str, processes: int, process: int) -> dict[str, Any]:
    """What a script would do, with the three values that a launcher would set."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxche

    info = jaxche.initialize(coordinator, processes, process)
    x = np.random.default_rng(0).normal(size=(256, 4)).astype(np.float32)
    data = jaxche.Batches({"x": x, "y": x @ np.arange(4, dtype=np.float32)}, batch_size=8)
    trainer = jaxche.Trainer(lambda w, batch: jnp.mean((batch["x"] @ w - batch["y"]) ** 2), optax.sgd(0.05))
    state, history = trainer.fit(trainer.init(jnp.zeros(4)), data, epochs=4, progress=False)
    counts = [sum(column) for column in zip(*(round.counts for round in history), strict=True)]
    params = np.asarray(trainer.params(state)).tolist()
    return {"process": info.process_id, "loss": history[-1].loss, "batches": counts, "params": params}


def with_ray_train(workers: int) -> list[dict[str, Any]]:
    """The workers of Ray Train: rank 0 sends its address to the others."""

    def worker(config: dict[str, Any]) -> dict[str, Any]:
        context = ray.train.get_context()
        rank = context.get_world_rank()
        coordinator = broadcast_from_rank_zero(address() if rank == 0 else None)
        return train(coordinator, context.get_world_size(), rank)

    scaling = ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1})
    return [JaxTrainer(worker, scaling_config=scaling).fit().return_value]  # of rank 0


def with_actors(workers: int) -> list[dict[str, Any]]:
    """One actor a process."""

    @ray.remote(num_cpus=1)
    class Worker:
        def address(self) -> str:
            return address()

        def train(self, *values: Any) -> dict[str, Any]:
            return train(*values)

    actors = [Worker.remote() for _ in range(workers)]
    coordinator = ray.get(actors[0].address.remote())
    return ray.get([actor.train.remote(coordinator, workers, number) for number, actor in enumerate(actors)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--actors", action="store_true", help="plain actors in the place of Ray Train")
    args = parser.parse_args()
    here = {"num_cpus": args.workers, "include_dashboard": False, "_node_ip_address": "127.0.0.1"}
    ray.init(**({} if "RAY_ADDRESS" in os.environ else here))
    for result in (with_actors if args.actors else with_ray_train)(args.workers):
        print(json.dumps(result))
