"""The table and the targets of simulator."""

from __future__ import annotations

import statistics

from benchmarks.harness import Results
from benchmarks.rendering import median_and_range, table

SECONDS, GIB = 20.0, 2.0  # limits


def tables(results: Results) -> dict[str, str]:
    """Seconds and memory of each case."""
    head = ["method", "stages", "micro-batches", "costs", "seconds, median (least to most)", "GiB", "steady bubble"]
    rows = [_row(case) for case in results["cases"]]
    about = f"{results['repeats']} interleaved repeats on one core of {results['environment']}."
    return {"seconds": f"{table(head, rows)}\n\n{about}"}


def _row(case: Results) -> tuple[str, ...]:
    bubble = f"{case['bubble']:.4%}" if case["steady"] else "not steady"
    sizes = str(case["stages"]), str(case["microbatches"])
    seconds = median_and_range(case["seconds"], 1)
    return (f"`{case['method']}`", *sizes, case["costs"], seconds, f"{max(case['gib']):.2f}", bubble)


def plots(results: Results) -> dict[str, str]:
    """None."""
    return {}


def missed(results: Results) -> list[str]:
    """Cases above a limit, or without a steady state."""
    lines = []
    for case in results["cases"]:
        name = f"{case['method']}, {case['stages']} x {case['microbatches']}, {case['costs']} costs"
        if (seconds := statistics.median(case["seconds"])) > SECONDS:
            lines.append(f"{name}: {seconds:.1f} s, above {SECONDS:g}")
        if (gib := max(case["gib"])) > GIB:
            lines.append(f"{name}: {gib:.2f} GiB, above {GIB:g}")
        if not case["steady"]:
            lines.append(f"{name}: no steady state")
    return lines
