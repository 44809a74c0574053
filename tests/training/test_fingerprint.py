"""What has to be alike, seen from one process; tests/multiprocess compares real ones."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxche
from jaxche.data._batches import SequenceReader
from jaxche.distributed import Group
from jaxche.training import _fingerprint as fingerprint
from jaxche.training import _preparation


def test_differences_are_named_with_who_has_what(monkeypatch):
    monkeypatch.setattr(Group, "all_gather", lambda self, own, place="": [own, own | {"seed": "1"}])
    monkeypatch.setattr(Group, "members", (0, 1))
    with pytest.raises(ValueError, match=r"process +seed\n +most +0\n +1 +1") as caught:
        fingerprint.refuse_differences(Group(), {"seed": "0", "merge": "steps"})
    assert "merge" not in str(caught.value)
    monkeypatch.undo()
    fingerprint.refuse_differences(Group(), {"seed": "0"})


def test_the_same_code_has_the_same_digest_and_other_code_another():
    def traced(factor):
        # relu has a derivative of its own, which is printed with an address.
        return fingerprint.digest(jax.make_jaxpr(lambda x: factor * jax.nn.relu(x))(jnp.ones(3)))

    assert traced(2.0) == traced(2.0) != traced(3.0)
    params = {"w": jax.ShapeDtypeStruct((3,), "float32")}
    digests = [fingerprint.update_digest(tx, params) for tx in (optax.adam(0.1), optax.adam(0.1), optax.adam(0.2))]
    assert digests[0] == digests[1] != digests[2]


def test_a_process_alone_traces_no_code_to_compare(devices, monkeypatch):
    monkeypatch.setattr(_preparation, "update_digest", None)
    monkeypatch.setattr(_preparation, "digest", None)
    trainer = jaxche.Trainer(lambda w, batch: jnp.mean((batch - w) ** 2), optax.sgd(0.1), replicas=devices[:1])
    trainer.round(trainer.init(jnp.zeros(2)), [np.ones((4, 2), np.float32)])


def test_long_values_that_begin_alike_stay_apart():
    assert fingerprint.abbreviated(0.25) == "0.25"
    long = [fingerprint.abbreviated((1.0,) * 100 + (last,)) for last in (1.0, 2.0, 2.0)]
    assert long[0] != long[1] == long[2]
    assert max(map(len, long)) < 40


def seen(*args, **options):
    data = jaxche.Batches(*args, **options)
    return fingerprint.data_digest(SequenceReader(data), len(data))


def test_other_data_another_order_and_other_batches_are_seen():
    x = np.arange(12.0)
    one = seen(x, 4)
    assert one == seen(x.copy(), 4)
    others = [seen(x, 4, seed=1), seen(x, 3), seen(x.astype(np.float32), 4), seen({"x": x}, 4)]
    last = x.copy()
    last[np.random.default_rng(0).permutation(12)[-1]] += 1e-9
    others.append(seen(last, 4))
    assert one not in others
    assert len(set(others)) == len(others)


def test_random_keys_in_the_data_are_compared():
    keys = [jax.random.split(jax.random.key(seed), 12) for seed in (0, 0, 1)]
    digests = [seen({"key": key, "x": np.arange(12.0)}, 4) for key in keys]
    assert digests[0] == digests[1] != digests[2]


def test_data_that_varies_is_not_compared(monkeypatch):
    class Noisy:
        def __len__(self):
            return 3

        def __getitem__(self, i):
            self.count = getattr(self, "count", 0) + 1
            return {"x": np.array([self.count]), "label": np.array([i])}

    assert fingerprint.data_digest(SequenceReader(Noisy()), 3) == fingerprint.NONDETERMINISTIC
    monkeypatch.setattr(Group, "all_gather", lambda self, own, place="": [own, own | {"data": "abc"}])
    monkeypatch.setattr(Group, "members", (0, 1))
    fingerprint.refuse_differences(Group(), {"data": fingerprint.NONDETERMINISTIC})
    with pytest.raises(ValueError, match="data"):
        fingerprint.refuse_differences(Group(), {"data": "def"})


def compared(monkeypatch, here, there):
    """Whether two processes may start with these trees."""
    told = [{"params": fingerprint._traits("params", tree)} for tree in (here, there)]
    monkeypatch.setattr(Group, "all_gather", lambda self, own, place="": told)
    monkeypatch.setattr(Group, "members", (0, 1))
    fingerprint.refuse_other_values(Group(), {"params": here})


def test_values_are_compared_but_for_rounding(monkeypatch, devices):
    rng = np.random.default_rng(0)
    tree = {"w": rng.normal(size=(7, 5)).astype(np.float32), "n": np.int32([3]), "empty": np.zeros((0, 2), np.float32)}
    tree["key"] = jax.random.key(0)
    compared(monkeypatch, tree, tree)
    compared(monkeypatch, tree, jax.device_put(tree | {"w": tree["w"] * (1 + 1e-6)}, devices[1]))
    compared(monkeypatch, tree | {"w": tree["w"] * np.nan}, tree | {"w": tree["w"] * np.nan})
    for other in (
        {"w": tree["w"] + 0.1},
        {"w": tree["w"][::-1].copy()},  # of the same norm
        {"w": tree["w"].T.copy().reshape(7, 5)},
        {"w": -tree["w"]},
        {"w": tree["w"] * np.nan},
    ):
        with pytest.raises(ValueError, match=r"values of params/w: .* on process 0 and .* on process 1; make the same"):
            compared(monkeypatch, tree, tree | other)
    with pytest.raises(ValueError, match="params/n"):
        compared(monkeypatch, tree, tree | {"n": np.int32([4])})


def test_arrays_whose_names_join_alike_are_both_compared(monkeypatch):
    one, zero = np.ones(2, np.float32), np.zeros(2, np.float32)
    tree = {"a/b": {"c": one}, "a": {"b/c": zero}}
    compared(monkeypatch, tree, tree)
    for other, name in (({"a/b": {"c": zero}}, "a%2Fb/c"), ({"a": {"b/c": one}}, "a/b%2Fc")):
        with pytest.raises(ValueError, match=f"values of params/{name}"):
            compared(monkeypatch, tree, tree | other)
