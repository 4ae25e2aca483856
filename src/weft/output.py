"""Output: files that are complete or absent, tables for a terminal, data for JSON."""

from __future__ import annotations

import contextlib
import math
import os
import sys
from pathlib import Path
from typing import Any

from weft.errors import WeftError, remedy_for

ROWS = 16  # lines of a table that a terminal shows; --json prints all


def write_text(path: str | Path, text: str) -> None:
    """Replace a file that a user has named; see `replace_file`."""
    try:
        replace_file(path, text)
    except OSError as problem:
        raise WeftError(f"{path} can't be written: {problem.strerror}; {remedy_for(problem)}") from problem


def replace_file(path: str | Path, text: str) -> None:
    """Write a temporary file, fsync it, rename it and fsync its folder: the file is never incomplete, and stays."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        sync(path.parent)
    finally:
        with contextlib.suppress(OSError):  # the first error is the one to report
            temporary.unlink(missing_ok=True)


def sync(path: str | Path) -> None:
    """Fsync a file or a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def warn(text: str) -> None:
    """Say something on stderr."""
    print(f"weft: {text}", file=sys.stderr, flush=True)


def print_table(head: tuple[str, ...], rows: list[tuple[Any, ...]], *, limit: int | None = ROWS) -> None:
    """Columns as wide as their longest cell; the middle of a table of more than `limit` rows is left out."""
    whole = limit is None or len(rows) <= limit
    shown = rows if whole else [*rows[: ROWS - 2], ("…",) + ("",) * (len(head) - 1), rows[-1]]
    table = [tuple(str(cell) for cell in row) for row in ([head] if any(head) else []) + shown]
    widths = [max(len(row[column]) for row in table) for column in range(len(head))]
    for row in table:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def json_safe(value: Any) -> Any:
    """Data for JSON, in which numbers that are not finite are null."""
    if isinstance(value, dict):
        return {name: json_safe(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
