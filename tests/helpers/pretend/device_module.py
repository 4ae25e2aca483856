"""`torch.pretend`: what PyTorch expects of the Python module of a device."""

from __future__ import annotations

import os
import types
from typing import Any

import torch
from torch.utils import backend_registration


def default_count() -> int:
    return int(os.environ.get("WEFT_PRETEND_DEVICES", "4"))


def register(extension: Any) -> None:
    """Name the device and attach its module."""
    backend_registration.rename_privateuse1_backend("pretend")
    torch._register_device_module("pretend", _Module(extension))  # type: ignore[no-untyped-call]
    backend_registration.generate_methods_for_privateuse1_backend(for_tensor=True, for_module=True, for_storage=True)


def _index(device: torch.device | str | int | None) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Device:
    """Makes a device the current one, as `torch.cuda.device` does."""

    def __init__(self, device: torch.device | str | int | None) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


class _Module(types.ModuleType):
    """Only what has no generic form is here; streams, events and memory come from `torch.accelerator`."""

    Stream = torch.Stream
    Event = torch.Event
    device = _Device
    _initialized = True  # activation checkpointing saves generators only then

    def __init__(self, extension: Any) -> None:
        super().__init__("torch.pretend")
        self._extension = extension
        self.default_generators = tuple(extension.default_generator(index) for index in range(64))

    def device_count(self) -> int:
        count: int = self._extension.device_count()
        return count

    def is_available(self) -> bool:
        return self.device_count() > 0

    def is_initialized(self) -> bool:
        return True

    def _lazy_init(self) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def set_device(self, device: torch.device | str | int) -> None:
        torch.accelerator.set_device_index(_index(device))

    def get_device_name(self, device: torch.device | str | int | None = None) -> str:
        return f"pretend {_index(device)}"

    def current_stream(self, device: torch.device | str | int | None = None) -> torch.Stream:
        return torch.accelerator.current_stream(_index(device))

    def default_stream(self, device: torch.device | str | int | None = None) -> torch.Stream:
        current = torch.accelerator.current_stream(_index(device))
        return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)

    def set_stream(self, stream: torch.Stream) -> None:
        torch.accelerator.set_stream(stream)

    def stream(self, stream: torch.Stream) -> torch.Stream:
        return stream  # a context manager by itself

    def synchronize(self, device: torch.device | str | int | None = None) -> None:
        torch.accelerator.synchronize(_index(device))

    def manual_seed(self, seed: int) -> None:
        self.default_generators[_index(None)].manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.default_generators:
            generator.manual_seed(seed)

    def initial_seed(self) -> int:
        seed: int = self.default_generators[_index(None)].initial_seed()
        return seed

    def get_rng_state(self, device: torch.device | str | int | None = None) -> torch.Tensor:
        state: torch.Tensor = self.default_generators[_index(device)].get_state()
        return state

    def set_rng_state(self, state: torch.Tensor, device: torch.device | str | int | None = None) -> None:
        self.default_generators[_index(device)].set_state(state)

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return [self.get_rng_state(index) for index in range(self.device_count())]

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        for index, state in enumerate(states):
            self.set_rng_state(state, index)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def memory_allocated(self, device: torch.device | str | int | None = None) -> int:
        return torch.accelerator.memory_allocated(_index(device))

    def max_memory_allocated(self, device: torch.device | str | int | None = None) -> int:
        return torch.accelerator.max_memory_allocated(_index(device))

    def max_memory_reserved(self, device: torch.device | str | int | None = None) -> int:
        return torch.accelerator.max_memory_reserved(_index(device))

    def reset_peak_memory_stats(self, device: torch.device | str | int | None = None) -> None:
        torch.accelerator.reset_peak_memory_stats(_index(device))

    def empty_cache(self) -> None:
        torch.accelerator.empty_cache()
