"""Random numbers that depend on seed, mini-batch, micro-batch and layer only.

The generator is seeded before every layer. So dropout does not depend on the schedule, on the number of ranks or on
recompute.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from weft.runtime.device import device_generator

_MASK = (1 << 64) - 1


def mix(*numbers: int) -> int:
    """A seed of 63 bits from several numbers."""
    return mixer(*numbers[:-1])(numbers[-1])


def mixer(*numbers: int) -> Callable[[int], int]:
    """The function that gives `mix` of these numbers and one more: the finalizer of splitmix64 for each number."""
    start = 0x9E3779B97F4A7C15
    for number in numbers:
        start = _mixed(start, number)
    return lambda last: _mixed(start, last) >> 1


def _mixed(state: int, number: int) -> int:
    state = (state ^ (number & _MASK)) * 0xBF58476D1CE4E5B9 & _MASK
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
    return state ^ (state >> 31)


class Seeds:
    """The random generators of a device: seed them, and restore their state afterwards."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [device_generator(torch.device("cpu"))]  # layers may draw on the host, too
        if device.type != "cpu":
            self._generators.append(device_generator(device))
        self._saved: list[torch.Tensor] = []

    def save(self) -> None:
        self._saved = [generator.get_state() for generator in self._generators]

    def restore(self) -> None:
        for generator, state in zip(self._generators, self._saved, strict=True):
            generator.set_state(state)

    def set(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)
