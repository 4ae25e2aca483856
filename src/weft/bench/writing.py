"""What the pages of benchmarks share: tables between marks, medians with their spread, a line on the environment."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from weft.errors import WeftError

END = "<!-- end of the table -->"


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


def unsteady(values: Sequence[float], bound: float) -> bool:
    """Whether the middle half of the values is wider than `bound` times the median: too wide to tell anything."""
    low, middle, high = quartiles(values)
    return high - low > bound * middle


def environment(*packages: str) -> str:
    """What it was measured on, in a line; packages that are not there are left out."""
    found = ", ".join(f"{package} {known}" for package in (*packages, "weft") if (known := _version(package)))
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, "
        f"Python {platform.python_version()}, {found}"
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
