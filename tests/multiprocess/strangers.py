"""What each process of test_strangers does: stages over processes, in an elastic run, until a file says so."""

import contextlib
import ipaddress
import json
import os
import re
import runpy
import sys
import time
from pathlib import Path

import jax
import numpy as np
import optax

import jaxche
from jaxche.distributed import process_group

MODEL = runpy.run_path(str(Path(__file__).parents[1] / "stages" / "conftest.py"))["MODELS"]["plain"](2, False)


def listening(pid="self"):
    """Addresses and ports at which a process listens, this one by default."""
    inodes = {re.sub(r"\D", "", link) for link in map(target, Path(f"/proc/{pid}/fd").iterdir()) if "socket:" in link}
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and inode in inodes:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.append([str(ipaddress.ip_address(b"".join(words))), int(port, 16)])
    return found


def coordinator(port):
    """The process beside this one that listens at this port."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(PermissionError, FileNotFoundError):  # of another user, or it has ended
            if folder.name.isdigit() and port in [found for _, found in listening(folder.name)]:
                return int(folder.name)
    raise AssertionError("no coordinator")


def target(link):
    try:
        return os.readlink(link)
    except FileNotFoundError:
        return ""


def gradients(model):
    loss, grads = model.value_and_grad(MODEL.params, MODEL.batch, step=7)
    return float(loss), [np.asarray(x).tolist() for x in jax.tree.leaves(grads)]


def train(model, folder):
    """Gradients of the same batch again and again: how often, and what differed from the first."""
    first, done, last, other = gradients(model), 0, None, []
    enough, end = folder / "enough", folder / "end"
    while last is None or done < last:
        if jax.process_index() == 0 and last is None and enough.exists():
            # Before anything is sent, so that the other process knows when it has finished this step.
            write(end, done + 3)
        last = int(end.read_text()) if end.exists() else None
        if (here := gradients(model)) != first:
            other.append(here)
        done += 1
        time.sleep(0.01)
    return {"first": first, "done": done, "other": other}


def merge():
    """What the liveness of the processes is for: rounds of an elastic run."""
    rng = np.random.default_rng(0)
    data = jaxche.Batches({"x": rng.normal(size=(64, 3)).astype(np.float32)}, batch_size=4, seed=0)
    # Whole batches: rows by speed round otherwise when a load changes the speeds.
    options = {"policy": "sync", "rows": "equal"}
    trainer = jaxche.Trainer(lambda params, batch: ((batch["x"] @ params) ** 2).mean(), optax.sgd(0.1), **options)
    state, history = trainer.fit(trainer.init(np.ones(3, np.float32)), data, epochs=2)
    return [np.asarray(trainer.params(state)).tolist(), len(history) > 0, trainer.world_size]


def write(path, text):
    part = path.with_name(f"{path.name}.{jax.process_index()}")
    part.write_text(str(text))
    part.rename(path)


def main(folder):
    jaxche.initialize(timeout_s=60)
    me = jax.process_index()
    model = jaxche.Partitioned(
        MODEL.stages,
        MODEL.loss,
        jaxche.Direct(timeout_s=60),
        devices=jax.local_devices()[:1],
        local_stages=[me],
    )
    addresses = {"stage": model._open_wire()._listener.address}
    if me == 0:
        liveness = json.loads(os.environ["JAXCHE_LIVENESS"])
        pid = coordinator(liveness[1])
        told = {"pid": pid, "addresses": {"liveness": liveness}, "listening": listening(pid)}
        write(folder / "ready-2.json", json.dumps(told))
    merged = merge()
    told = {"pid": os.getpid(), "addresses": addresses, "listening": listening(), "merged": merged}
    write(folder / f"ready-{me}.json", json.dumps(told))
    result = train(model, folder)
    result |= {"merged": merge(), "lives": process_group().incarnations, "before": merged}
    model.close()
    write(folder / f"{me}.json", json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
