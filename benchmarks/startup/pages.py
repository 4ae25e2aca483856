"""The table and the targets of startup."""

from __future__ import annotations

import statistics

from benchmarks.harness import Results
from benchmarks.rendering import median_and_range, table

LIMIT = 0.3  # seconds


def tables(results: Results) -> dict[str, str]:
    """Seconds of each command."""
    rows = [(f"`{name}`", median_and_range(seconds)) for name, seconds in results["seconds"].items()]
    about = f"{results['repeats']} interleaved repeats, {results['environment']}."
    return {"seconds": f"{table(('command', 'seconds, median (least to most)'), rows)}\n\n{about}"}


def plots(results: Results) -> dict[str, str]:
    """None."""
    return {}


def missed(results: Results) -> list[str]:
    """Commands above the limit."""
    medians = {name: statistics.median(seconds) for name, seconds in results["seconds"].items()}
    return [f"{name} takes {median:.2f} s, above {LIMIT:g}" for name, median in medians.items() if median > LIMIT]
