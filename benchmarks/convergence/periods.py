"""How long an update takes under each schedule: what methods reach in the same time follows from that.

Simulated: a mini-batch has the same samples under every schedule, so more micro-batches are smaller ones. A forward
takes 1 and each half of a backward 1, for all micro-batches together; a hop takes a share of a forward of one
micro-batch. torch's schedules are simulated in torch's own order. Measured: two real ranks, of `throughput`.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.contenders import TORCH_PIPELINES, torch_order
from benchmarks.convergence.equal_time import CONTENDERS, OF_WEFT, TORCH
from benchmarks.harness import BENCHMARKS
from benchmarks.throughput.pages import ratios
from weft.schedule import Schedule, read_csv, schedule
from weft.simulate import Cost, Link, simulate

STAGES, HOPS = (4, 8), (0.0, 0.1)
MEASURED = "transformer"  # the model of `throughput`
RIVALS = [name for name, known in TORCH_PIPELINES.items() if known.placement != "one" and name != "DualPipeV"]
# DualPipeV computes a forward and a backward at once, which is no action of weft


def periods() -> list[dict[str, Any]]:
    """The time of an update of the contenders and their opponents, in any unit, case by case."""
    return [*_measured(), *_simulated()]


def _simulated() -> Iterator[dict[str, Any]]:
    """A pipeline without a bubble and without hops takes 3."""
    for stages in STAGES:
        for turns in CONTENDERS:
            m = turns * stages
            built = {name: schedule(name, stages=stages, microbatches=m) for name in _names(turns)}
            rivals = [read_csv(torch_order(name, stages, m), name=name) for name in RIVALS]
            for hop in HOPS:
                found = {name: _period(schedule, m, hop) for name, schedule in built.items()}
                found[TORCH] = min(_period(rival, m, hop) for rival in rivals)
                yield {"stages": stages, "turns": turns, "costs": f"hop {hop:g}", "periods": found}


def _names(turns: int) -> list[str]:
    return [*OF_WEFT, *CONTENDERS[turns].values()]


def _period(built: Schedule, microbatches: int, hop: float) -> float:
    cost = Cost.uniform(built, forward=1.0, backward=2.0, link=Link(latency=hop))
    return simulate(built, cost).period / microbatches


def _measured() -> Iterator[dict[str, Any]]:
    """In shares of the time that both cores take without a pipeline."""
    results = json.loads((BENCHMARKS["throughput"].folder / "results.json").read_text(encoding="utf-8"))
    for microbatches, case in results["models"][MEASURED].items():
        found = {name: 1 / statistics.median(values) for name, values in ratios(case).items()}
        turns = int(microbatches) // 2
        periods = {name: found[f"weft {name}"] for name in _names(turns) if f"weft {name}" in found}
        periods[TORCH] = min(found[f"torch {name}"] for name in TORCH_PIPELINES if f"torch {name}" in found)
        yield {"stages": 2, "turns": turns, "costs": "measured", "periods": periods}
