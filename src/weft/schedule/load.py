"""A user's own schedule by name: `package.module:function` or `file.py:function`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.schedule.core import Schedule


def load_function(name: str) -> Callable[..., Schedule]:
    """The function behind a name; what it raises or returns wrongly becomes a clear error."""
    home, _, attribute = name.partition(":")
    try:
        module = _from_file(Path(home)) if home.endswith(".py") else _from_path(home)
        function = getattr(module, attribute)
    except FileNotFoundError:
        raise WeftError(f"{home} is not there; name a file or a package that is") from None
    except AttributeError:
        raise WeftError(f"{home} has no {attribute!r}; write it as {home}:function") from None
    except Exception as problem:
        raise WeftError(f"{home} can't be imported ({type(problem).__name__}: {problem})") from problem

    def build(**arguments: Any) -> Schedule:
        try:
            schedule = function(**arguments)
        except WeftError:
            raise
        except Exception as problem:
            raise WeftError(f"{name} failed ({type(problem).__name__}: {problem})") from problem
        if not isinstance(schedule, Schedule):
            raise WeftError(f"{name} must return a weft.Schedule (got {type(schedule).__name__})")
        return schedule

    return build


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> Any:
    if "" not in sys.path:  # as `python -m` does it, and the command `weft` would not
        sys.path.insert(0, "")
    return importlib.import_module(name)
