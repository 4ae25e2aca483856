"""Moved weights: a batch has the bits of single parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.runtime.update.moves import move_weights
from weft.runtime.update.rules import Direction, OverRoot, Ratio

SHAPES = [(7, 5), (1,), (33,), (), (0, 3), (4, 3, 2)]


def random(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def straight(dtype: torch.dtype) -> list[Direction]:
    return list(random(dtype))


def ratios(dtype: torch.dtype) -> list[Direction]:
    rows = zip(random(dtype), random(dtype), strict=True)
    return [Ratio(top, bottom.abs() + 0.1, 0.3 + number) for number, (top, bottom) in enumerate(rows)]


def roots(dtype: torch.dtype) -> list[Direction]:
    rows = zip(random(dtype), random(dtype), strict=True)
    return [OverRoot(top, square.square(), 10.0**-number, 0.7 + number) for number, (top, square) in enumerate(rows)]


def of_all_kinds(dtype: torch.dtype) -> list[Direction]:
    return [*straight(dtype)[:2], *ratios(dtype)[2:4], *roots(dtype)[4:]]


def formula(weight: Tensor, direction: Direction, rate: float) -> Tensor:
    if isinstance(direction, Ratio):
        return weight - rate * direction.factor * direction.top / direction.bottom
    if isinstance(direction, OverRoot):
        return weight - rate * direction.factor * direction.top / (direction.squares.sqrt() + direction.eps)
    return weight - rate * direction


@pytest.mark.parametrize("directions", [straight, ratios, roots, of_all_kinds])
def test_weights_move_by_the_formula(directions: Any) -> None:
    torch.manual_seed(1)
    weights, along = random(torch.float64), directions(torch.float64)
    expected = [formula(weight, direction, 0.3) for weight, direction in zip(weights, along, strict=True)]
    before = [weight.clone() for weight in weights]
    targets = [torch.full_like(weight, torch.nan) for weight in weights]
    move_weights(weights, along, 0.3, targets)
    torch.testing.assert_close(targets, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, before, rtol=0, atol=0)


@pytest.mark.parametrize("directions", [straight, ratios, roots, of_all_kinds])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_a_batch_has_the_bits_of_single_parameters(directions: Any, dtype: torch.dtype, state: torch.dtype) -> None:
    """Also if the optimizer's state is of another dtype than the weights."""
    torch.manual_seed(2)
    weights, along = random(dtype), directions(state)
    together, alone = ([torch.full_like(weight, torch.nan) for weight in weights] for _ in range(2))
    move_weights(weights, along, 0.3, together)
    for weight, direction, target in zip(weights, along, alone, strict=True):
        move_weights([weight], [direction], 0.3, [target])
    for in_batch, single, weight in zip(together, alone, weights, strict=True):
        assert torch.equal(in_batch, single)
        assert not weight.numel() or not torch.equal(single, weight)
