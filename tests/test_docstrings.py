"""Every public name says what it takes, gives and refuses, and shows it in an example that runs (as a doctest)."""

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import textwrap
from pathlib import Path

import pytest

import jaxche

ROOT = Path(jaxche.__file__).parent
PACKAGES = ["jaxche", "jaxche.scaling.noise_scale"]
# What these have is for the other packages; what users need of it is in the root.
INTERNAL = {"distributed", "messages"}
PACKAGES += [
    f"jaxche.{module.name}"
    for module in pkgutil.iter_modules(jaxche.__path__)
    if module.ispkg and module.name not in INTERNAL
]


def public():
    """(qualified name, object) of every class and function in an ``__all__``, each once."""
    seen = {}
    for package in PACKAGES:
        module = importlib.import_module(package)
        for name in module.__all__:
            value = getattr(module, name)
            # Aliases of types and constants are told of where they are used.
            if inspect.isfunction(value) or (inspect.isclass(value) and value.__module__.startswith("jaxche")):
                seen.setdefault(value, f"{package}.{name}")
    return sorted((name, value) for value, name in seen.items())


NAMES = public()


def parameters(value):
    try:
        given = inspect.signature(value).parameters
    except (TypeError, ValueError):
        return []
    return [name for name in given if name not in ("self", "args", "kwargs")]


def raises(value):
    """Whether a function's own code raises anything; functions inside it are another's business."""
    value = inspect.unwrap(value)
    # Constructors that dataclasses and typing wrote are not in our files.
    if not inspect.isfunction(value) or ROOT not in Path(value.__code__.co_filename).parents:
        return False
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    inside = list(ast.iter_child_nodes(definition))
    while inside:
        node = inside.pop()
        if isinstance(node, ast.Raise):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)):
            inside += ast.iter_child_nodes(node)
    return False


@pytest.mark.parametrize(("name", "value"), NAMES, ids=[name for name, _ in NAMES])
def test_it_is_told_in_full(name, value):
    text = inspect.getdoc(value) or ""
    assert text.split("\n\n")[0].rstrip().endswith((".", ":")), "one sentence first"
    missing = []
    if inspect.isclass(value):
        record = dataclasses.is_dataclass(value) or issubclass(value, tuple) or hasattr(value, "_is_protocol")
        own = "__init__" in vars(value) or record
        if own and parameters(value) and not ("Args:" in text or "Attributes:" in text):
            missing.append("Args or Attributes")
        constructors = [vars(value).get(name) for name in ("__init__", "__post_init__")]
        if any(map(raises, constructors)) and "Raises:" not in text:
            missing.append("Raises")
    else:
        if parameters(value) and "Args:" not in text:
            missing.append("Args")
        returned = inspect.signature(value).return_annotation
        if returned not in (None, "None", inspect.Signature.empty) and "Returns:" not in text:
            missing.append("Returns")
        if raises(value) and "Raises:" not in text:
            missing.append("Raises")
    if "Example:" not in text or ">>> " not in text:
        missing.append("Example")
    assert not missing, f"{name} lacks {', '.join(missing)}: {Path(inspect.getsourcefile(value)).name}"


def test_the_names_are_many():
    """A search that finds nothing would pass everything."""
    assert len(NAMES) > 90
