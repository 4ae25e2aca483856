"""What the pages of benchmarks share: tables between marks, medians with their spread, a line on the environment."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from weft.errors import WeftError

END = "<!-- end of the table -->"
WIDE = 0.15  # the middle half of the rounds, over their median, at the most


def mark(name: str) -> str:
    """Where a table begins."""
    return f"<!-- table {name}: written by weft bench -->"


def put(page: str, name: str, text: str) -> str:
    """A page with a text between the marks of this name."""
    before, begin, rest = page.partition(mark(name))
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise WeftError(f"the page has no place for the table {name}: it needs the lines {mark(name)} and {END}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table; all columns but the first `left` are numbers and stand on the right."""
    lines = [list(head), ["---" if column < left else "---:" for column in range(len(head))]]
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The first quartile, the median and the third one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def rounded(values: Sequence[float], digits: int = 2) -> tuple[float, float, float]:
    """The first quartile, the median and the third one as they are told: without a minus before a zero."""
    low, middle, high = (round(value, digits) + 0.0 for value in quartiles(values))
    return low, middle, high


def middle_half(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the quartiles."""
    low, middle, high = rounded(values, digits)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def unsteady(values: Sequence[float], bound: float = WIDE) -> bool:
    """Whether the middle half of the values is wider than `bound` times the median: too wide to tell anything."""
    low, middle, high = quartiles(values)
    return high - low > bound * middle


def verdict(values: Sequence[float], asked: float, *, at_most: bool = False) -> str:
    """What the middle half of the rounds says of a target, in words: "met" only if all of it reaches what is asked."""
    if unsteady(values):
        return "unsteady"
    low, _, high = quartiles(values)
    met, missed = (high <= asked, low > asked) if at_most else (low >= asked, high < asked)
    return "met" if met else "missed" if missed else "can't tell"


def environment(*packages: str) -> str:
    """What it was measured on, in a line; packages that are not there are left out."""
    found = ", ".join(f"{package} {known}" for package in (*packages, "weft") if (known := version_of(package)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores ({_processor()}), {platform.system()}, Python {platform.python_version()}, {found}"


def _processor() -> str:
    """Its model where the system tells it, else its architecture."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name" and value.strip():
                return value.strip()
    return platform.machine()


def version_of(package: str) -> str | None:
    """Of a package that is installed, else None."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
