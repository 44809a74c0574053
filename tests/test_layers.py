"""Data flows one way: a module imports only from earlier layers, through their package's ``__init__``."""

import ast
import importlib.util
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxche

ROOT = Path(jaxche.__file__).parent
ORDER = (
    "messages",
    "drawing",
    "cadence",
    "averaging",
    "scaling",
    "sharding",
    "distributed",
    "data",
    "replicas",
    "stages",
    "cluster",
    "reports",
    "checkpoints",
    "training",
    "cli",
)
LAYERS = {package: layer for layer, package in enumerate(ORDER)}
FILES = sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


def imports(path):
    """(module, names) of every import of jaxche in a file, also those inside functions and TYPE_CHECKING."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the layer"
            if node.module.split(".")[0] == "jaxche":
                yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names if alias.name.split(".")[0] == "jaxche")


def test_every_package_has_a_layer():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_to_earlier_layers(path):
    own = path.relative_to(ROOT).parts[0]
    for module, names in imports(path):
        parts = module.split(".")
        if len(parts) == 1:  # `from jaxche import X`: the front door holds all layers, only the last may use it
            assert own == "cli", f"{path.name}: import {names} from their own package, not from jaxche"
            continue
        if parts[1] == own:
            continue
        assert LAYERS[parts[1]] < LAYERS[own], f"{path.name} (layer {LAYERS[own]}) imports {module}"
        assert len(parts) == 2, f"{path.name} reaches into {module}; import from jaxche.{parts[1]}"


def test_the_first_layer_knows_no_jax():
    for path in (path for package in ("messages", "drawing", "cadence") for path in (ROOT / package).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not any(name.split(".")[0] in ("jax", "jaxlib", "flax", "optax") for name in names), path


def test_the_root_names_are_imported_on_first_use():
    tree = ast.parse((ROOT / "__init__.pyi").read_text(encoding="utf8"))
    assert all(isinstance(node, (ast.ImportFrom, ast.Assign, ast.AnnAssign, ast.Expr)) for node in tree.body)
    [names] = [ast.literal_eval(node.value) for node in tree.body if isinstance(node, ast.Assign)]
    assert sorted(names) == names == jaxche.__all__
    for name in names:
        assert getattr(jaxche, name).__doc__


def test_the_cadence_needs_no_jax():
    program = "import sys, jaxche.cadence, jaxche; jaxche.ElChe(2, anchor=10); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT.parent).returncode == 0


def test_names_that_moved_say_where_they_are():
    for name, place in jaxche._MOVED.items():
        package, _, new = place.partition(":")
        with pytest.raises(ImportError, match=f"write: from {package} import {new or name}$"):
            getattr(jaxche, name)
        assert hasattr(importlib.import_module(package), new or name)
    with pytest.raises(ImportError, match=r"from jaxche\.reports import Advice"):
        exec("from jaxche import Advice")


def test_packages_need_no_import_of_their_own():
    program = "import jaxche; jaxche.reports.profile, jaxche.training.PaceError, jaxche.sharding.compare_strategies"
    assert subprocess.run([sys.executable, "-c", program], check=False, cwd=ROOT.parent).returncode == 0


_MUTABLE = (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)
_MAKERS = {"dict", "list", "set", "Counter", "OrderedDict", "defaultdict", "deque", "count"}
_MUTATORS = {
    "add",
    "append",
    "appendleft",
    "clear",
    "discard",
    "extend",
    "insert",
    "pop",
    "popitem",
    "popleft",
    "remove",
    "setdefault",
    "sort",
    "update",
}


def _name(node):
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", None)


def _changed_names(tree):
    """Names of variables that functions change in place."""
    for node in itertools.chain(*(ast.walk(node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))):
        if isinstance(node, ast.AugAssign):
            yield _name(node.target)
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            yield _name(node.value)
        elif isinstance(node, ast.Call) and _name(node.func) == "next":
            yield _name(node.args[0])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _MUTATORS:
            yield _name(node.func.value)


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_has_no_state(path):
    """State is in attributes of instances; ``jaxche.distributed.process_group()`` finds the one of this process."""
    tree = ast.parse(path.read_text(encoding="utf8"))
    assert not any(isinstance(node, ast.Global) for node in ast.walk(tree)), f"{path.name} has a global statement"
    mutable = set()
    for node in tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if isinstance(value, _MUTABLE) or (isinstance(value, ast.Call) and _name(value.func) in _MAKERS):
            mutable |= {_name(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])}
    changed = mutable & set(_changed_names(tree))
    assert not changed, f"{path.name} changes {changed} of its module"


@pytest.mark.slow
def test_contributing_lists_every_module():
    path = ROOT.parent / "scripts" / "house.py"
    spec = importlib.util.spec_from_file_location("house", path)
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    page = (ROOT.parent / "CONTRIBUTING.md").read_text(encoding="utf8")
    assert house.table(ORDER) in page, "write: python scripts/house.py --write"
    assert house.layers() == ORDER


@pytest.mark.slow
def test_a_reader_follows_a_round_through_few_modules(run_forked):
    path = {**os.environ, "PYTHONPATH": str(ROOT.parent), "JAX_PLATFORMS": "cpu"}
    done = run_forked(ROOT.parent / "scripts" / "trace_round.py", env=path)
    assert done.returncode == 0, done.stderr
    *modules, count = [line.split()[0] for line in done.stdout.splitlines()]
    assert int(count) == len(modules) <= 17, done.stdout
    # A run without groups, overlap or few bytes needs none of their code.
    assert not [name for name in modules if name.endswith(("_groups.py", "_group_merge.py", "_overlap.py", "_wire.py"))]


def _imported(path, modules):
    """Modules of jaxche that a file imports anywhere, also under TYPE_CHECKING; a package's face stands for none."""
    for module, names in imports(path):
        yield from ({module, *(f"{module}.{name}" for name in names)} & modules)


def test_no_modules_import_each_other_in_a_circle():
    name = {path: ".".join(["jaxche", *path.relative_to(ROOT).with_suffix("").parts]) for path in FILES}
    modules = set(name.values())
    graph = {name[path]: set(_imported(path, modules)) - {name[path]} for path in FILES if path.stem != "__init__"}
    while leaves := {module for module, found in graph.items() if not found & graph.keys()}:
        graph = {module: found for module, found in graph.items() if module not in leaves}
    assert not graph, f"these lie on a circle or above one: {', '.join(sorted(graph))}"
