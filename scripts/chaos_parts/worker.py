"""A process of the runs of chaos.py: a small problem, and the faults that happen within a process."""

from __future__ import annotations

import contextlib
import faulthandler
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES, NOISE, RATE = 120, 0.3, 0.003
# Seconds between two pieces of a state that a slow replacement reads.
DRIP_S = 0.7


def problem(world: int, state_mb: float = 0.0, **options: Any) -> tuple[Any, Any, Any, Callable[[Any], float]]:
    """A trainer, the parameters it begins with, its data, and the loss of all of them.

    ``state_mb`` is the size of the parameters and of the state of Adam, which is twice as large.
    """
    import jax.numpy as jnp
    import numpy as np
    import optax

    import jaxche

    rng = np.random.default_rng(0)
    x = rng.normal(size=(BATCHES * 8, 16)).astype(np.float32)
    y = np.tanh(x @ rng.normal(size=(16, 4)).astype(np.float32))
    params = {"hidden": rng.normal(size=(16, 32)).astype(np.float32) * 0.25, "out": np.zeros((32, 4), np.float32)}
    params["rest"] = np.ones(max(1, round(state_mb * 1e6 / 12)), np.float32)
    # The loss stays far from 0, so that the updates of Adam do not amplify rounding.
    y = (y + NOISE * rng.normal(size=y.shape)).astype(np.float32)

    def loss(p: Any, batch: Any) -> Any:
        return jnp.mean((jnp.tanh(batch["x"] @ p["hidden"]) @ p["out"] * p["rest"][0] - batch["y"]) ** 2)

    # Steps on a large state are slow.
    anchor = 1 if state_mb else 4
    che = jaxche.ElChe(world_size=world, anchor=anchor, max_anchor=2 * anchor, tuner="steady") if world > 1 else None
    data = {"x": x, "y": y}
    trainer = jaxche.Trainer(loss, optax.adam(RATE), che=che, **options)
    return trainer, params, jaxche.Batches(data, batch_size=8), lambda params: float(loss(params, data))


def digest_of(params: Any) -> str:
    """Equal for equal parameters."""
    import jax
    import numpy as np

    return hashlib.sha256(b"".join(np.asarray(x).tobytes() for x in jax.tree.leaves(params))).hexdigest()


def main(folder: Path) -> int:
    import jax

    import jaxche

    job, fault = json.loads((folder / "job.json").read_text()), folder / "fault.json"
    faulthandler.register(signal.SIGUSR2)  # writes the stacks of all threads
    signal.signal(signal.SIGUSR1, lambda *_: shift_clock(**json.loads(fault.read_text())))
    flip_when_asked(fault)
    if fault.exists():
        start_slowly(**json.loads(fault.read_text()))
    jaxche.initialize(timeout_s=60)

    def on_round(state: Any, info: Any) -> bool:
        write_round(folder / "rounds", info)
        return (folder / "stop").exists()

    losses = []
    trainer, params, data, loss = problem(jax.device_count(), job.get("state_mb", 0.0))
    for number in range(job["times"]):
        checkpoints = jaxche.Checkpoints(
            folder / f"checkpoints{number}", durable=not job["elastic"], every=job["every"]
        )
        state, _ = trainer.fit(
            trainer.init(params), data, job["epochs"], progress=False, checkpoints=checkpoints, callbacks=[on_round]
        )
        losses.append(loss(trainer.params(state)))
    end = {"losses": losses, "digest": digest_of(trainer.params(state)), "epoch": state.epoch, "cursor": state.cursor}
    write_end(folder / f"end-{jax.process_index()}", end | {"pending": state.pending_batches})
    return 0


def write_end(file: Path, end: dict[str, Any]) -> None:
    """Tries again while the disk is full: this file is of the campaign, and no part of what a run has to survive."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            file.write_text(json.dumps(end))
            return
        time.sleep(0.1)
    raise OSError(f"{file} could not be written for ten seconds")


def write_round(file: Path, info: Any) -> None:
    """A line for each round of this process, by the clock that never jumps, which all processes of a machine share."""
    import jax

    row = {"t": time.monotonic(), "rank": jax.process_index(), "pid": os.getpid(), "round": info.round}
    row |= {"world": len(info.counts), "batches": sum(info.counts)}
    # Without buffers, and whole or not at all: the disk may be full.
    with contextlib.suppress(OSError), file.open("ab", buffering=0) as out:
        out.write(json.dumps(row).encode() + b"\n")


# Faults of the kind that fault.json has, while they last.


def shift_clock(shift_s: float) -> None:
    """From now on the clock of this process is wrong."""
    right = time.time
    time.time = lambda: right() + shift_s


def start_slowly(late_s: float = 0.0, drips: bool = False, **others: Any) -> None:
    """Be late, or read the state of the run piece by piece."""
    from jaxche.distributed import _transfer

    time.sleep(late_s)
    receive = _transfer._receive

    def drip(*args: Any) -> Any:
        time.sleep(DRIP_S)
        return receive(*args)

    if drips:
        _transfer._receive = drip


def flip_when_asked(fault: Path) -> None:
    """One bit of the next state that is sent arrives wrong, in one part of the message."""
    from jaxche.distributed import _elastic_group, _transfer

    send_state = _elastic_group.send_state

    def send(sock: Any, message: Any, arrays: Any, waiting: Any) -> None:
        flip = json.loads(fault.read_text()).get("flip") if fault.exists() else None
        if flip:
            fault.unlink()
            head = _transfer._LENGTHS.size + _transfer._CHECKSUM.size
            text = len(json.dumps(message).encode())
            state = sum(_transfer.padded(array.nbytes) for array in arrays)
            arrays_at = head + text + _transfer._CHECKSUM.size
            first, size = {"head": (0, head), "text": (head, text), "state": (arrays_at, state)}[flip["part"]]
            sock = FlippingSocket(sock, first + int(flip["at"] * size), flip["bit"])
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


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
