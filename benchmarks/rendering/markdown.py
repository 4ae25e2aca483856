"""Markdown tables, and their places in a page: between a mark of their name and the end mark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from weft.errors import WeftError

END = "<!-- end of the table -->"


def table_mark(name: str) -> str:
    """The line before a table."""
    return f"<!-- table {name}: written by python -m benchmarks -->"


def put_table(page: str, name: str, text: str) -> str:
    """The page, with `text` between the marks of this table."""
    before, begin, rest = page.partition(table_mark(name))
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise WeftError(f"the page has no place for the table {name}; it needs the lines {table_mark(name)} and {END}")
    return f"{before}{begin}\n{text}\n{end}{after}"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], *, left: int = 1) -> str:
    """A Markdown table; all columns but the first `left` hold numbers and are aligned right."""
    lines = [list(head), ["---" if column < left else "---:" for column in range(len(head))]]
    lines += [[str(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
