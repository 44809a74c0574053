"""A function in a file or module of the user, named on the command line as FILE.py:FUNCTION."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxche.messages import users_part


def load_function(target: str) -> Callable[..., Any]:
    """The function that ``FILE.py:FUNCTION`` or ``package.module:FUNCTION`` names; the file is imported."""
    where, colon, name = target.rpartition(":")
    if not (colon and where and name):
        raise ValueError(f"{target!r} names no function; write FILE.py:FUNCTION, e.g. train.py:make_model")
    module = _import(where)
    found = getattr(module, name, None)
    if found is None:
        functions = [
            key
            for key, value in vars(module).items()
            if callable(value) and getattr(value, "__module__", None) == module.__name__
        ]
        own = f"it has {', '.join(functions[:8])}" if functions else "it has none"
        raise ValueError(f"{where} has no function {name!r}; {own}")
    if not callable(found):
        raise ValueError(
            f"{target} is a value of type {type(found).__name__}, not a function; write in {where}: "
            f"def make(): return {name}"
        )
    return found


@contextlib.contextmanager
def user_errors(target: str) -> Iterator[None]:
    """Print the traceback of an error in the user's code without the frames of jaxche, and raise ``ValueError``."""
    try:
        yield
    except SystemExit as error:
        raise ValueError(
            f"{target} ended with code {error.code}; put what it runs as a script under if __name__ == '__main__':"
        ) from None
    except Exception as error:
        trace = users_part(error.__traceback__)
        if trace is None and not isinstance(error, SyntaxError):
            raise
        traceback.print_exception(type(error), error, trace)
        raise ValueError(f"{target} raised {type(error).__name__}; its traceback is above") from None


def _import(where: str) -> ModuleType:
    sys.path.insert(0, str(Path(where).resolve().parent) if where.endswith(".py") else os.getcwd())
    if not where.endswith(".py"):
        try:
            with user_errors(where):
                return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"no module {where!r} from {os.getcwd()} ({error}); write e.g. train.py:make_model"
            ) from None
    path = Path(where)
    if not path.is_file():
        raise ValueError(f"no file {where!r} in {os.getcwd()}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    sys.argv = [where]
    # Where pickles and dataclasses look for it.
    sys.modules[path.stem] = module
    with user_errors(where):
        spec.loader.exec_module(module)
    return module
