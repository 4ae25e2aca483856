"""Many stages: pipelines of layers that sleep, on 4 and 8 real ranks, over the throughput that is simulated.

Sleeping takes no core, so two cores carry eight ranks: what is measured is the runtime's part, its engine, messages and
order, and not the layers'. All contenders have the same layers, two a rank; where stages are uneven, two neighbours
are slower, which one rank holds in a pipeline of one chunk a rank, and two ranks in one of two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from typing import Any

from weft.bench.benchmark import Results
from weft.bench.kept import Keep
from weft.bench.schedules import schedule_named
from weft.bench.writing import quartiles, table, unsteady
from weft.draw.plots import bars
from weft.simulate import ChunkCost, Cost, simulate

FORWARD, BACKWARD = 0.020, 0.040  # seconds, of a layer
SLOW = 1.5
STAGES = (4, 8)
ROUNDS = 3
WEFT = ("1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe", "xpipe")
PEERS = {"GPipe": "gpipe", "1F1B": "1f1b", "Interleaved1F1B": "interleaved"}  # by the same order of weft
TARGET = 0.95
WIDE = 0.1  # the middle half of the rounds, over their median, at the most
START = 300.0  # seconds in which the ranks have to be there, on a machine that is busy with other things


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """Seconds of a mini-batch of every contender in every round, and what is simulated."""
    from weft import launch
    from weft.bench.paced import Job, work

    def part(stages: int) -> dict[str, Any]:
        rounds, shrink = (2, 0.2) if quick else (ROUNDS, 1.0)
        kinds = {"even": 1.0} if quick else {"even": 1.0, "uneven": SLOW}
        paces = {kind: _paces(stages, slow, shrink) for kind, slow in kinds.items()}
        jobs = [
            Job(
                forwards=tuple(forward for forward, _ in pace),
                backwards=tuple(backward for _, backward in pace),
                microbatches=stages,
                rounds=rounds,
                weft=WEFT,
                peers=tuple(PEERS),
            )
            for pace in paces.values()
        ]
        ranks = launch(work, jobs, ranks=stages, threads=1, timeout=START)
        found = zip(paces, (_slowest(some) for some in zip(*ranks, strict=True)), strict=True)
        return {kind: {"simulated": simulated(paces[kind], stages), "seconds": seconds} for kind, seconds in found}

    return {"stages": {str(p): keep(f"{p} stages", partial(part, p)) for p in (STAGES[:1] if quick else STAGES)}}


def _paces(stages: int, slow: float, shrink: float) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each layer; those of the middle stage are `slow` times as long."""
    times = [shrink * (slow if layer // 2 == stages // 2 else 1.0) for layer in range(2 * stages)]
    return [(FORWARD * one, BACKWARD * one) for one in times]


def _slowest(ranks: tuple[dict[str, list[float]], ...]) -> dict[str, list[float]]:
    return {name: [max(one) for one in zip(*(rank[name] for rank in ranks), strict=True)] for name in ranks[0]}


def simulated(paces: list[tuple[float, float]], stages: int) -> dict[str, float]:
    """Seconds of a mini-batch that the simulator gives each contender; torch's have those of the same order of weft."""
    orders = {f"weft {name}": name for name in WEFT} | {f"torch {name}": order for name, order in PEERS.items()}
    return {contender: _period(order, paces, stages) for contender, order in orders.items()}


def _period(order: str, paces: list[tuple[float, float]], stages: int) -> float:
    schedule = schedule_named(order, stages, stages)
    size = len(paces) // schedule.chunks
    costs = []
    for first in range(0, len(paces), size):
        held = paces[first : first + size]
        of_input = sum(backward / 2 for backward in (b for _, b in held))
        if first == 0:  # the model's input has no gradient: its first layer takes all for the weight's
            of_input -= held[0][1] / 2
        whole = sum(backward for _, backward in held)
        forward = sum(forward for forward, _ in held)
        costs.append(ChunkCost(forward=forward, backward_input=of_input, backward_weight=whole - of_input))
    return simulate(schedule, Cost(chunks=tuple(costs))).period


def ratios(one: Results) -> dict[str, list[float]]:
    """Of every contender, in every round: measured over simulated throughput."""
    return {name: [one["simulated"][name] / took for took in some] for name, some in one["seconds"].items()}


def _cases(results: Results) -> Iterator[tuple[str, dict[str, list[float]]]]:
    for stages, kinds in results["stages"].items():
        for kind, one in kinds.items():
            yield f"p = {stages}, {kind}", ratios(one)


def tables(results: Results) -> dict[str, str]:
    """Measured over simulated, and how long a mini-batch takes."""
    cases = dict(_cases(results))
    first = next(iter(cases.values()))
    names, rounds = list(first), next(iter(first.values()))
    rows = [[name, *(_cell(some[name]) for some in cases.values())] for name in names]
    times = []
    for name in names:
        of_each = [
            (one["simulated"][name], one["seconds"][name])
            for kinds in results["stages"].values()
            for one in kinds.values()
        ]
        times.append([name, *(f"{1e3 * statistics.median(took):.0f} ({1e3 * told:.0f})" for told, took in of_each)])
    told = f"{len(rounds)} rounds; {results['environment']}."
    return {
        "ratios": f"{table(['contender', *cases], rows)}\n\n{told}",
        "milliseconds": table(["contender", *cases], times),
    }


def _cell(values: list[float]) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def plots(results: Results) -> dict[str, str]:
    """Bars of every contender."""
    panels = {case: {name: quartiles(some) for name, some in found.items()} for case, found in _cases(results)}
    title = "Layers that sleep: measured over simulated throughput"
    return {"ratios.svg": bars(title, panels, unit="of the simulated throughput", reference=1.0)}


def missed(results: Results) -> list[str]:
    """Targets of the whole form, for weft's schedules; the quick one has none, since its layers sleep too little."""
    if results.get("form") == "quick":
        return []
    lines = []
    for case, found in _cases(results):
        for name, some in found.items():
            if unsteady(some, WIDE):
                lines.append(f"{case}: {name} is {_cell(some)} of the simulated throughput: unsteady")
            elif name.startswith("weft ") and statistics.median(some) < TARGET:
                lines.append(f"{case}: {name} is {_cell(some)} of the simulated throughput, asked {TARGET:g}: missed")
    return lines
