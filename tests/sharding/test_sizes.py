"""Bytes, counted, read and written."""

import jax
import jax.numpy as jnp
import pytest

from jaxche.sharding import FullShard, Layout, as_bytes, nbytes, nbytes_per_device
from jaxche.sharding._sizes import show_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [("16GiB", 16 * 2**30), ("1.5 kb", 1500), ("500", 500), (".5KiB", 512), (7, 7), (2.0, 2), ("3 TB", 3 * 10**12)],
)
def test_sizes_as_people_write_them(text, expected):
    assert as_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1 2", "3 PiB", "0", 0, "nan", None])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="is not a size; write bytes"):
        as_bytes(text)


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 * 2**40, "3.0 TiB"), (1e16, "9094.9 TiB")]
)
def test_sizes_as_tables_print_them(size, shown):
    assert show_bytes(size) == shown


def test_bytes_of_trees(devices):
    tree = {"w": jax.ShapeDtypeStruct((8, 4), jnp.float32), "b": jax.ShapeDtypeStruct((3,), jnp.bfloat16)}
    layout = Layout(FullShard(), FullShard().mesh(devices[:4]), tree)
    assert nbytes(tree) == 128 + 6
    assert nbytes_per_device(tree, layout.params) == 32 + 6
    placed = jax.device_put(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree), layout.params)
    assert nbytes_per_device(placed) == 32 + 6
    assert nbytes(placed) == 128 + 6
