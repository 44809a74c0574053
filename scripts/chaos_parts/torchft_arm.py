"""The arm of torchft in goodput.py: LocalSGD on gloo, whose dead ranks are started again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# ms a step, and steps between two merges: the same time on every rank, as torchft asks all for the same number.
PACES_MS, STEPS = (10.0, 10.0, 25.0), 8


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Callable[[], dict[int, int]]]:
    """Starts the lighthouse and the ranks, and starts those again that end."""
    python, over = os.environ["TORCH_PYTHON"], threading.Event()
    with (folder / "output").open("w") as output:
        lighthouse = subprocess.Popen([python, __file__, "lighthouse", str(folder)], stdout=output, stderr=output)
        while not (folder / "lighthouse").exists():
            if lighthouse.poll() is not None:
                raise SystemExit(f"the lighthouse ended: {(folder / 'output').read_text()[-1500:]}")
            time.sleep(0.1)
        address = (folder / "lighthouse").read_text()

        def start(rank: int) -> subprocess.Popen[bytes]:
            command = [python, __file__, str(rank), str(folder), address]
            return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=output, stderr=output)

        children = [start(rank) for rank in range(len(PACES_MS))]

        def supervise() -> None:
            while not over.wait(0.1):
                for rank, child in enumerate(children):
                    if child.poll() is not None:
                        children[rank] = start(rank)

        thread = threading.Thread(target=supervise)
        thread.start()
        try:
            yield lambda: {rank: child.pid for rank, child in enumerate(children)}
        finally:
            over.set()
            thread.join()
            for child in (*children, lighthouse):
                child.kill()
                child.wait()


def lighthouse(folder: Path) -> None:
    from torchft.coordination import LighthouseServer  # type: ignore[import-not-found]

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=1000, quorum_tick_ms=50)
    (folder / "part").write_text(server.address())
    (folder / "part").rename(folder / "lighthouse")
    threading.Event().wait()


def worker(rank: int, folder: Path, address: str) -> None:
    """Steps of this rank's length, and a line for each merge that was committed."""
    from datetime import timedelta

    import torch  # type: ignore[import-not-found]
    from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]
    from torchft.local_sgd import LocalSGD  # type: ignore[import-not-found]

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=False,
        timeout=timedelta(seconds=5),
        rank=0,
        world_size=1,
        replica_id=f"rank_{rank}_",
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=address,
    )
    x = torch.randn(960, 16)
    y = torch.tanh(x @ torch.randn(16, 4))
    committed = 0
    # The slowest rank sets the length of a round, as all take as many steps.
    with LocalSGD(manager, model, optimizer, sync_every=STEPS), (folder / "rounds").open("a") as out:
        step = 0
        while True:
            began = time.monotonic()
            at = step * 8 % 960
            loss = torch.nn.functional.mse_loss(model(x[at : at + 8]), y[at : at + 8])
            optimizer.zero_grad()
            loss.backward()
            time.sleep(max(0.0, PACES_MS[rank] / 1e3 - (time.monotonic() - began)))
            optimizer.step()
            step += 1
            if manager.current_step() != committed:
                committed = manager.current_step()
                batches = STEPS * manager.num_participants()
                row = {"t": time.monotonic(), "rank": rank, "round": committed, "batches": batches}
                out.write(json.dumps(row) + "\n")
                out.flush()


if __name__ == "__main__":
    if sys.argv[1] == "lighthouse":
        lighthouse(Path(sys.argv[2]))
    else:
        worker(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
