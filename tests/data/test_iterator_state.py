"""States of iterators go through JSON unchanged."""

import collections
import json
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxche.data._iterator_state import from_json, to_json

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.integers() | st.text() | st.tuples(st.text(), st.integers())
states = st.recursive(
    scalars, lambda x: st.lists(x) | st.tuples(x, x) | st.dictionaries(keys | st.just("jaxche"), x), max_leaves=12
)


@given(states)
def test_a_state_is_the_same_after_json(state):
    back = from_json(json.loads(json.dumps(to_json(state))))
    assert back == state
    assert repr(back) == repr(state)  # a tuple stays one, and True is not 1


def test_arrays_keep_type_shape_and_bits():
    half = np.array([1.5, -2], jnp.bfloat16)
    state = {
        "mt": np.arange(6, dtype=np.uint32).reshape(2, 3),
        "at": np.int64(7),
        "none": np.zeros((0, 2)),
        "half": half,
    }
    back = from_json(json.loads(json.dumps(to_json(state))))
    for name, x in state.items():
        assert type(back[name]) is type(x)
        assert back[name].dtype == x.dtype
        np.testing.assert_array_equal(back[name], x)
    back["mt"][0] = 1  # writable


UNCOVERED = {
    "object": object(),
    "set": {"x": {1}},
    "objects": np.array([None]),
    "structured": np.zeros(2, [("a", "i4"), ("b", "f4")]),
    "masked": np.ma.array([1, 2], mask=[True, False]),
    "counter": collections.Counter("ab"),
}


@pytest.mark.parametrize("value", UNCOVERED.values(), ids=list(UNCOVERED))
def test_what_has_no_exact_form_is_refused(value):
    with pytest.raises(TypeError, match="no exact form"):
        to_json(value)


class Tensor:
    """Like a tensor of torch."""

    __module__ = "torch"

    def __init__(self, array):
        self._array = array

    def detach(self):
        return self

    def cpu(self):
        return self

    def numpy(self):
        return self._array


def test_tensors_of_torch_stay_tensors(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(from_numpy=Tensor))
    back = from_json(json.loads(json.dumps(to_json({"rng": Tensor(np.arange(5, dtype=np.uint8))}))))
    assert type(back["rng"]) is Tensor
    np.testing.assert_array_equal(back["rng"].numpy(), np.arange(5, dtype=np.uint8))
    assert back["rng"].numpy().dtype == np.uint8
