"""What decides the result besides model and settings, as plain data by name that ranks can compare: versions, the loss
function, the optimizers that were built.

A description holds no addresses, paths or line numbers, which differ between ranks that train alike. It can't hold
everything: variables that a function reads from around it are left out.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
import sys
from collections.abc import Iterable, Mapping
from types import CodeType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.runtime.assembly.consistency import digest_of
from weft.runtime.weights import ParameterSet
from weft.version import __version__

PLAIN = (type(None), bool, int, float, str)


def versions() -> dict[str, str]:
    """Of what computes on this rank."""
    python = ".".join(map(str, sys.version_info[:2]))  # it decides what the code of a function looks like
    return {"weft": __version__, "torch": str(torch.__version__), "numpy": np.__version__, "python": python}


def describe_loss(loss_fn: Any) -> dict[str, Any]:
    """A function with a digest of its code, or the class and the plain attributes of another callable."""
    return _describe(loss_fn, "loss_fn")


def describe_updates(sets: Iterable[ParameterSet]) -> dict[str, Any] | None:
    """The optimizer of the first set that has one, and its learning-rate scheduler; None if there is none.

    Parameter groups are left out: layers may have options of their own.
    """
    for parameter_set in sets:
        optimizer, scheduler = parameter_set.optimizer, parameter_set.updater.lr_scheduler
        if optimizer is not None:
            options = {f"optimizer.{name}": _plain(value) for name, value in optimizer.defaults.items()}
            kind = None if scheduler is None else _name_of(type(scheduler))
            return {"optimizer": _name_of(type(optimizer))} | options | {"lr_scheduler": kind}
    return None


def _describe(function: Any, name: str) -> dict[str, Any]:
    if isinstance(function, functools.partial):
        arguments = dict(enumerate(function.args)) | function.keywords
        return _describe(function.func, name) | {f"{name}.{key}": _plain(value) for key, value in arguments.items()}
    if inspect.ismethod(function):
        return _describe(function.__func__, name)
    if inspect.isfunction(function):
        return {name: _name_of(function), f"code of {name}": _digest_of_code(function.__code__)}
    if isinstance(function, nn.Module):
        found = {name: _name_of(type(function))}
        for path, module in function.named_modules(prefix=name):
            found |= _attributes(module, path)
        return found | {f"{name}.{key}": digest_of(tensor) for key, tensor in function.state_dict().items()}
    if inspect.isbuiltin(function) or inspect.isclass(function):
        return {name: _name_of(function)}
    return {name: _name_of(type(function))} | _attributes(function, name)


def _attributes(thing: Any, path: str) -> dict[str, Any]:
    values = {name: value for name, value in getattr(thing, "__dict__", {}).items() if not name.startswith("_")}
    return {f"{path}.{name}": _plain(value) for name, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_plain, value.values()))
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else type(value) in PLAIN


def _plain(value: Any) -> Any:
    """A value that JSON keeps as it is, and that is equal on ranks that train alike."""
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if type(value) in (list, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor):
        return _plain(value.tolist()) if value.numel() == 1 else digest_of(value)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)  # nan is not equal to itself
    return value if type(value) in PLAIN else _name_of(type(value))


def _name_of(thing: Any) -> str:
    """The name of a function or class; a spawned process knows the main module by another name."""
    module = getattr(thing, "__module__", None) or "builtins"
    name = getattr(thing, "__qualname__", None) or type(thing).__qualname__
    return f"{'__main__' if module == '__mp_main__' else module}.{name}"


def _digest_of_code(code: CodeType) -> str:
    return hashlib.sha256(_text_of_code(code).encode()).hexdigest()[:16]


def _text_of_code(code: CodeType) -> str:
    constants = [_text_of_constant(constant) for constant in code.co_consts]
    return repr((code.co_code.hex(), constants, code.co_names))


def _text_of_constant(constant: Any) -> str:
    if isinstance(constant, CodeType):
        return _text_of_code(constant)
    if isinstance(constant, frozenset):
        return repr(sorted(map(repr, constant)))  # its own order differs between processes
    return repr(constant)
