"""Each method's differences to synchronous training of the same seed, compared with the noise of seeds."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.convergence.studies import METHODS, OPTIMIZERS, PARALLEL, SYNCHRONOUS
from benchmarks.harness import Results

CLAIMED = ("wpipe", "wpipe, predicted", "xpipe")  # to end within seed noise of synchronous training


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A method in one study, with one optimizer, on a number of ranks; its tuples have an entry for each seed."""

    study: str
    optimizer: str
    method: str
    ranks: int
    losses: tuple[float, ...]  # of the seeds that did not diverge
    metrics: tuple[float, ...]
    differences: tuple[float, ...]  # of held-out loss to synchronous training of the same seed; more is worse
    diverged: int
    noise: float  # standard deviation of synchronous training over its seeds; 0 if fewer than two ended
    curve: tuple[float | None, ...]  # mean training loss

    @property
    def label(self) -> str:
        return self.method if self.method in (SYNCHRONOUS, PARALLEL) else f"{self.method}, p = {self.ranks}"

    @property
    def verdict(self) -> str:
        """Within: as far from synchronous training as seeds are from each other, or less."""
        if self.diverged:
            return f"{self.diverged} of {self.diverged + len(self.losses)} diverged"
        if not self.differences:
            return "synchronous training diverged"
        mean = statistics.mean(self.differences)
        if mean and not self.noise:
            return "noise unknown"
        return "within" if abs(mean) <= self.noise else "worse" if mean > 0 else "better"


def cells(results: Results) -> Iterator[Cell]:
    """All cells, study by study, in the order of the methods."""
    found: dict[tuple[str, str, str, int], dict[int, Any]] = {}
    for run in results["runs"]:
        found.setdefault((run["study"], run["optimizer"], run["method"], run["ranks"]), {})[run["seed"]] = run
    order = [
        (study, optimizer, method) for study in results["studies"] for optimizer in OPTIMIZERS for method in METHODS
    ]
    for study, optimizer, method in order:
        base = found[study, optimizer, SYNCHRONOUS, 2]
        all_losses = [run["loss"] for run in base.values() if run["loss"] is not None]
        noise = statistics.stdev(all_losses) if len(all_losses) > 1 else 0.0
        seeds = {seed for place, runs in found.items() if place[2] != SYNCHRONOUS for seed in runs}
        for ranks in METHODS[method].ranks:
            if runs := found.get((study, optimizer, method, ranks)):
                shown = {seed: run for seed, run in runs.items() if seed in seeds}  # the noise is of more seeds
                yield _cell(study, optimizer, method, ranks, shown, base, noise)


def _cell(
    study: str, optimizer: str, method: str, ranks: int, runs: dict[int, Any], base: dict[int, Any], noise: float
) -> Cell:
    ended = {seed: run for seed, run in runs.items() if run["loss"] is not None}
    both = [seed for seed in ended if base[seed]["loss"] is not None]
    points = zip(*(run["curve"] for run in runs.values()), strict=True)
    return Cell(
        study=study,
        optimizer=optimizer,
        method=method,
        ranks=ranks,
        losses=tuple(run["loss"] for run in ended.values()),
        metrics=tuple(run["metric"] for run in ended.values()),
        differences=tuple(ended[seed]["loss"] - base[seed]["loss"] for seed in both),
        diverged=len(runs) - len(ended),
        noise=noise,
        curve=tuple(None if None in point else statistics.mean(point) for point in points),
    )
