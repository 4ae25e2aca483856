"""Tables and targets of wall-clock."""

from __future__ import annotations

import statistics

from benchmarks.harness import Results
from benchmarks.rendering import table
from benchmarks.wall_clock.jobs import OPPONENTS, SEEDS, SETTINGS

FASTER = ("wpipe fresh", "weave")  # which are to learn more in the same time


def tables(results: Results) -> dict[str, str]:
    """What each schedule reached, and the gap to the synchronous ones, mean over the seeds."""
    rows = []
    for name in SETTINGS:
        runs = [run for run in results["runs"] if run["schedule"] == name]
        gaps = ["–" if name in OPPONENTS else _gap(gap(results, name, opponent)) for opponent in OPPONENTS]
        figures = {key: [run[key] for run in runs] for key in ("updates", "seconds", "bubble", "loss", "accuracy")}
        rows.append(
            (
                f"`{name}`",
                *(" ".join(f"{value:.0f}" for value in figures[key]) for key in ("updates", "seconds")),
                f"{100 * statistics.mean(figures['bubble']):.1f} %",
                " ".join(f"{loss:.3f}" for loss in figures["loss"]),
                f"{100 * statistics.mean(figures['accuracy']):.1f} %",
                *gaps,
            )
        )
    head = (
        "schedule",
        "updates",
        "seconds",
        "idle",
        "held-out loss",
        "accuracy",
        *(f"to `{name}`" for name in OPPONENTS),
    )
    return {"runs": f"{table(head, rows)}\n\n{results['environment']}."}


def gap(results: Results, name: str, opponent: str) -> list[float]:
    """Held-out loss less that of the opponent with the same seed."""
    losses = {(run["schedule"], run["seed"]): run["loss"] for run in results["runs"]}
    seeds = sorted({run["seed"] for run in results["runs"]})
    return [losses[name, seed] - losses[opponent, seed] for seed in seeds]


def _gap(values: list[float]) -> str:
    return " ".join(f"{value:+.3f}" for value in values)


def missed(results: Results) -> list[str]:
    """Seeds that have not run, and where a synchronous schedule learned more in the same time."""
    left = [seed for seed in SEEDS if seed not in {run["seed"] for run in results["runs"]}]
    return [f"seed {seed} has not run: repeat the command" for seed in left] + [
        f"{name} ends {_gap(values)} nats from {opponent} (seed by seed), at most 0"
        for name in FASTER
        for opponent in OPPONENTS
        if statistics.mean(values := gap(results, name, opponent)) > 0
    ]


def plots(results: Results) -> dict[str, str]:
    """None."""
    return {}
