"""Failing together, seen from one process; tests/multiprocess does it with real ones."""

import json

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxche.training import RankError
from jaxche.training import _agree as agree


def test_own_error_is_raised_as_it_is_with_its_place():
    with pytest.raises(OSError, match="disk") as caught:
        agree.raise_everywhere(OSError("disk"), 3, "round 7")
    assert "rank 3 in round 7" in caught.value.__notes__[0]


def test_no_error_passes():
    agree.raise_everywhere(None, 0, "round 0")


def test_an_error_elsewhere_is_told_with_its_traceback(monkeypatch):
    report = {"rank": 1, "kind": "OSError", "message": "disk", "trace": "line 3"}
    monkeypatch.setattr(agree, "gather_json", lambda own: [own, report])
    with pytest.raises(RankError, match="rank 1 failed in round 2 with OSError: disk") as caught:
        agree.raise_everywhere(None, 0, "round 2")
    assert caught.value.rank == 1
    assert "line 3" in str(caught.value)


def test_a_report_stays_small_whatever_the_error_says(monkeypatch):
    sent = []
    monkeypatch.setattr(agree, "gather_json", lambda own: sent.append(own) or [own])
    with pytest.raises(OSError, match="é"):
        agree.raise_everywhere(OSError("é" * 9999), 123456, "round 7")
    assert len(json.dumps(sent[0])) < 20_000


def test_differences_are_named_with_who_has_what(monkeypatch):
    monkeypatch.setattr(agree, "gather_json", lambda own: [own, own | {"seed": "1"}])
    with pytest.raises(ValueError, match="seed: process 0: 0, process 1: 1") as caught:
        agree.refuse_differences({"seed": "0", "merge": "steps"})
    assert "merge" not in str(caught.value)
    monkeypatch.undo()
    agree.refuse_differences({"seed": "0"})


def test_the_same_code_has_the_same_digest_and_other_code_another():
    def traced(factor):
        # relu has a derivative of its own, which is printed with an address.
        return agree.digest(jax.make_jaxpr(lambda x: factor * jax.nn.relu(x))(jnp.ones(3)))

    assert traced(2.0) == traced(2.0) != traced(3.0)
    params = {"w": jax.ShapeDtypeStruct((3,), "float32")}
    digests = [agree.update_digest(tx, params) for tx in (optax.adam(0.1), optax.adam(0.1), optax.adam(0.2))]
    assert digests[0] == digests[1] != digests[2]
