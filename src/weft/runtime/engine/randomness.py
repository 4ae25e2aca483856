"""Random numbers that depend on seed, mini-batch, micro-batch and layer only.

The generator is seeded before every layer. So dropout does not depend on the schedule, on the number of ranks or on
recompute.
"""

from __future__ import annotations

import functools

import torch

from weft.runtime.device import device_generator

_MASK = (1 << 64) - 1


def mix(start: int, number: int) -> int:
    """A seed of 63 bits from one more number."""
    return _mixed(start, number) >> 1


def start_of(*numbers: int) -> int:
    """What `mix` starts with, from all numbers but the last: the finalizer of splitmix64 for each."""
    return functools.reduce(_mixed, numbers, 0x9E3779B97F4A7C15)


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
