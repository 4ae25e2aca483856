"""Functions of the user: loads one by name, `package.module:function` or `file.py:function`; their signatures."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from weft.errors import WeftError, one_line


def load(name: str) -> Callable[..., Any]:
    """The function of a name; an exception that it raises becomes a WeftError."""
    home, _, attribute = name.partition(":")
    try:
        module = _from_file(Path(home)) if home.endswith(".py") else _from_path(home)
    except WeftError:
        raise
    except Exception as problem:
        raise WeftError(f"{home} can't be imported ({one_line(problem)})") from problem
    function = getattr(module, attribute, None)
    if function is None:
        raise WeftError(f"{home} has no {attribute!r}; write it as {home}:function")

    def call(**arguments: Any) -> Any:
        try:
            return function(**arguments)
        except WeftError:
            raise
        except Exception as problem:
            raise WeftError(f"{name} failed ({one_line(problem)})") from problem

    call.__wrapped__ = function  # type: ignore[attr-defined]  # for inspect.signature
    call.__qualname__ = name  # for messages
    return call


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """None: it can't be called, or it is written in C and has none."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def _from_file(path: Path) -> ModuleType:
    """Import a file as a module; it can import from its folder."""
    if not path.is_file():
        raise WeftError(f"{path} does not exist; name an existing file or package")
    spec = importlib.util.spec_from_file_location(f"weft_user_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # as the import statement does; dataclasses need it
    _search(str(path.parent.resolve()))
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> ModuleType:
    _search("")  # the current folder, as `python -m` does
    return importlib.import_module(name)


def _search(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)
