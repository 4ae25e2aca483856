"""A model's own initialization, for tensors that were built on the meta device.

It does what building the model would have done, children before their parents: `reset_parameters` of every module that
has one; then the rules of a transformers model (`_init_weights`), which a parent may apply to its children, and which
also compute its buffers; then the user's function.

A tied tensor has several modules, and is that of one of them: in a constructor, the other modules' tensors have been
replaced by it. So once that module has initialized it, rules of the others don't change it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn

from weft.errors import WeftError, one_line
from weft.runtime.device import random_state_restored
from weft.runtime.initial.on_meta import RESETS, RULE
from weft.runtime.initial.seeded import SeededInitialization

Initializer: TypeAlias = Callable[[nn.Module], Any]  # as for `nn.Module.apply`


def initialize(
    root: nn.Module,
    names: Iterable[str],
    tensors: Mapping[str, Tensor],
    *,
    seed: int,
    tied: Mapping[str, nn.Module],
    function: Initializer | None = None,
) -> set[str]:
    """Initialize some of a model's tensors, by name; returns the names of those that something has written to.

    `tied` are the names of tied tensors, with the module that initializes each.
    """
    wanted = {id(tensors[name]) for name in names}
    modules = [
        (name, module, rule)
        for name, module, rule in _children_first(root, "", None, set())
        if any(id(tensor) in wanted for tensor in (*module.parameters(), *module.buffers()))
    ]
    mode = SeededInitialization(seed, tensors)
    with random_state_restored([]), torch.no_grad(), mode:
        for _, module in _keeping_ties(modules, tied, mode):
            if reset := next((attribute for attribute in RESETS if hasattr(module, attribute)), None):
                _run(getattr(module, reset), mode, module)
        for rule, module in _keeping_ties(modules, tied, mode):
            if rule is not None:
                _run(partial(rule, module), mode, module)
        if function is not None:
            for _, module in _keeping_ties(modules, {}, mode):
                _run(partial(function, module), mode, module)
    return mode.written


def _keeping_ties(
    modules: Iterable[tuple[str, nn.Module, Initializer | None]],
    tied: Mapping[str, nn.Module],
    mode: SeededInitialization,
) -> Iterator[tuple[Initializer | None, nn.Module]]:
    """Each module and the rule for it, while tied tensors that are initialized already stay as they are."""
    done: dict[str, nn.Module] = {}
    for path, module, rule in modules:
        parts = set(module.modules()) if done else set()
        mode.kept = {name for name, keeper in done.items() if keeper not in parts}
        mode.begin(path)
        yield rule, module
        done |= {name: keeper for name, keeper in tied.items() if keeper is module}


def _children_first(
    module: nn.Module, name: str, rule: Initializer | None, seen: set[nn.Module]
) -> Iterator[tuple[str, nn.Module, Initializer | None]]:
    """All modules, each once and after its children, with the rule of the innermost transformers model around it."""
    if module in seen:
        return
    seen.add(module)
    own_rule = getattr(module, RULE, None)
    if callable(own_rule) and len(inspect.signature(own_rule).parameters) == 1:
        rule = cast(Initializer, own_rule)
    for child_name, child in module.named_children():
        yield from _children_first(child, f"{name}.{child_name}" if name else child_name, rule, seen)
    yield name, module, rule


def _run(rule: Callable[[], Any], mode: SeededInitialization, module: nn.Module) -> None:
    try:
        rule()
    except WeftError:
        raise
    except Exception as problem:
        raise WeftError(
            f"{mode.module or 'the model'} ({type(module).__name__}) can't be initialized on the rank that holds it "
            f"({one_line(problem)}); give weights= a file, or a function that initializes each module by itself"
        ) from problem
