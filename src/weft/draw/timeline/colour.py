"""Colour arithmetic, so that contrast and greyscale rendering can be computed and tested.

Colours are strings such as `#56b4e9`. `luminance` and `contrast` follow WCAG; `lightness` is the L* of CIELAB, 0 to
100, roughly what a greyscale print shows.
"""

from __future__ import annotations

import math
from functools import cache

DARK, LIGHT = "#10181f", "#ffffff"  # text on light and on dark backgrounds


def channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def mix(colour: str, other: str, share: float) -> str:
    """`colour` with a share of `other`, 0 to 1."""
    pairs = zip(channels(colour), channels(other), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def luminance(colour: str) -> float:
    red, green, blue = (_linear(value) for value in channels(colour))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _linear(value: int) -> float:
    share = value / 255
    return share / 12.92 if share <= 0.04045 else float(((share + 0.055) / 1.055) ** 2.4)


def lightness(colour: str) -> float:
    return _lab(colour)[0]


def contrast(colour: str, other: str) -> float:
    high, low = sorted((luminance(colour), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def ink(background: str) -> str:
    """The colour of text on a background: dark or light, whichever has more contrast."""
    return max(DARK, LIGHT, key=lambda colour: contrast(colour, background))


@cache
def terminal(colour: str) -> int:
    """The closest of the 256 terminal colours, without the first sixteen, which users can redefine."""
    wanted = _lab(colour)
    return min(_TERMINAL, key=lambda code: math.dist(wanted, _lab(_TERMINAL[code])))


def terminal_ink(code: int) -> int:
    """The colour of text on a terminal colour; it can differ from the ink on the exact colour."""
    return terminal(ink(_TERMINAL[code]))


@cache
def _lab(colour: str) -> tuple[float, float, float]:
    """CIELAB, where distances approximate perceived differences."""
    red, green, blue = (_linear(value) for value in channels(colour))
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089
    a, b, c = (value ** (1 / 3) if value > 216 / 24389 else (value * 24389 / 27 + 16) / 116 for value in (x, y, z))
    return 116 * b - 16, 500 * (a - b), 200 * (b - c)


def _terminal_colours() -> dict[int, str]:
    levels = (0, 95, 135, 175, 215, 255)
    cube = [f"#{r:02x}{g:02x}{b:02x}" for r in levels for g in levels for b in levels]
    greys = [f"#{level:02x}{level:02x}{level:02x}" for level in range(8, 248, 10)]
    return dict(enumerate(cube + greys, start=16))


_TERMINAL = _terminal_colours()
