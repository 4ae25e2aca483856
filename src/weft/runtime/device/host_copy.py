"""Tensors of a device that the host reads later, without waiting for the device in between."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.device.streams import has_streams

FIRST_PAUSE, LONGEST_PAUSE = 2e-5, 1e-3  # seconds between two looks at an event


class HostCopy:
    """A copy in pinned memory, made in the order of the current stream; it may be read once it is `ready`.

    Tensors that are on the CPU are taken as they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.Event | None = None
        self._tensors = list(tensors)
        self._numbers: list[float] | None = None
        for place, tensor in enumerate(self._tensors):
            if tensor.device.type == "cpu":
                continue
            tensor = tensor.detach()
            if has_streams(tensor.device):
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self._tensors[place] = host.copy_(tensor, non_blocking=True)
                self._event = torch.accelerator.current_stream(tensor.device).record_event()
            else:
                self._tensors[place] = tensor.cpu()

    @property
    def ready(self) -> bool:
        if self._event is None:
            return True
        if self._event.query():
            self._event = None
        return self._event is None

    def wait(self, seconds: float) -> None:
        """Block until it is ready; TimeoutError after so many seconds."""
        end, pause = time.monotonic() + seconds, FIRST_PAUSE
        while not self.ready:
            if time.monotonic() > end:
                raise TimeoutError(f"timed out after {seconds:g} s: a device has not computed what was copied from it")
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)

    @property
    def tensors(self) -> list[Tensor]:
        assert self.ready, "read before the device has written it"
        return self._tensors

    def numbers(self) -> list[float]:
        """All elements of all tensors."""
        if self._numbers is None:
            self._numbers = [number for tensor in self.tensors for number in tensor.double().reshape(-1).tolist()]
        return self._numbers
