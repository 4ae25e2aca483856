"""Tables and targets of engine."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.engine.parts import FUNCTIONS, KERNELS
from benchmarks.harness import Results
from benchmarks.rendering import median_and_quartiles, table, verdict

BASE = "2bw"
BUSY = {"wpipe": 1.03, "xpipe": 1.04, "weave": 1.05}  # busy time over that of `2bw`, at the most
ALONE = 1.03  # CPU time over that of the same layers without a pipeline, at the most
THREADS = "other threads"
MODELS = {"main": "main job", "transformer": "transformer"}


def busy_ratios(figures: Results, schedule: str) -> list[float]:
    """Busy time of a schedule over that of `2bw`, in each window."""
    pairs = zip(figures[schedule], figures[BASE], strict=True)
    return [window["busy"] / base["busy"] for window, base in pairs]


def alone_ratios(windows: Sequence[Results]) -> list[float]:
    """CPU time over that of the same layers without a pipeline, in each window."""
    return [window["cpu"] / window["alone"] for window in windows]


def microseconds(windows: Sequence[Results]) -> dict[str, float]:
    """CPU time of an action, by part."""
    parts = {part: [window.get(part, 0.0) / window["actions"] for window in windows] for part in FUNCTIONS}
    parts[THREADS] = [(window["cpu"] - window["main"]) / window["actions"] for window in windows]
    return {part: statistics.median(values) * 1e6 for part, values in parts.items()}


def tables(results: Results) -> dict[str, str]:
    """Busy time, CPU time and parts; of an earlier version beside this one, if it was measured."""
    windows = len(results["versions"]["now"]["models"]["main"][BASE])
    about = f"{windows} windows of each schedule; {results['environment']}."
    return {
        "pace": f"{_pace_table(results)}\n\n{about}",
        "busy": f"{_ratio_table(results, busy=True)}\n\n{about}",
        "alone": f"{_ratio_table(results, busy=False)}\n\n{about}",
        "parts": f"{_parts_table(results)}\n\n{results['environment']}.",
    }


def _versions(results: Results) -> list[str]:
    return [version for version in ("before", "now") if version in results["versions"]]


def _ratio_table(results: Results, *, busy: bool) -> str:
    now = results["versions"]["now"]["models"]
    columns = [(model, version) for model in now for version in _versions(results)]
    head = ["schedule", *(f"{MODELS[model]}, {version}" for model, version in columns), "at the most"]
    rows = []
    for schedule in now["main"]:
        limit = BUSY.get(schedule) if busy else ALONE
        cells = [
            _cell(results["versions"][version]["models"][model], schedule, busy=busy) for model, version in columns
        ]
        rows.append([f"`{schedule}`", *cells, "–" if limit is None else f"{limit:g}"])
    return table(head, rows)


def _pace_table(results: Results) -> str:
    """Time of a mini-batch over that of `2bw`, and the share of it in which a rank waits."""
    now = results["versions"]["now"]["models"]
    columns = [(model, version) for model in now for version in _versions(results)]
    head = ["schedule", *(f"{MODELS[model]}, {version}" for model, version in columns)]
    rows = [
        [
            f"`{schedule}`",
            *(_pace(results["versions"][version]["models"][model], schedule) for model, version in columns),
        ]
        for schedule in now["main"]
    ]
    return table(head, rows)


def _pace(figures: Results, schedule: str) -> str:
    if schedule not in figures:
        return "–"
    ratios = [window["wall"] / base["wall"] for window, base in zip(figures[schedule], figures[BASE], strict=True)]
    idle = statistics.median(window["waiting"] / window["wall"] for window in figures[schedule])
    return f"{median_and_quartiles(ratios)}, {100 * idle:.1f} %"


def _cell(figures: Results, schedule: str, *, busy: bool) -> str:
    if schedule not in figures:
        return "–"
    return median_and_quartiles(busy_ratios(figures, schedule) if busy else alone_ratios(figures[schedule]), 3)


def _parts_table(results: Results) -> str:
    schedules, versions = results["versions"]["now"]["parts"], _versions(results)
    found = {
        (schedule, version): microseconds(results["versions"][version]["parts"][schedule])
        for schedule in schedules
        for version in versions
    }
    head = ["microseconds an action", *(f"`{schedule}`, {version}" for schedule, version in found)]
    parts = [*(part for part in FUNCTIONS if part not in KERNELS), THREADS]
    rows = [[part, *(f"{costs[part]:.1f}" for costs in found.values())] for part in parts]
    rows.append(["**beyond kernels**", *(f"**{sum(costs[part] for part in parts):.0f}**" for costs in found.values())])
    rows += [[part, *(f"{costs[part]:.0f}" for costs in found.values())] for part in KERNELS]
    return table(head, rows)


def plots(results: Results) -> dict[str, str]:
    """None."""
    return {}


def missed(results: Results) -> list[str]:
    """Targets that are missed, and those without a clear verdict."""
    lines = []
    for model, figures in results["versions"]["now"]["models"].items():
        for schedule, windows in figures.items():
            asked = [("CPU time over the same layers without a pipeline", alone_ratios(windows), ALONE)]
            if schedule in BUSY:
                asked.append((f"busy time over {BASE}'s", busy_ratios(figures, schedule), BUSY[schedule]))
            for what, values, limit in asked:
                if (result := verdict(values, limit, at_most=True)) != "met":
                    found = f"{what} is {median_and_quartiles(values, 3)}, at the most {limit:g}"
                    lines.append(f"{MODELS[model]}, {schedule}: {found}: {result}")
    return lines
