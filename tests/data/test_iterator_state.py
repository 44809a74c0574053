"""States of iterators go through JSON unchanged."""

import json

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
    state = {"mt": np.arange(6, dtype=np.uint32).reshape(2, 3), "at": np.int64(7), "none": np.zeros((0, 2))}
    back = from_json(json.loads(json.dumps(to_json(state))))
    for name, x in state.items():
        assert type(back[name]) is type(x)
        assert back[name].dtype == x.dtype
        np.testing.assert_array_equal(back[name], x)
    back["mt"][0] = 1  # writable


@pytest.mark.parametrize("value", [object(), {"x": {1}}, np.array([None])])
def test_what_has_no_exact_form_is_refused(value):
    with pytest.raises(TypeError, match="no exact form"):
        to_json(value)
