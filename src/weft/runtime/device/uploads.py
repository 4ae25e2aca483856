"""Inputs on their way to a device: through pinned memory, on a stream of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.runtime.device.streams import mark, new_stream, record_use, wait_for_mark


class Uploads:
    """Moves tensors to a device while it computes."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, new_stream(device)

    def move(self, tensors: Sequence[Tensor], *, copy: bool) -> list[Tensor]:
        """The tensors on the device, for use in the current stream.

        `copy`: the caller may overwrite a tensor that is on the device already.
        """
        if self._stream is None:
            return [tensor.detach().to(self._device, copy=copy) for tensor in tensors]
        moved = {}
        with self._stream:
            for place, tensor in enumerate(tensors):
                if tensor.device.type == "cpu":
                    pinned = torch.empty_like(tensor, pin_memory=True, memory_format=torch.contiguous_format)
                    pinned.copy_(tensor.detach())
                    moved[place] = pinned.to(self._device, non_blocking=True)
            arrived = mark(self._device)
        if moved:
            wait_for_mark(arrived, self._device)
            record_use(moved.values(), self._device)
        return [
            moved[place] if place in moved else tensor.detach().to(self._device, copy=copy)
            for place, tensor in enumerate(tensors)
        ]
