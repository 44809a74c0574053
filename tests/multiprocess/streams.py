"""What each process of test_streams does; run by ``jaxche launch``. Each writes what it trained on and ended with."""

import contextlib
import json
import logging
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxche
from jaxche.data._batches import Feed

# Batches in the stream of each process where each reads its own, and where all read the same.
SHARDS, EQUAL = (11, 5), 13


class Restorable:
    """An iterator with a state."""

    def __init__(self, process, length, log):
        self._process, self._length, self._at, self._log = process, length, 0, log

    def __iter__(self):
        return self

    def __next__(self):
        if self._at >= self._length:
            raise StopIteration
        self._log.append(self._at)
        self._at += 1
        return batch(self._process, self._at - 1)

    def get_state(self):
        return {"at": self._at}

    def set_state(self, state):
        self._at = state["at"]


def batch(process, i):
    """Batch i of a process, in epoch i // 1000."""
    x = np.random.default_rng((process, i)).normal(size=(4, 3)).astype(np.float32)
    return {"x": x, "y": np.tanh(x[:, :1]), "id": np.full(4, 100_000 * process + i)}


def loss(w, batch, rng):
    keep = jax.random.bernoulli(rng, 0.8, batch["y"].shape)
    return jnp.mean((jnp.tanh(batch["x"] @ w * keep) - batch["y"]) ** 2)


def trained_on(run):
    """What a call returns, and the ids of the batches that this process trained on in it."""
    found, plain = [], Feed.__iter__

    def recorded(feed):
        for one in plain(feed):
            found.append(int(one["id"][0]))
            yield one

    Feed.__iter__ = recorded
    try:
        return run(), found
    finally:
        Feed.__iter__ = plain


def trainer(**arguments):
    che = jaxche.ElChe(world_size=2, anchor=2, max_anchor=2, max_batch_diff=0)
    return jaxche.Trainer(loss, optax.adam(0.05), **({"che": che} | arguments))


def fit(data, epochs=2, stop=None, **options):
    """Train; the result and what this process trained on."""
    made = trainer()
    state = made.init(jnp.zeros((3, 1)))
    callbacks = [lambda state, info: state.round == stop]
    options = {"epochs": epochs, "progress": False, "callbacks": callbacks} | options
    (state, history), found = trained_on(lambda: made.fit(state, data, **options))
    position = state.stream and [state.stream.taken, state.stream.ended]
    rounds = [[info.epoch, info.cursor, info.planned, info.counts, info.loss] for info in history]
    return {
        "found": found,
        "rounds": rounds,
        "params": np.asarray(made.params(state)).tolist(),
        "place": [state.epoch, state.cursor, position],
    }


def refused(call):
    try:
        call()
    except Exception as error:
        return [type(error).__name__, str(error)]
    return None


def own(length=None):
    """A stream of this process's own."""
    process, count = jaxche.process_shard()
    assert count == 2

    def source(epoch):
        return (batch(process, 1000 * epoch + i) for i in range(SHARDS[process] if length is None else length[process]))

    return jaxche.Stream(source, shards=True)


def unlike():
    """A stream of this process's own, with batches of four rows in one and of two in the other."""
    source, process = own().source, jaxche.process_shard()[0]
    return jaxche.Stream(
        lambda epoch: (jax.tree.map(lambda x: x[: 4 - 2 * process], one) for one in source(epoch)), shards=True
    )


def equal(length=EQUAL):
    return jaxche.Stream(lambda epoch: (batch(7, 1000 * epoch + i) for i in range(length)), shards=False)


def wide():
    """An equal stream for four parameters, which two devices share."""
    source = equal().source

    def widened(epoch):
        return (one | {"x": np.pad(one["x"], ((0, 0), (0, 1)))} for one in source(epoch))

    return jaxche.Stream(widened, shards=False)


def main(folder):
    jaxche.initialize()
    process, _ = jaxche.process_shard()
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("jaxche").addHandler(handler)
    results = {"own": fit(own()), "equal": fit(equal()), "sync": None}
    made = trainer(che=None, policy="sync")
    state = made.init(jnp.zeros((3, 1)))
    (state, _), results["sync"] = trained_on(lambda: made.fit(state, own(), progress=False))
    strategy = jaxche.FullShard(min_size=1)
    made = trainer(che=None, replicas=[strategy.mesh(jaxche.devices())], strategy=strategy)
    state = made.init(jnp.zeros((4, 1)))
    (state, _), results["island"] = trained_on(lambda: made.fit(state, wide(), epochs=2, progress=False))
    results["own island"] = refused(lambda: made.fit(state, own()))
    results["unlike"] = fit(unlike(), max_examples=24)
    made = trainer()  # its steps are prepared by batches of another size
    for data in (equal(), unlike()):
        state, history = made.fit(made.init(jnp.zeros((3, 1))), data, max_examples=24, progress=False)
        results["unlike later"] = [state.examples, [info.counts for info in history]]
    # Stopped after the end of one stream, and before; processes stop after the next round.
    for name, data, stop in [("own", own, 3), ("own, before", own, 1), ("equal", equal, 1)]:
        saved = jaxche.Checkpoints(folder / name, every=100)
        parts = [fit(data(), stop=stop, checkpoints=saved), fit(data(), checkpoints=saved)]
        results[f"resumed {name}"] = parts
    results["said"], log = said[:], []
    said.clear()
    saved = jaxche.Checkpoints(folder / "restored", every=100)

    def restorable(log):
        return jaxche.Stream(Restorable(process, SHARDS[process], log), shards=True)

    first = fit(restorable([]), epochs=1, stop=3, checkpoints=saved)
    results["restored"] = [first, fit(restorable(log), epochs=1, checkpoints=saved), log, said[:]]
    made, broken = trainer(), iter([])
    state = made.init(jnp.zeros((3, 1)))
    results["refused"] = {
        "iterator": refused(lambda: made.fit(state, broken)),
        "auto": refused(lambda: trainer(che=None, policy="auto").fit(state, own())),
        "lengths": refused(lambda: made.fit(state, equal(5 + process), progress=False)),
        "batches": refused(lambda: trainer().fit(state, jaxche.Stream(own().source, shards=False), progress=False)),
        "empty": refused(lambda: trainer().fit(state, own((3, 0)), progress=False)),
        "unequal": refused(lambda: trainer().fit(state, jaxche.Stream(own().source, shards=bool(process)))),
    }
    said.clear()
    trainer().fit(state, jaxche.Stream(equal().source, shards=True), progress=False)
    results["warned"] = said
    with contextlib.suppress(OSError):
        (folder / f"{process}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
