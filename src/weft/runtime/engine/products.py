"""Gradients of weights that are one product of a saved input and the gradient of the output.

A node of autograd that computes such a product can leave it for later: its saved input and the gradient that reaches it
are enough. A product has the bits of autograd, because it calls the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

Gradients: TypeAlias = "Sequence[Tensor | None]"  # of the inputs of an operator


@dataclass(frozen=True, slots=True)
class Product:
    """The gradients of some inputs of an operator, not computed yet."""

    kept: tuple[Tensor, ...]  # of the forward
    formula: Callable[..., Gradients]  # of the gradient of the output and of what is kept

    def __call__(self, gradient: Tensor) -> Gradients:
        return self.formula(gradient, *self.kept)


def _mm(node: Any, _: Collection[int]) -> Product:
    return Product((node._saved_self.detach(),), _of_second_matrix(node))


def _addmm(node: Any, wanted: Collection[int]) -> Product:
    """The first input, a bias, may have been broadcast."""
    shape = _shape_of_gradient(node, 0) if 0 in wanted else None
    of_second = _of_second_matrix(node) if 2 in wanted else None  # a frozen matrix has no sizes here

    def formula(gradient: Tensor, *first: Tensor) -> Gradients:
        of_bias = None if shape is None else gradient.sum_to_size(shape)
        return of_bias, *((None, None) if of_second is None else of_second(gradient, *first))

    return Product((node._saved_mat1.detach(),) if 2 in wanted else (), formula)


def _shape_of_gradient(node: Any, number: int) -> Sequence[int]:
    after, place = node.next_functions[number]
    shape: Sequence[int] = after._input_metadata[place].shape
    return shape


def _of_second_matrix(node: Any) -> Callable[[Tensor, Tensor], Gradients]:
    """Autograd computes the gradient in the layout of the matrix."""
    size, stride = node._saved_mat2_sym_sizes, node._saved_mat2_sym_strides
    if stride[0] == 1 and stride[1] == size[0]:
        return lambda gradient, first: (None, gradient.t().mm(first.conj()).t())
    return lambda gradient, first: (None, first.t().conj().mm(gradient))


def _bmm(node: Any, _: Collection[int]) -> Product:
    def formula(gradient: Tensor, first: Tensor) -> Gradients:
        return None, first.transpose(1, 2).conj().bmm(gradient)

    return Product((node._saved_self.detach(),), formula)


def _convolution(node: Any, wanted: Collection[int]) -> Product:
    """The kernel reads the shape of the weight, not its values."""
    options = (
        node._saved_bias_sym_sizes_opt,
        node._saved_stride,
        node._saved_padding,
        node._saved_dilation,
        node._saved_transposed,
        node._saved_output_padding,
        node._saved_groups,
        [number in wanted for number in range(3)],
    )

    def formula(gradient: Tensor, value: Tensor, weight: Tensor) -> Gradients:
        gradients: Gradients = torch.ops.aten.convolution_backward.default(gradient, value, weight, *options)
        return gradients

    return Product((node._saved_input.detach(), node._saved_weight.detach()), formula)


@dataclass(frozen=True)
class _Rule:
    weights: frozenset[int]  # the inputs of the operator that may be weights
    saved: str  # the input that it saves
    product: Callable[[Any, Collection[int]], Product]


_RULES: Mapping[str, _Rule] = {
    "MmBackward0": _Rule(frozenset({1}), "_raw_saved_self", _mm),
    "AddmmBackward0": _Rule(frozenset({0, 2}), "_raw_saved_mat1", _addmm),
    "BmmBackward0": _Rule(frozenset({1}), "_raw_saved_self", _bmm),
    "ConvolutionBackward0": _Rule(frozenset({1, 2}), "_raw_saved_input", _convolution),
}


def can_wait(node: Any, inputs: Collection[int]) -> bool:
    """Whether the gradients of these inputs of an operator can be left for later."""
    name = node.name()
    rule = _RULES.get(name)
    if rule is None or not rule.weights.issuperset(inputs):
        return False
    if name == "AddmmBackward0" and (node._saved_alpha != 1 or node._saved_beta != 1):
        return False
    unpack = getattr(node, rule.saved).unpack_hook
    return unpack is None or (unpack.__module__ or "").startswith("weft")  # hooks of others may unpack only once


def product_for(node: Any, inputs: Collection[int]) -> Product:
    """The gradients of these inputs; call it before the node runs, which frees its saved tensors."""
    return _RULES[node.name()].product(node, inputs)
