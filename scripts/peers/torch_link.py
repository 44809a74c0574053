"""A process of slow_link.py that trains with torchft: DiLoCo, and Streaming DiLoCo in two fragments."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

# The script's folder is that of this file; its neighbours are found from the one above.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from peers.task import Pace
from slow_link import sent_bytes

# The fragments of an arm. With two, each all-reduce runs beside half of the steps to the next one.
FRAGMENTS = {"torchft DiLoCo": 1, "torchft Streaming DiLoCo": 2}


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    rank, address, port = int(os.environ["RANK"]), os.environ["ADDRESS"], int(os.environ["MASTER_PORT"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))  # for barriers between the arms
    found = []
    for number, arm in enumerate(job["torch_arms"]):
        lighthouse = None
        where = port + 1 + number
        if rank == 0:
            lighthouse = LighthouseServer(
                bind=f"0.0.0.0:{where}", min_replicas=len(job["paces"]), join_timeout_ms=10_000
            )
        dist.barrier()
        found.append({"arm": arm} | measure(FRAGMENTS[arm], job, rank, address, where))
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    # The servers of torchft may keep an interpreter from ending.
    sys.stdout.flush()
    os._exit(0)


def measure(fragments: int, job: dict[str, Any], rank: int, address: str, port: int) -> dict[str, Any]:
    """Rounds of equal steps on all replicas, the first of which is not measured."""
    paces, size = job["paces"], job["size"]
    # As in slow_link.py: the loss is of a small linear map, and the other parameters are only merged.
    linear = nn.Linear(32, 32, bias=False)
    nn.init.zeros_(linear.weight)
    halves = [nn.ParameterList([torch.zeros((size - 32 * 32) // fragments)]) for _ in range(fragments)]
    model = nn.ModuleList([nn.ModuleList([linear, halves[0]]), *halves[1:]])
    # A round is as long as that of the other arms on the slowest replica, and has whole steps in each fragment.
    steps = max(2 * fragments, round(job["steps_ms"] / max(paces)) // (2 * fragments) * 2 * fragments)
    inner = torch.optim.SGD(model.parameters(), 0.1)
    # Plain averaging, as in the other arms: SGD with rate 1 on the mean of the changes.
    outer = [torch.optim.SGD(one.parameters(), 1.0) for one in model]
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=300)),
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        min_replica_size=len(paces),
        use_async_quorum=False,
        init_sync=False,  # all begin with the same parameters
        timeout=timedelta(seconds=300),
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{os.environ['MASTER_ADDR']}:{port}",
        replica_id=f"replica_{rank}_",
        hostname=address,
    )
    delay = steps // fragments // 2 if fragments > 1 else 0
    pace, xs = Pace(paces[rank]), torch.randn(1, 32, generator=torch.Generator().manual_seed(rank))

    def rounds(count: int) -> float:
        for i in range(count * steps):
            if i % (steps // fragments) == 0:  # after a merge, which no step makes up for
                pace.begin()
            inner.zero_grad()
            loss = torch.mean((linear(xs) - xs) ** 2)
            loss.backward()
            pace.wait()
            inner.step()
        return loss.item()

    try:
        with DiLoCo(manager, list(model), inner, outer, steps, pin_memory=False, fragment_sync_delay=delay):
            rounds(1)
            dist.barrier()
            before, clock = sent_bytes(), time.perf_counter()
            loss = rounds(job["rounds"])
            elapsed_ms = 1e3 * (time.perf_counter() - clock)
            mb = (sent_bytes() - before) / job["rounds"] / 1e6
            dist.barrier()
    finally:
        manager.shutdown()
    return {
        "of_free": job["rounds"] * steps * len(paces) / (elapsed_ms * sum(1 / one for one in paces)),
        "steps_ms": steps * max(paces),
        "merge_ms": elapsed_ms / job["rounds"] - steps * max(paces),
        "hidden_ms": 0.0,
        "mb": mb,
        "loss": loss,
    }


if __name__ == "__main__":
    main(Path(sys.argv[1]))
