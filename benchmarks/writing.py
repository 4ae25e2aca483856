"""What the benchmarks that are scripts share: a table in their README between two marks."""

from __future__ import annotations

from pathlib import Path

from weft.bench.writing import environment, spread
from weft.errors import WeftError
from weft.output import write_text

__all__ = ["environment", "spread", "write"]

BEGIN, END = "<!-- table: written by run.py --write -->", "<!-- end of the table -->"


def write(readme: Path, text: str, *, name: str = "") -> None:
    """Put a text between the marks of a README; one that has several tables names them."""
    begin, end = (mark.replace("table", f"table {name}".strip(), 1) for mark in (BEGIN, END))
    before, began, rest = readme.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not began or not ended:
        raise WeftError(f"{readme} has no place for the table: it needs the lines {begin} and {end}")
    write_text(readme, f"{before}{begin}\n{text}\n{end}{after}")
