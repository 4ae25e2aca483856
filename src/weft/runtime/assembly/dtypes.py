"""Refuse models that can't be trained with compute weights of another dtype than their parameters."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import Parameter

from weft.errors import WeftError
from weft.runtime.engine import Precision
from weft.runtime.partition import LayeredModel


def check_dtypes(model: LayeredModel, precision: Precision) -> None:
    """Masters are fp32, and nothing but updates changes them."""
    if precision.weights is None:
        return
    for name, tensor in model.state.items():
        if isinstance(tensor, Parameter) and tensor.requires_grad and tensor.dtype != torch.float32:
            raise WeftError(
                f'precision="bf16" trains fp32 parameters, of which it makes bf16 weights to compute with ({name}: '
                f"{str(tensor.dtype).removeprefix('torch.')}); build the model in fp32, or call model.float() first"
            )
    for module in (module for layer in model.layers for module in layer.modules()):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise WeftError(
                f"{type(module).__name__} with max_norm changes its weights in the forward, which computes with bf16 "
                'copies of them; leave max_norm out, or use precision="bf16-autocast"'
            )
