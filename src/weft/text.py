"""Formats values for users: suggestions for a misspelled word, counts, bytes, durations."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """`, did you mean 'x'?` if a known word is similar, ignoring case; otherwise an empty string.

    `prefix` is prepended to the suggestion.
    """
    name = closest(str(word), known)
    return "" if name is None else f", did you mean {prefix + name!r}?"


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is most similar, ignoring case: with dots, first one that has a prefix more or less."""
    spelling = {name.lower(): name for name in known}
    word = word.lower()
    prefixed = [name for name in spelling if name.endswith(f".{word}") or (name and word.endswith(f".{name}"))]
    close = sorted(prefixed, key=lambda name: abs(len(name) - len(word))) or difflib.get_close_matches(word, spelling)
    return spelling[close[0]] if close else None


def format_number(value: float) -> str:
    """A number with up to six digits."""
    return f"{value:.6g}"


def format_figure(value: float | None) -> str:
    """A number with up to four digits; a dash if there is none, or if it is not finite."""
    return "–" if value is None or not math.isfinite(value) else f"{value:.4g}"


def format_count(number: int, noun: str) -> str:
    """`1 stage`, `3 stages`, `2 micro-batches`."""
    plural = noun + ("es" if noun.endswith("ch") else "s")
    return f"{number} {noun if number == 1 else plural}"


def byte_unit(nbytes: float) -> tuple[int, str]:
    """The largest unit that is not above an amount of bytes: its size and its name."""
    units = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
    return next(((size, name) for size, name in units if nbytes >= size), (1, "B"))


def format_bytes(nbytes: float) -> str:
    """Bytes in the unit that leaves one to four digits before the point."""
    size, unit = byte_unit(nbytes)
    return f"{nbytes:.0f} B" if size == 1 else f"{nbytes / size:,.1f} {unit}"


def format_duration(seconds: float) -> str:
    """A duration as `1.25 s`, `2 min 5 s` or `3 h 7 min`; a dash if it is not finite."""
    if not math.isfinite(seconds):
        return "–"
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_clock(seconds: float) -> str:
    """A duration as `2:05` or `3:07:00`; a dash if it is not finite."""
    if not math.isfinite(seconds):
        return "–"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
