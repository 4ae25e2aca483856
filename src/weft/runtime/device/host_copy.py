"""Tensors of a device that the host reads later, without waiting for the device in between."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.device.pauses import Pauses
from weft.runtime.device.streams import has_streams


class HostCopy:
    """A copy in pinned memory, made in the order of the current stream; it may be read once it is `ready`.

    Tensors that are on the CPU are taken as they are.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._event: torch.Event | None = None
        self._tensors = list(tensors)
        self._numbers: list[float] | None = None
        device = None
        for place, tensor in enumerate(self._tensors):
            if tensor.device.type == "cpu":
                continue
            tensor = tensor.detach()
            if has_streams(tensor.device):
                device = tensor.device
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                self._tensors[place] = host.copy_(tensor, non_blocking=True)
            else:
                self._tensors[place] = tensor.cpu()
        if device is not None:
            self._event = torch.accelerator.current_stream(device).record_event()

    @property
    def ready(self) -> bool:
        if self._event is None:
            return True
        if self._event.query():
            self._event = None
        return self._event is None

    def wait(self, seconds: float) -> None:
        """Block until it is ready; TimeoutError after so many seconds."""
        pauses = Pauses(seconds)
        while not self.ready:
            if pauses.are_over():
                raise TimeoutError(f"timed out after {seconds:g} s: a device has not computed what was copied from it")

    @property
    def tensors(self) -> list[Tensor]:
        assert self.ready, "read before the device has written it"
        return self._tensors

    def numbers(self) -> list[float]:
        """All elements of all tensors."""
        if self._numbers is None:
            self._numbers = [number for tensor in self.tensors for number in tensor.double().reshape(-1).tolist()]
            self._tensors.clear()  # pinned memory is scarce
        return self._numbers
