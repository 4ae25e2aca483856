"""The default random generator of a device, whatever the device is.

Reading and setting its state does not make the host wait: a generator is a seed and a counter in host memory.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from weft.errors import WeftError


class Generator(Protocol):
    """What weft uses of a `torch.Generator`."""

    def get_state(self) -> Tensor: ...

    def set_state(self, new_state: Tensor, /) -> Any: ...

    def manual_seed(self, seed: int, /) -> Any: ...


def device_generator(device: torch.device) -> Generator:
    """The default generator of a device."""
    if device.type == "cpu":
        return torch.default_generator
    module = torch.get_device_module(device)
    torch.empty(0, device=device)  # a device has no generators before its first use
    generators = getattr(module, "default_generators", ())
    index = module.current_device() if device.index is None and generators else device.index or 0
    if index < len(generators):
        generator: Generator = generators[index]
        return generator
    functions = ("get_rng_state", "set_rng_state", "manual_seed")
    if missing := [name for name in functions if not hasattr(module, name)]:
        raise WeftError(
            f"weft seeds random numbers for every layer, so that dropout does not depend on the schedule, and {device} "
            f"can't do that (torch.{device.type} has no {', '.join(missing)}); use another device"
        )
    return _ModuleGenerator(module, device)


class _ModuleGenerator:
    """The generator of a device whose module shows functions only."""

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self._device)
        return state

    def set_state(self, state: Tensor, /) -> None:
        self._module.set_rng_state(state, self._device)

    def manual_seed(self, seed: int, /) -> None:
        self._module.manual_seed(seed)  # of the current device, which is the one that a rank computes on


@contextlib.contextmanager
def random_state_restored(devices: Iterable[torch.device]) -> Iterator[None]:
    """Restore the generators of some devices, the CPU, Python and NumPy afterwards; no other device is touched.

    For code of users and of others, which may use any of them.
    """
    others = {device for device in devices if device.type not in ("cpu", "meta")}
    generators = [torch.default_generator, *(device_generator(device) for device in others)]
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
