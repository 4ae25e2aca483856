"""A model's own initialization, for tensors that were built on the meta device.

It does what building the model would have done, children before their parents: `reset_parameters` of every module that
has one; then the rules of a transformers model (`_init_weights`), which a parent may apply to its children, and which
also compute its buffers; then the user's function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from weft.errors import WeftError, one_line
from weft.runtime.device import random_state_restored
from weft.runtime.initial.seeded import SeededInitialization

Initializer: TypeAlias = Callable[[nn.Module], Any]  # as for `nn.Module.apply`
RESETS = ("reset_parameters", "_reset_parameters")


def initialize(
    root: nn.Module,
    names: Iterable[str],
    tensors: Mapping[str, Tensor],
    *,
    seed: int,
    function: Initializer | None = None,
) -> set[str]:
    """Initialize some of a model's tensors, by name; returns the names of those that something has written to."""
    wanted = {id(tensors[name]) for name in names}
    modules = [
        (name, module, rule)
        for name, module, rule in _children_first(root, "", None, set())
        if any(id(tensor) in wanted for tensor in (*module.parameters(), *module.buffers()))
    ]
    mode = SeededInitialization(seed, tensors)
    with random_state_restored([]), torch.no_grad(), mode:
        for name, module, _ in modules:
            if reset := next((attribute for attribute in RESETS if hasattr(module, attribute)), None):
                _run(getattr(module, reset), mode, name, module)
        for name, module, rule in modules:
            if rule is not None:
                _run(partial(rule, module), mode, name, module)
        if function is not None:
            for name, module, _ in modules:
                _run(partial(function, module), mode, name, module)
    return mode.written


def _children_first(
    module: nn.Module, name: str, rule: Initializer | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, Initializer | None]]:
    """All modules, each once and after its children, with the rule of the innermost transformers model around it."""
    if module in seen:
        return
    seen.add(module)
    if hasattr(module, "_init_weights") and hasattr(module, "config"):
        rule = cast(Initializer, module._init_weights)
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name, rule, seen)
    yield name, module, rule


def _run(rule: Callable[[], Any], mode: SeededInitialization, name: str, module: nn.Module) -> None:
    mode.begin(name)
    try:
        rule()
    except WeftError:
        raise
    except Exception as problem:
        raise WeftError(
            f"{name or 'the model'} ({type(module).__name__}) can't be initialized on the rank that holds it "
            f"({one_line(problem)}); give weights= a file, or a function that initializes each module by itself"
        ) from problem
