"""Our own arithmetic must be explicit about dtypes (optax's is not, so only here)."""

import jax
import pytest


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
