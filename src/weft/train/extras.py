"""Libraries that only some jobs need, imported on demand; an error says how to install a missing one."""

from __future__ import annotations

import importlib
from typing import Any

from weft.errors import WeftError


def need(module: str, extra: str, *, purpose: str) -> Any:
    """The module, or an error that names the extra to install."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise WeftError(f"{purpose} needs {module} ({problem}); pip install 'weft[{extra}]'") from problem
