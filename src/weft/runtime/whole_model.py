"""`weft.materialize`: a whole model on the meta device gets its weights, in this process."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from weft.runtime.checkpoint import stored_weights
from weft.runtime.initial import Weights, make_tensors
from weft.runtime.partition import LayeredModel, named_tensors, state_tensors

M = TypeVar("M", bound=nn.Module)


def materialize(model: M, *, weights: Weights = None, seed: int = 0) -> M:
    """Give a model on the meta device its weights, the same ones as in a pipeline, and return it.

    `weights` is a file or folder of safetensors, a checkpoint, a dict of tensors, or a function that initializes a
    module, as for `nn.Module.apply`. Without it, the model initializes itself.
    """
    tensors = [tensor for _, _, tensor in named_tensors(model)]
    whole = LayeredModel(layers=[model], root=model, state=state_tensors(model))
    make_tensors(whole, tensors, own=tensors, weights=weights, open_weights=stored_weights, seed=seed)
    return model
