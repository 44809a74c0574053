"""The policy enum and layer 0's one rule about imports."""

import json
import subprocess
import sys

import pytest

from jaxche.cadence import ApplyPolicy


@pytest.mark.parametrize("policy", ApplyPolicy)
def test_policies_are_strings(policy):
    assert ApplyPolicy(policy.value) is policy
    assert policy == policy.value == str(policy) == f"{policy}"
    assert json.loads(json.dumps(policy)) == policy.value


def test_names():
    assert [policy.name for policy in ApplyPolicy] == ["SYNC", "CADENCE", "ASYNC"]
    assert [policy.value for policy in ApplyPolicy] == ["sync", "cadence", "async"]


@pytest.mark.parametrize("value", ["Cadence", "", None, 1])
def test_anything_else_is_refused_with_what_to_write(value):
    with pytest.raises(ValueError, match='"sync", "cadence", "async"') as refused:
        ApplyPolicy(value)
    assert repr(value) in str(refused.value)


def test_the_layer_needs_numpy_only():
    # The modules alone, without the front door, which may import every layer.
    code = (
        "import sys, types, pathlib\n"
        "front = types.ModuleType('jaxche'); front.__path__ = [sys.argv[1]]; sys.modules['jaxche'] = front\n"
        "import jaxche.cadence\n"
        "assert not {'jax', 'flax', 'optax', 'matplotlib'} & set(sys.modules)\n"
    )
    import jaxche.cadence

    package = jaxche.cadence.__path__[0].rsplit("cadence", 1)[0]
    subprocess.run([sys.executable, "-c", code, package], check=True, timeout=60)
