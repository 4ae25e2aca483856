"""Moves the weights of a batch of parameters: writes `W - rate · direction` into other tensors.

A single parameter takes the fewest passes over memory, and several take the fewest calls. Both give the same bits.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from weft.runtime.tensors import copy_tensors
from weft.runtime.update.rules import Direction, OverRoot, Ratio


def move_weights(weights: list[Tensor], directions: list[Direction], rate: float, targets: list[Tensor]) -> None:
    """Write each weight, moved along its direction, into its target."""
    if len(targets) == 1:
        _move_one(weights[0], directions[0], rate, targets[0])
    else:
        copy_tensors(targets, weights)
        _move_all(targets, directions, rate)


def _move_one(weight: Tensor, direction: Direction, rate: float, target: Tensor) -> None:
    if isinstance(direction, Tensor):
        torch.add(weight, direction, alpha=-rate, out=target)
        return
    if isinstance(direction, OverRoot):
        direction = Ratio(direction.top, direction.squares.sqrt().add_(direction.eps), direction.factor)
    torch.addcdiv(weight, direction.top, direction.bottom, value=-rate * direction.factor, out=target)


def _move_all(targets: list[Tensor], directions: list[Direction], rate: float) -> None:
    """Move the weights in the targets; a rule may return directions of several kinds."""
    kinds: dict[type, list[tuple[Tensor, Any]]] = defaultdict(list)
    for target, direction in zip(targets, directions, strict=True):
        kinds[Tensor if isinstance(direction, Tensor) else type(direction)].append((target, direction))
    for kind, rows in kinds.items():
        moved = [target for target, _ in rows]
        if kind is Tensor:
            torch._foreach_add_(moved, [direction for _, direction in rows], alpha=-rate)
            continue
        tops, bottoms = [ratio.top for _, ratio in rows], [ratio[1] for _, ratio in rows]
        if kind is OverRoot:
            bottoms = list(torch._foreach_sqrt(bottoms))
            torch._foreach_add_(bottoms, [ratio.eps for _, ratio in rows])
        torch._foreach_addcdiv_(moved, tops, bottoms, [-rate * ratio.factor for _, ratio in rows])
