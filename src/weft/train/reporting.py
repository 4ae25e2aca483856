"""Turns the folder of a run into its report, and its summary into headline figures; torch-free."""

from __future__ import annotations

import math
from typing import Any

from weft.draw.report import Run, report
from weft.metrics import resident_sets
from weft.text import format_bytes, format_clock, format_figure
from weft.train.run import Folder, read_metrics


def write_report(folder: Folder) -> None:
    """Write `report.html` of a run that has ended."""
    summary = folder.summary()
    if summary is None:
        return
    run = run_of(folder, name=folder.path.name)
    page = report([run], title=summary["title"], metric=summary["metric"], reference=reference(summary))
    folder.write_extra(folder.report.name, page)


def run_of(folder: Folder, *, name: str) -> Run:
    """A run as a report shows it."""
    lines, summary = read_metrics(folder.path / "metrics.jsonl"), folder.summary() or {}
    ranks = summary.get("ranks", [])
    return Run(
        name=name,
        group=summary.get("schedule", name),
        figures=figures(summary),
        training=[line for line in lines if line["kind"] == "train"],
        evaluations=[line for line in lines if line["kind"] == "evaluation"],
        memory=[rank["peak_bytes"] for rank in ranks],
        resident=resident_sets(ranks),
        bubbles=[rank["bubble"] for rank in ranks],
        timeline=folder.text("timeline.svg"),
        configuration=folder.text("job.toml"),
        sample=folder.text("sample.txt"),
        speed=summary.get("samples_per_second", math.nan),
    )


def figures(summary: dict[str, Any]) -> dict[str, str]:
    """The headline figures of a run."""
    if not summary:
        return {}

    shown = {
        "outcome": summary["how"],
        "updates": f"{summary['update']:,} of {summary['updates']:,}",
        "training time": format_clock(summary["seconds"]),
        "throughput": f"{summary['samples_per_second']:.1f} samples/s",
        "bubble": f"{bubble(summary):.1%}",
        "mean delay": f"{format_figure(summary.get('mean_delay'))} updates",  # not in summaries of older versions
        "slack": _slack(summary),
        "memory, largest rank": format_bytes(max(rank["peak_bytes"]["total"] for rank in summary["ranks"])),
    }
    if resident := resident_sets(summary["ranks"]):
        shown["largest resident set"] = format_bytes(max(figures["peak"] for figures in resident.values()))
    shown |= {f"held-out {name}": format_figure(value) for name, value in summary["final"].items()}
    if summary["best"]:
        shown[f"best {summary['metric']}"] = f"{summary['best']['value']:.4g} at update {summary['best']['update']:,}"
    if summary["restarts"]:
        shown["restarts"] = str(summary["restarts"])
    return shown


def _slack(summary: dict[str, Any]) -> str:
    """The time of a hop that the schedule hides, in forwards of a stage; a dash if there is no hop."""
    hidden = (summary.get("slack") or {}).get("messages")  # not in summaries of older versions
    return "–" if hidden is None else f"{format_figure(hidden)} forwards"


def bubble(summary: dict[str, Any]) -> float:
    """The mean over all ranks."""
    ranks = summary["ranks"]
    return float(sum(rank["bubble"] for rank in ranks) / len(ranks))


def reference(summary: dict[str, Any]) -> tuple[str, float] | None:
    """A line of the chart: a language model whose loss is below it uses context."""
    entropy = summary["entropy"]
    return None if entropy is None or summary["metric"] != "loss" else ("entropy of single tokens", entropy)
