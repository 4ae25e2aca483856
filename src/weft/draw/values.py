"""What plots show: numbers, checked before anything is drawn, and how they are written behind bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from weft.draw.report.charts import short
from weft.errors import WeftError

Value = float | tuple[float, float, float]  # a number, or low, middle, high


def triple(value: Value) -> tuple[float, float, float]:
    """Low, middle, high; a number is all three. What comes from JSON is a list."""
    if not isinstance(value, Sequence):
        return value, value, value
    if len(value) != 3:
        raise WeftError(f"a value is a number, or low, middle and high (got {value!r}); give one or three numbers")
    low, middle, high = value
    return low, middle, high


def filled(what: str, panels: Mapping[str, Any]) -> None:
    """Refuse a plot without panels, and a panel without anything in it."""
    if not panels:
        raise WeftError(f"a plot shows at least one panel ({what}: none); leave it out, or measure something")
    for name, panel in panels.items():
        if not panel:
            raise WeftError(f"a panel shows at least one value ({what}, {name or 'panel'}: none); leave it out")


def checked(what: str, value: Value, *, positive: bool = False) -> tuple[float, float, float]:
    """Low, middle, high, finite and in this order; `positive`: above zero as well, as a logarithm needs it."""
    low, middle, high = triple(value)
    if not (math.isfinite(low) and math.isfinite(middle) and math.isfinite(high)):
        raise WeftError(f"a plot shows finite numbers only ({what}: {value}); leave out what went astray")
    if not low <= middle <= high:
        raise WeftError(f"low, middle and high go upward ({what}: {value}); sort them")
    if positive and low <= 0:
        raise WeftError(f"a logarithmic axis shows numbers above 0 ({what}: {value}); use a linear one")
    return low, middle, high


def writer(values: Sequence[float], reference: float | None = None) -> Callable[[float], str]:
    """How values that stand below each other are written: with equally many decimals, three digits or more for most.

    A value that misses the reference must not look like it: then there are more decimals.
    """
    most = max(map(abs, values))
    decimals = min(9, max(0, 2 - math.floor(math.log10(most)))) if most else 0
    while decimals < 9 and any(value != reference and round(value, decimals) == reference for value in values):
        decimals += 1

    def write(value: float) -> str:
        if value and abs(value) < 10 ** (1 - decimals):
            return short(float(f"{value:.2g}"))
        return f"{value:{',' if abs(value) >= 10_000 else ''}.{decimals}f}".replace("-", "−")

    return write
