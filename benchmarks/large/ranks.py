"""What each rank runs: a contestant from start to export, with its resident set in each moment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from benchmarks.harness import exit_after
from benchmarks.large.contestants import make_contestant
from benchmarks.large.models import Size
from benchmarks.large.resident import Moments, limit_growth

STACKS = 64 * 2**20  # bytes that threads reserve for their stacks, and hardly use
RANK_TIMEOUT = 1200.0  # seconds that a rank runs


@exit_after(RANK_TIMEOUT)
def measure_rank(
    name: str,
    size: Size,
    options: Mapping[str, Any],
    microbatches: int,
    updates: int,
    folder: str,
    weights: str | None = None,
    limit: int | None = None,
) -> dict[str, Any]:
    """Peaks and seconds of the moments of a run; `limit` is the resident set that this process may have.

    The kernel's limit is on data (RLIMIT_DATA), which shared memory of messages is no part of; the caller compares the
    resident set, which it is a part of.
    """
    moments = Moments()
    if limit is not None:
        limit_growth(limit - moments.empty + STACKS)
    run: dict[str, Any] = {}

    def start() -> None:
        run["it"] = make_contestant(name, size, microbatches, None if weights is None else Path(weights), options)
        dist.barrier()

    def train() -> None:
        for _ in range(updates):
            run["it"].step()

    moments.note("start", start)
    moments.note("training", train)
    if weights is None:
        moments.note("save", lambda: run["it"].save(Path(folder, "checkpoint")))
        moments.note("load", lambda: run["it"].load(Path(folder, "checkpoint")))
    moments.note("export", lambda: run["it"].export(Path(folder, "exported")))
    return {
        "empty": moments.empty,
        "peaks": moments.peaks,
        "seconds": moments.seconds,
        "counted": run["it"].counted(),
    }
