"""Tables and targets of prediction."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.harness import Results
from benchmarks.rendering import median_and_range, table

THROUGHPUT = 0.97  # with prediction over without
TELEMETRY = 1.0  # percent of a step's time
EXACT, PUBLISHED = {"versions": "exact"}, {"versions": "published"}
SYNCHRONOUS = "synchronous (`1f1b`)"
METHODS: dict[str, tuple[str, dict[str, str] | None]] = {  # schedule and prediction
    SYNCHRONOUS: ("1f1b", None),
    "stale": ("stale", None),
    "stashed (`pipedream`)": ("pipedream", None),
    "`2bw`": ("2bw", None),
    "`xpipe`, published": ("xpipe", PUBLISHED),
    "`xpipe`, exact": ("xpipe", EXACT),
    "`xpipe`, exact, decayed": ("xpipe", EXACT | {"extrapolation": "decayed"}),
    "`spectrain`": ("spectrain", PUBLISHED),
    "`pipeoptim`": ("pipeoptim", PUBLISHED),
    "`wpipe`": ("wpipe", None),
    "`wpipe`, published": ("wpipe", PUBLISHED),
    "`wpipe`, exact": ("wpipe", EXACT),
}


def tables(results: Results) -> dict[str, str]:
    """What prediction does to learning, and what it costs."""
    return {"learning": _learning(results), "cost": _cost(results)}


def _learning(results: Results) -> str:
    learning = results["learning"]
    head = ["method"]
    for setting in learning["settings"]:
        head += [f"m = {setting['microbatches']}, rate {setting['rate']:g}", "to synchronous"]
    rows = [
        [method, *(cell for setting in learning["settings"] for cell in _cells(setting, method))] for method in METHODS
    ]
    about = (
        f"{learning['text']}, {learning['seeds']} seeds, {learning['updates']} updates with AdamW, "
        f"eight virtual ranks;\n{results['environment']}."
    )
    return f"{table(head, rows)}\n\n{about}"


def _cells(setting: Results, method: str) -> tuple[str, str]:
    found = setting["methods"].get(method)
    if found is None:
        return "–", "–"
    if None in found["losses"] or None in found["differences"]:
        return "diverged", ""
    return median_and_range(found["losses"], 3), "" if method == SYNCHRONOUS else _signed(found["differences"])


def _signed(values: Sequence[float]) -> str:
    return f"{statistics.median(values):+.3f} ({min(values):+.3f} to {max(values):+.3f})"


def _cost(results: Results) -> str:
    cost = results["cost"]
    buffers = f"buffers after {', '.join(map(str, cost['buffers_after']))} updates"
    head = ("optimizer", "with", "without", "throughput, with over without", buffers)
    rows = [
        (
            pair["optimizer"],
            pair["with"],
            pair["without"],
            median_and_range(pair["ratios"]),
            ", ".join(f"{amount:g}" for amount in pair["buffers"]),
        )
        for pair in cost["pairs"]
    ]
    telemetry = [
        f"{optimizer}: `telemetry=50` takes {median_and_range(shares)} % of a step's time."
        for optimizer, shares in cost["telemetry"].items()
    ]
    about = (
        f"{cost['rounds']} rounds; processes that wanted a core before: {cost['load']:.1f};\n{results['environment']}."
    )
    return "\n".join([table(head, rows, left=3), "", *telemetry, "", about])


def plots(results: Results) -> dict[str, str]:
    """None."""
    return {}


def missed(results: Results) -> list[str]:
    """Targets of throughput, buffers and telemetry that are missed."""
    lines = []
    for pair in results["cost"]["pairs"]:
        name, buffers = f"{pair['with']}, {pair['optimizer']}", pair["buffers"]
        if (ratio := statistics.median(pair["ratios"])) < THROUGHPUT:
            lines.append(f"{name}: throughput is {ratio:.3f} of that without prediction, below {THROUGHPUT:g}")
        if len(set(buffers)) > 1 or (pair["with"].endswith("exact") and buffers[-1] > 1):
            lines.append(f"{name}: buffers are {buffers}, in units of a chunk's weights")
    for optimizer, shares in results["cost"]["telemetry"].items():
        if (share := statistics.median(shares)) > TELEMETRY:
            lines.append(f"telemetry, {optimizer}: {share:.2f} % of a step's time, above {TELEMETRY:g} %")
    return lines
