"""Our own arithmetic must be explicit about dtypes; optax's is not, so tests of it do not ask for this."""

import jax
import pytest


@pytest.fixture
def strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield
