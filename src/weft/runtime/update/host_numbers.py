"""Numbers that the host computes with, from an optimizer whose numbers may be tensors on a device.

To read such a tensor, the host waits for all work that the device has to do. So options (a learning rate, betas) are
read once after each change; the caller counts updates itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def on_device(value: Any) -> bool:
    """Whether a value is a tensor that the host can't read without waiting."""
    return isinstance(value, Tensor) and not value.is_cpu


class HostNumbers:
    """The options of one parameter group, with numbers in place of the tensors on a device."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], tuple[Tensor, int, Any]] = {}  # by option and place: autograd counts writes

    def options(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        """The group itself if it has no such tensors."""
        numbers = {}
        for name, value in group.items():
            if on_device(value):
                numbers[name] = self._number(value, (name, 0))
            elif isinstance(value, tuple) and any(map(on_device, value)):
                numbers[name] = tuple(self._number(item, (name, place)) for place, item in enumerate(value))
        return dict(group) | numbers if numbers else group

    def _number(self, value: Any, key: tuple[str, int]) -> Any:
        if not on_device(value) or value.numel() != 1:
            return value
        known = self._known.get(key)
        if known is None or known[0] is not value or known[1] != value._version:
            known = self._known[key] = value, value._version, value.item()  # the host waits here
        return known[2]
