"""Libraries that only some jobs need: imported when they are, with the way to get them where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from weft.errors import WeftError


def need(module: str, extra: str, *, purpose: str) -> Any:
    """The module, or an error that names the extra which brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as problem:
        raise WeftError(f"{purpose} needs {module} ({problem}); pip install 'weft[{extra}]'") from problem
