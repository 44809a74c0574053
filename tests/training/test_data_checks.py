"""Data that would be trained on wrongly is refused, with what to write."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.data._batches import SequenceReader
from jaxche.data._checks import _close, _equal, non_finite_leaves
from jaxche.training import _fingerprint as fingerprint


class Growing:
    """Epochs of 8, 12 and 16 batches, or of those given."""

    def __init__(self, batches, lengths=(8, 12, 16)):
        self._batches, self._lengths, self.reads = batches, lengths, []

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return self.epoch(0)[i]

    def epoch(self, e):
        return _Epoch(self, e)


class _Epoch:
    def __init__(self, data, e):
        self._data, self._epoch = data, e

    def __len__(self):
        return self._data._lengths[self._epoch]

    def __getitem__(self, i):
        if not 0 <= i < len(self):
            raise IndexError(i)
        self._data.reads.append((self._epoch, i))
        return self._data._batches[i % len(self._data._batches)]


PLACES = {
    "one": lambda devices: {"replicas": devices[:1]},
    "sync": lambda devices: {"replicas": devices[:2], "policy": "sync"},
    "cadence": lambda devices: {"replicas": devices[:3]},
    "async": lambda devices: {"replicas": devices[:2], "policy": "async", "che": jaxche.ElChe(2, anchor=3)},
    "islands": lambda devices: {
        "replicas": [jaxche.FullShard().mesh(devices[:2]), jaxche.FullShard().mesh(devices[2:4])],
        "strategy": jaxche.FullShard(),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("lengths", [(8, 12, 16), (8, 7, 8)])
def test_an_epoch_of_another_length_is_refused_before_its_first_step(problem, devices, placement, lengths):
    data = Growing(problem.data, lengths)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), **PLACES[placement](devices))
    with pytest.raises(ValueError, match=rf"data\.epoch\(1\) has {lengths[1]} batches, but len\(data\) is 8") as caught:
        trainer.fit(trainer.init(problem.params), data, epochs=3, progress=False)
    assert "trainer.fit(state, data.epoch(1))" in str(caught.value)
    assert 1 not in {e for e, _ in data.reads}
    state = trainer.last_good_state
    assert (state.epoch, state.cursor) == (1, 0) or (placement == "async" and state.epoch == 0)
    # The line to write trains them all.
    state = trainer.init(problem.params)
    for e in range(3):
        state, _ = trainer.fit(state, data.epoch(e), progress=False)
    assert state.examples == 8 * sum(lengths)


@pytest.mark.parametrize("saves", [False, True])
def test_the_first_epoch_is_refused_before_anything_is_compiled(problem, devices, tmp_path, saves):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match=r"data\.epoch\(0\) has 4 batches, but len\(data\) is 8") as caught:
        trainer.fit(trainer.init(problem.params), Growing(problem.data, (4,)), checkpoints=tmp_path if saves else None)
    assert any(note.startswith("raised on rank 0 in") for note in caught.value.__notes__)
    assert trainer.compilations == 0


def test_a_resumed_run_is_refused_in_the_epoch_it_goes_on_with(problem, devices, tmp_path, lockstep):
    def run(lengths, **knobs):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], che=lockstep())
        data = Growing(problem.data, lengths)
        return trainer.fit(trainer.init(problem.params), data, 2, progress=False, checkpoints=tmp_path, **knobs)

    run((8, 8), callbacks=[lambda state, info: state.round == 3])  # within epoch 1
    with pytest.raises(ValueError, match=r"data\.epoch\(1\) has 16 batches"):
        run((8, 16))
    assert run((8, 8))[0].epoch == 2


class Stream:
    """What people write around an iterator."""

    def __init__(self, batches):
        self.source, self.asked = iter(batches), []

    def __len__(self):
        return 12

    def __getitem__(self, i):
        self.asked.append(i)
        return next(self.source)


class Augmented:
    """Examples with noise that no seed decides."""

    def __init__(self, data, keeps=("y",)):
        self._data, self._keeps, self._rng = data, keeps, np.random.default_rng(0)

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        batch = self._data[i]
        noise = {name: self._rng.normal(size=x.shape).astype(x.dtype) for name, x in batch.items()}
        batch = {name: x if name in self._keeps else x + noise[name] for name, x in batch.items()}
        return batch | {"position": np.arange(8), "weight": np.ones(8, np.float32)}


def with_positions(data):
    """Batches of which some arrays are always the same, and say nothing."""
    return [batch | {"position": np.arange(8), "weight": np.ones(8, np.float32)} for batch in data]


@pytest.mark.parametrize("placement", PLACES)
@pytest.mark.parametrize("dressed", [False, True])
def test_the_next_batch_of_an_iterator_is_refused_before_anything_is_compiled(problem, devices, placement, dressed):
    batches = [problem.data[i] for i in range(12)]
    data = Stream(with_positions(batches) if dressed else batches)
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), **PLACES[placement](devices))
    with pytest.raises(ValueError, match=r"data\[0\] is not the same.*of its iterator source.*data = list\(iterator\)"):
        trainer.fit(trainer.init(problem.params), data, progress=False)
    assert set(data.asked) <= {0, 1, 6, 11}
    assert trainer.compilations == 0


def test_it_is_refused_where_it_comes_later_and_where_it_is_saved(problem, devices, tmp_path):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state, _ = trainer.round(trainer.init(problem.params), problem.data, counts=(1, 1))
    # More than both replicas read, whichever is first.
    batches = [problem.data.epoch(e)[i] for e in range(5) for i in range(12)]
    with pytest.raises(ValueError, match="is not the same when it is read again"):
        trainer.round(state, Stream(batches), counts=(1, 1))
    with pytest.raises(ValueError, match="is not the same when it is read again"):
        trainer.fit(state, Stream(batches), checkpoints=tmp_path)
    after, _ = trainer.round(state, problem.data, counts=(1, 1))  # nothing is lost
    assert after.round == 2


def test_examples_that_are_augmented_at_random_are_known_by_what_stays(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    data = Augmented(problem.data)
    state, _ = trainer.fit(trainer.init(problem.params), data, epochs=2, progress=False)
    assert state.examples == 2 * 96
    assert fingerprint.data_digest(SequenceReader(data), 12) == fingerprint.NONDETERMINISTIC


@pytest.mark.parametrize("labels", [[0] * 6 + [1] * 6, [0] * 11 + [1], [0, 1] + [0] * 10])
def test_augmented_examples_may_be_sorted_by_class(labels):
    class Sorted:
        def __init__(self):
            self._rng = np.random.default_rng(0)

        def __len__(self):
            return 12

        def __getitem__(self, i):
            return {"x": self._rng.normal(size=4), "y": np.full(4, labels[i])}

    reader = SequenceReader(Sorted())
    reader.take((0, 0))
    assert reader.nondeterministic
    reader.close()


def test_where_nothing_stays_the_line_for_augmentation_is_given_too(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match=r"of an iterator and ignores i.*np\.random\.default_rng\(\(seed, i\)\)"):
        trainer.fit(trainer.init(problem.params), Augmented(problem.data, keeps=()), progress=False)


def test_rounding_is_no_other_batch(problem, devices):
    """Sums in several threads round differently at each read, but they identify the examples."""

    class Rounded:
        def __init__(self):
            self._scale = np.float32(1)

        def __len__(self):
            return 12

        def __getitem__(self, i):
            self._scale *= np.float32(1 + 1e-7)
            return {"x": problem.data[i]["x"] * self._scale, "y": problem.data[i]["y"] * self._scale}

    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    state, _ = trainer.fit(trainer.init(problem.params), Rounded(), progress=False)
    assert state.examples == 96


@pytest.mark.parametrize(
    "make",
    [
        lambda i: {"x": np.full((4, 5), np.nan, np.float32)},
        lambda i: {"x": jnp.full((4, 5), i), "key": jax.random.split(jax.random.key(i), 4)},
        lambda i: {"x": np.full((4, 5), i), "name": np.array(["a", "b", "c", "d"])},
        lambda i: {"x": np.full((4, 5), i, jnp.bfloat16), "none": None},
        lambda i: {"x": [1.0, 2.0], "y": 3},
    ],
    ids=["nan", "keys", "words", "bfloat16", "scalars"],
)
def test_whatever_is_in_a_batch_that_is_the_same_again_it_is_taken(make):
    class Data:
        def __len__(self):
            return 3

        def __getitem__(self, i):
            return make(i)

    reader = SequenceReader(Data())
    reader.take((0, 1))
    assert reader.nondeterministic is False
    reader.close()


def test_data_of_one_batch_is_known_by_what_stays():
    class One:
        def __init__(self, keeps):
            self._keeps, self._count = keeps, 0

        def __len__(self):
            return 1

        def __getitem__(self, i):
            self._count += 1
            return {"x": np.full(4, self._count)} | ({"y": np.arange(4)} if self._keeps else {})

    reader = SequenceReader(One(keeps=True))
    reader.take((0, 0))
    assert reader.nondeterministic
    with pytest.raises(ValueError, match="is not the same"):
        SequenceReader(One(keeps=False)).take((0, 0))


def test_data_in_memory_is_not_read_twice(problem):
    """It holds what it gives: a large batch need not be made and compared."""
    for data in (problem.data, [1, 2], (1, 2)):
        assert SequenceReader(data).nondeterministic is False


def test_data_that_only_looks_like_an_array_or_a_tuple_of_arrays_is_taken(problem, devices):
    class Described:
        _fields, shape, dtype = ("x", "y"), (12, 8), np.float32

        def __len__(self):
            return 12

        def __getitem__(self, i):
            return problem.data[i]

    objects = np.array([problem.data[i] for i in range(12)], object)
    for data in (Described(), objects):
        trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
        state, _ = trainer.fit(trainer.init(problem.params), data, progress=False)
        assert state.examples == 96


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_a_number_that_is_not_finite_is_found_in_every_type(dtype):
    x = np.zeros((4, 2), dtype)
    assert non_finite_leaves((0, 3), {"x": x}) == []
    x[1, 0] = np.nan
    assert non_finite_leaves((0, 3), {"x": x}) == ["NaN in ['x'] of batch 3 of epoch 0 (row 1)"]
    assert _equal(x, x.copy())
    assert _close(x, x.copy())
    assert not _close(x, np.zeros((4, 2), dtype))


ROWS = np.random.default_rng(0).normal(size=(4, 6, 3)).astype(np.float32)
INTEGERS = {
    "int64": (np.full(6, 2**40 + 5), r"\['n'\] of a batch has 1099511627781, which becomes 5 in int32"),
    "negative": (np.arange(6) - 2**31 - 1, "-2147483649, which becomes 2147483647 in int32"),
    "uint64": (np.full(6, 2**32, np.uint64), "4294967296, which becomes 0 in uint32, the uint64 of JAX; write"),
}


@pytest.mark.parametrize("policy", ["sync", "cadence"])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_that_jax_would_cut_are_refused_before_the_first_step(devices, name, policy):
    numbers, message = INTEGERS[name]
    trainer = jaxche.Trainer(
        lambda w, batch: jnp.mean((batch["x"] @ w) ** 2), optax.sgd(0.1), policy=policy, replicas=devices[:2]
    )
    state = trainer.init(jnp.ones(3))
    with pytest.raises(ValueError, match=message):
        trainer.fit(state, [{"x": x, "n": numbers} for x in ROWS], progress=False)


def _cut_in_batch_two():
    numbers = np.arange(24).reshape(4, 6)
    numbers[2, 1] = 2**40 + 5
    return [{"x": x, "n": n} for x, n in zip(ROWS, numbers, strict=True)]


def _as_arrays(batches):
    return jaxche.Batches({name: np.concatenate([b[name] for b in batches]) for name in ("x", "n")}, 6, seed=None)


@pytest.mark.parametrize("evaluates", [False, True], ids=["train", "evaluate"])
@pytest.mark.parametrize("of", [list, _as_arrays, lambda batches: jaxche.Stream(lambda epoch: batches)])
def test_integers_that_jax_would_cut_are_refused_in_every_batch(devices, of, evaluates):
    trainer = jaxche.Trainer(lambda w, batch: jnp.mean((batch["x"] @ w) ** 2), optax.sgd(0.1), replicas=devices[:2])
    state, data = trainer.init(jnp.ones(3)), of(_cut_in_batch_two())
    with pytest.raises(ValueError, match="1099511627781, which becomes 5 in int32") as caught:
        trainer.evaluate(state, data) if evaluates else trainer.fit(state, data, progress=False)
    assert isinstance(data, jaxche.Stream) or "it is data[2] of its epoch" in caught.value.__notes__


def test_integers_that_fit_are_taken_as_they_are(devices):
    ends = {"small": np.full(6, -(2**31)), "large": np.full(6, 2**32 - 1, np.uint64), "none": np.zeros((6, 0), int)}

    def end(batches):
        trainer = jaxche.Trainer(
            lambda w, batch: (jnp.mean((batch["x"] @ w) ** 2), {"n": batch["small"].astype(float).mean()}),
            optax.sgd(0.1),
            policy="sync",
            replicas=devices[:2],
        )
        _, history = trainer.fit(trainer.init(jnp.ones(3)), batches, progress=False)
        return history[-1].metrics["n"]

    assert end([{"x": x, **ends} for x in ROWS]) == -(2**31)
    with jax.enable_x64(True):
        assert end([{"x": x, "small": np.full(6, 2**40)} for x in ROWS]) == 2**40


@pytest.mark.parametrize("kind", [tuple, list])
def test_two_arrays_that_may_be_x_and_y_get_a_line(devices, kind, caplog):
    x, y = np.ones((12, 3), np.float32), np.ones((12, 1), np.float32)
    line = f"a {kind.__name__} of two arrays of 12 rows, each of which is taken as a batch; if they are x and y, write "

    def unpacks(w, batch):
        x, y = batch
        return jnp.mean((x @ w - y) ** 2)

    def fit(loss, data):
        caplog.clear()
        trainer = jaxche.Trainer(loss, optax.sgd(0.1), replicas=devices[:1])
        return trainer.fit(trainer.init(jnp.ones(3)), data, progress=False)

    with pytest.raises(ValueError, match="too many values to unpack") as caught:
        fit(unpacks, kind([x, y]))
    assert any(line in note for note in caught.value.__notes__)
    fit(lambda w, batch: jnp.mean((batch[0] * w - batch[1]) ** 2), kind([x, x]))  # rows 0 and 1 of each
    assert (line in caplog.text) == (kind is tuple)
    for data in ([x, x[:5]], [x, x, x], [x], [{"x": x}, {"x": x}]):
        fit(lambda w, batch: jnp.mean((jax.tree.leaves(batch)[0] @ w) ** 2), kind(data))
        assert "two arrays" not in caplog.text


class Counted:
    """Batches with an attribute ``epoch``, as of a data set that counts its epochs."""

    def __init__(self, data, epoch=3):
        self._data, self.epoch = data, epoch

    def __len__(self):
        return len(self._data)

    def __getitem__(self, i):
        return self._data[i]


class SetsEpoch(Counted):
    def set_epoch(self, epoch):
        self.epoch = epoch


def test_an_attribute_epoch_that_is_no_method_is_left_alone(problem, devices):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2], policy="sync", rows="equal")
    start, plain = trainer.init(problem.params), [problem.data[i] for i in range(12)]
    expected, _ = trainer.fit(start, plain, epochs=2, progress=False)
    state, _ = trainer.fit(start, Counted(problem.data), epochs=2, validation=Counted(problem.data), progress=False)
    jax.tree.map(np.testing.assert_array_equal, trainer.params(state), trainer.params(expected))
    assert trainer.evaluate(state, Counted(problem.data)) == trainer.evaluate(state, plain)


@pytest.mark.parametrize(
    ("epoch", "message"),
    [
        (lambda: 3, r"method epoch of the Counted does not take the epoch.*def epoch\(self, e\)"),
        (lambda e: None, r"data\.epoch\(0\) of the Counted returned None.*return the batches"),
        (lambda e: iter([]), r"data\.epoch\(0\) of the Counted returned <list_iterator.*jaxche\.Stream\(data\.epoch\)"),
    ],
)
@pytest.mark.parametrize(
    "use",
    [
        lambda trainer, state, data, bad: trainer.fit(state, bad, progress=False),
        lambda trainer, state, data, bad: trainer.fit(state, data, validation=bad, progress=False),
        lambda trainer, state, data, bad: trainer.evaluate(state, bad),
    ],
)
def test_a_method_epoch_of_another_kind_is_refused(problem, devices, epoch, message, use):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:2])
    with pytest.raises(ValueError, match=message):
        use(trainer, trainer.init(problem.params), problem.data, Counted(problem.data, epoch))
    assert trainer.last_good_state is None or trainer.last_good_state.round == 0


@pytest.mark.parametrize(
    ("limits", "warns"),
    [({"epochs": 2}, True), ({"max_steps": 13}, True), ({"epochs": 1}, False), ({"max_steps": 12}, False)],
)
def test_a_set_epoch_that_is_not_called_is_told(problem, devices, caplog, limits, warns):
    trainer = jaxche.Trainer(problem.loss, optax.sgd(0.1), replicas=devices[:1])
    trainer.fit(trainer.init(problem.params), SetsEpoch(problem.data), progress=False, **limits)
    assert ("SetsEpoch with set_epoch(), which is called for a stream only" in caplog.text) == warns
