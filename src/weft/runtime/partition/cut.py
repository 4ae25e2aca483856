"""Any model as a list of layers, cut before submodules that the user names or where its forward calls `weft.cut()`.

`torch.export` turns a forward into one graph. The graph is cut into consecutive layers. Values that a layer needs from
earlier layers are passed from layer to layer (the *carry*), so skip connections and several inputs work:

    layer 0  inputs        -> (h, mask)       the carry is a tuple of tensors and plain numbers
    layer 1  (h, mask)     -> (h, mask, n)    layer 1 passes mask on even if only layer 2 uses it
    layer 2  (h, mask, n)  -> the model's output

An exported graph is fixed to one mode, so the model is exported twice, for training and for evaluation. A layer holds
both graphs and, under the model's names, the parameters and buffers that they use: the same tensors as the model.
This module checks the cuts; `export` makes the graphs, `graphs` splits them, `cut_layer` is the resulting layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from weft.errors import WeftError
from weft.runtime.partition.cut_layer import as_call
from weft.runtime.partition.export import export_forward, is_exported, read_exported
from weft.runtime.partition.graphs import MARK, split_into_layers
from weft.runtime.partition.members import AS_THEY_ARE, ComputeDtypes
from weft.text import did_you_mean


def cut(*values: Any) -> Any:
    """Mark a place in a model's forward where it may be cut. Returns its arguments, and does nothing else."""
    if torch.compiler.is_exporting():
        MARK("")
    return values if len(values) > 1 else values[0] if values else None


def cut_layers(
    model: Any, *, at: Sequence[str] | None, example: Any, dtypes: ComputeDtypes = AS_THEY_ARE
) -> list[nn.Module]:
    """Cut a model into layers that are called one after the other, each with the output of the previous one.

    The first layer takes the inputs of a micro-batch in the form of `example` (a tensor, a tuple of arguments or a dict
    of keyword arguments); the last one returns what the model returns. Sizes may differ from the example's where
    torch.export allows it.

    `at` names the submodules that start a new layer; None cuts at the marks: `weft.cut()` or `pipe_split()`. A cut with
    nothing to compute before it, or after it, makes no layer.

    A graph names dtypes, so it is made with weights and inputs of the `dtypes` that passes read.

    A Hugging Face model is exported without its cache of keys and values, which training does not use. A `Pipe` of
    torch.distributed.pipelining and an ExportedProgram work too, cut at their own marks and in their own mode.
    """
    if is_exported(model):
        if at is not None:
            raise WeftError(
                f"an exported model is cut at its own marks, not at names (got a {type(model).__name__} and "
                f"{list(at)}); pass the model that it was exported from"
            )
        if dtypes.low is not None:
            raise WeftError(
                f"the graph of an exported model has fixed dtypes, so it can't compute with weights of {dtypes.low} "
                f"(got a {type(model).__name__}); pass the model that it was exported from, or use "
                'precision="bf16-autocast"'
            )
        forwards = read_exported(model)
    else:
        at = [at] if isinstance(at, str) else at
        _check_names(model, at)
        if example is None:
            raise WeftError(
                f"cutting a model needs an example of its inputs (model: {type(model).__name__}, example: None); pass "
                "the inputs of one micro-batch: a tensor, a tuple of arguments or a dict of keyword arguments"
            )
        call = as_call(example)
        forwards = {
            training: export_forward(model, training=training, at=at, call=call, dtypes=dtypes)
            for training in (True, False)
        }
    marks = [forward.marks for forward in forwards.values()]
    if at is None:
        _check_marks(marks, type(model).__name__)
    else:
        for mode_marks in marks:
            _check_order(model, at, mode_marks)
    return list(split_into_layers(forwards))


# Checks


def _check_names(model: Any, names: Sequence[str] | None) -> None:
    if not isinstance(model, nn.Module):
        raise WeftError(f"only an nn.Module can be cut into layers (got {type(model).__name__})")
    if names is None:
        return
    if not names:
        raise WeftError("a model is cut at submodules (names: none); name the submodules that start a new layer")
    known = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known) or (
                f"; its first submodule is {known[0]!r}" if known else "; it has no submodules"
            )
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
    if any(mode_marks != marks[0] for mode_marks in marks):
        raise WeftError(
            f"the forward of {model} must reach the same marks in training and in evaluation "
            f"(marks: {' and '.join(str(len(mode_marks)) for mode_marks in marks)}); set them where both modes pass"
        )
