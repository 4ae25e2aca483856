"""What all benchmarks share: a table in their README between two marks, and a line on the environment."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

BEGIN, END = "<!-- table: written by run.py --write -->", "<!-- end of the table -->"


def write(readme: Path, text: str, *, name: str = "") -> None:
    """Put a text between the marks of a README; one that has several tables names them."""
    begin, end = (mark.replace("table", f"table {name}".strip(), 1) for mark in (BEGIN, END))
    before, _, rest = readme.read_text(encoding="utf-8").partition(begin)
    readme.write_text(f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def environment(*packages: str) -> str:
    found = ", ".join(f"{package} {version(package)}" for package in (*packages, "weft"))
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {platform.system()}, "
        f"Python {platform.python_version()}, {found}."
    )


def spread(values: Sequence[float], digits: int = 2) -> str:
    """The median, and the least and the most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"
