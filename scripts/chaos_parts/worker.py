"""A process of the runs of chaos.py: a small problem, and the faults that happen within a process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES = 120
# Seconds between two pieces of a state that a slow replacement reads.
DRIP_S = 0.7


def problem(world: int, **options: Any) -> tuple[Any, Any, Any, Callable[[Any], float]]:
    """A trainer, the parameters it begins with, its data, and the loss of all of them."""
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxche

    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES * 8, 16)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(16, 4)).astype(np.float32))
    params = {"hidden": rng.normal(size=(16, 32)).astype(np.float32) * 0.25, "out": np.zeros((32, 4), np.float32)}

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ p["hidden"]) @ p["out"] - batch["y"]) ** 2)

    che = jaxche.ElChe(world_size=world, anchor=4, max_anchor=8, tuner="steady") if world > 1 else None
    data = {"x": x, "y": y}
    trainer = jaxche.Trainer(loss, optax.adam(0.01), che=che, **options)
    return trainer, params, jaxche.Batches(data, batch_size=8), lambda params: float(loss(params, data))


def digest_of(params: Any) -> str:
    """Equal for equal parameters."""
    import jax
    import numpy as np

    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()


def main(folder: Path) -> int:
    import jax

    import jaxche

    job = json.loads((folder / "job.json").read_text())
    replaces = int(os.environ.get("JAXCHE_RESTART", 0)) > 0
    if "shift_s" in job:
        signal.signal(signal.SIGUSR1, lambda *_: shift_clock(job["shift_s"]))
    if "flip" in job:
        flip_a_bit(folder / "flipped", **job["flip"])
    if replaces and "late_s" in job:
        time.sleep(job["late_s"])
    if replaces and job.get("drips"):
        receive_slowly()
    jaxche.initialize(timeout_s=60)
    losses = []
    for number in range(job["times"]):
        trainer, params, data, loss = problem(jax.device_count())
        checkpoints = jaxche.Checkpoints(
            folder / f"checkpoints{number}", durable=not job["elastic"], every=job["every"]
        )
        state, _ = trainer.fit(
            trainer.init(params),
            data,
            job["epochs"],
            progress=False,
            checkpoints=checkpoints,
            callbacks=[lambda state, info: write_round(folder / "rounds", info)],
        )
        losses.append(loss(trainer.params(state)))
    (folder / f"parameters-{jax.process_index()}").write_text(digest_of(trainer.params(state)))
    if jax.process_index() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
    return 0


def write_round(file: Path, info: Any) -> None:
    """A line for each round of this process, by the clock that never jumps, which all processes of a machine share."""
    import jax

    row = {"t": time.monotonic(), "rank": jax.process_index(), "pid": os.getpid(), "round": info.round}
    row |= {"world": len(info.counts), "batches": sum(info.counts)}
    # Without buffers, and whole or not at all: the disk may be full.
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as out:
        out.write(json.dumps(row).encode() + b"\n")


def shift_clock(seconds: float) -> None:
    """From now on the clock of this process is wrong."""
    right = time.time
    time.time = lambda: right() + seconds


def flip_a_bit(done: Path, part: str, at: float, bit: int) -> None:
    """One bit of the first state that is sent in this run arrives wrong, in one part of the message."""
    from jaxche.distributed import _elastic_group, _transfer

    send_state = _elastic_group.send_state

    def send(sock: Any, message: Any, arrays: Any, waiting: Any) -> None:
        with contextlib.suppress(FileExistsError):
            done.touch(exist_ok=False)
            head, text = _transfer.HEAD_BYTES, len(json.dumps(message).encode())
            state = sum(_transfer.padded(array.nbytes) for array in arrays)
            first, size = {"head": (0, head), "text": (head, text), "state": (head + text, state)}[part]
            sock = FlippingSocket(sock, first + int(at * size), bit)
        send_state(sock, message, arrays, waiting)

    _elastic_group.send_state = send


class FlippingSocket:
    """A socket that sends one bit wrong."""

    def __init__(self, sock: Any, at: int, bit: int):
        self._sock, self._at, self._bit = sock, at, bit

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)

    def send(self, data: Any) -> int:
        piece = bytearray(data)
        if 0 <= self._at < len(piece):
            piece[self._at] ^= 1 << self._bit
        sent = self._sock.send(piece)
        self._at -= sent
        return sent


def receive_slowly() -> None:
    """Read the state of the run piece by piece."""
    from jaxche.distributed import _transfer

    receive = _transfer._receive

    def drip(*args: Any) -> Any:
        time.sleep(DRIP_S)
        return receive(*args)

    _transfer._receive = drip


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
