"""Any model as a list of layers, cut before submodules that its user names or where its forward says `weft.cut()`.

`torch.export` writes a forward down as one graph; the graph is cut into consecutive parts, and what a part needs from
those before it is handed on from layer to layer (the *carry*), so skip connections and several inputs just work:

    layer 0  inputs        -> (h, mask)       the carry is a tuple of tensors and plain numbers
    layer 1  (h, mask)     -> (h, mask, n)    mask may be of use to layer 2 only: it rides along
    layer 2  (h, mask, n)  -> the model's own output

An exported graph is fixed to one mode, so the model is exported twice, for training and for evaluation. A layer holds
both graphs and, under the model's own names, the parameters and buffers that they use: the very tensors of the model.
Here is what users see; `export` writes forwards down, `graphs` takes them apart, `cutlayer` is what comes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.errors import WeftError
from weft.runtime.partition.cut_layer import as_call
from weft.runtime.partition.export import export, is_exported, read_exported
from weft.runtime.partition.graphs import MARK, take_apart
from weft.text import did_you_mean


def cut(*values: Any) -> Any:
    """A mark in a model's forward: here it may be cut. Returns what it is given, and does nothing else."""
    if torch.compiler.is_exporting():
        MARK("")
    return values if len(values) > 1 else values[0] if values else None


def cut_layers(model: Any, *, at: Sequence[str] | None, example: Any) -> list[nn.Module]:
    """Cut a model into layers that are called one after the other: each takes what the one before it returned.

    The first layer takes the inputs of a micro-batch in the form of `example` (a tensor, a tuple of arguments or a dict
    of keyword arguments), the last one returns what the model returns. Sizes may differ from the example's wherever
    torch.export allows it.

    `at` names the submodules that start a new layer; None cuts at the marks: `weft.cut()` or `pipe_split()`. A cut that
    has nothing to compute before it, or after it, makes no layer.

    A Hugging Face model is exported without its cache of keys and values, which training has no use for. A `Pipe` of
    torch.distributed.pipelining and an ExportedProgram are taken too, at their own marks and in their own mode.
    """
    if is_exported(model):
        if at is not None:
            raise WeftError(
                f"a model that is exported already is cut at its own marks, not at names (got a {type(model).__name__} "
                f"and {list(at)}); give weft the model that it was made from"
            )
        forwards = read_exported(model)
    else:
        at = [at] if isinstance(at, str) else at
        _check_names(model, at)
        if example is None:
            raise WeftError(
                f"a model is cut along an example of its inputs (model: {type(model).__name__}, example: None); give "
                "those of one micro-batch: a tensor, a tuple of arguments or a dict of keyword arguments"
            )
        call = as_call(example)
        forwards = {training: export(model, training=training, at=at, call=call) for training in (True, False)}
    marks = [forward.marks for forward in forwards.values()]
    if at is None:
        _check_marks(marks, type(model).__name__)
    else:
        for one in marks:
            _check_order(model, at, one)
    return list(take_apart(forwards))


# What can be wrong


def _check_names(model: Any, names: Sequence[str] | None) -> None:
    if not isinstance(model, nn.Module):
        raise WeftError(f"only an nn.Module can be cut into layers (got {type(model).__name__})")
    if names is None:
        return
    if not names:
        raise WeftError("there is nothing to cut at (names: none); name the submodules that start a new layer")
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or (f"; its first is {known[0]!r}" if known else "; it has no submodules")
            raise WeftError(f"{type(model).__name__} has no submodule {name!r} to cut at{hint}")
        if names.count(name) > 1:
            raise WeftError(
                f"a model is cut once before a submodule (given {names.count(name)} times: {name}); drop one"
            )


def _check_order(model: nn.Module, names: Sequence[str], marks: Sequence[str]) -> None:
    for name in names:
        if name not in marks:
            inner = next((f" such as {name}.{child}" for child, _ in model.get_submodule(name).named_children()), "")
            raise WeftError(
                f"a cut needs a submodule that forward calls ({name} isn't called); name another one{inner}"
            )
        if marks.count(name) > 1:
            raise WeftError(
                f"a cut needs a submodule that forward calls once ({name} is called {marks.count(name)} times); "
                "name another one, or set marks with weft.cut() in the forward"
            )
    if list(names) != list(marks):
        raise WeftError(
            f"cuts must be in the order in which they are reached (given: {', '.join(names)}); "
            f"this is {', '.join(marks)}"
        )


def _check_marks(marks: Sequence[Sequence[str]], model: str) -> None:
    if not any(marks):
        raise WeftError(
            f"the forward of {model} has no mark to cut it at; name submodules (cut=[...]), "
            "or call weft.cut() in the forward"
        )
    if any(one != marks[0] for one in marks):
        raise WeftError(
            f"the forward of {model} must reach the same marks in training and in evaluation "
            f"(marks: {' and '.join(str(len(one)) for one in marks)}); set them where both pass"
        )
