"""What pages are made of: Markdown tables between marks, medians with their spread, plots as SVG. Imports no torch."""

from benchmarks.rendering.markdown import END, put_table, table, table_mark
from benchmarks.rendering.plots import bars, lines, stacks
from benchmarks.rendering.spreads import (
    median_and_quartiles,
    median_and_range,
    quartiles,
    rounded_quartiles,
    unsteady,
    verdict,
)

__all__ = [
    "END",
    "bars",
    "lines",
    "median_and_quartiles",
    "median_and_range",
    "put_table",
    "quartiles",
    "rounded_quartiles",
    "stacks",
    "table",
    "table_mark",
    "unsteady",
    "verdict",
]
