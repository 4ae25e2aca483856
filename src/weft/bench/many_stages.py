"""Many stages: pipelines of layers that sleep, on 4 and 8 real ranks, over the throughput that is simulated.

Sleeping takes no core, so two cores carry eight ranks: what is measured is the runtime's part, its engine, messages and
order, and not the layers'. All contenders have the same layers, two a rank; where stages are uneven, two neighbours
are slower, which one rank holds in a pipeline of one chunk a rank, and two ranks in one of two.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from weft.bench.benchmark import Results
from weft.bench.deadline import START
from weft.bench.kept import Keep
from weft.bench.schedules import schedule_named
from weft.bench.writing import middle_half, quartiles, table, unsteady, verdict
from weft.draw.plots import bars
from weft.schedule import Schedule, read_csv
from weft.simulate import ChunkCost, Cost, simulate

FORWARD, BACKWARD = 0.020, 0.040  # seconds, of a layer
SLOW = 1.5
STAGES = (4, 8)
ROUNDS = 4
WEFT = ("gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe", "xpipe")
WARM = ("2bw warmup 2", "wpipe warmup 2")  # which have no room among fewer than two micro-batches a rank
PEERS = {  # by the same order of weft; where there is none, the simulator is given torch's own
    "GPipe": "gpipe",
    "1F1B": "1f1b",
    "Interleaved1F1B": "interleaved",
    "InterleavedZeroBubble": None,
    "ZBVZeroBubble": None,
}
TARGET = 0.95


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """Seconds of a mini-batch of every contender in every round, and what is simulated."""
    from weft import launch
    from weft.bench.paced import Job, work

    def part(stages: int) -> dict[str, Any]:
        rounds, shrink = (3, 0.25) if quick else (ROUNDS, 1.0)
        kinds = {"even": 1.0} if quick else {"even": 1.0, "uneven": SLOW}
        paces = {kind: _paces(stages, slow, shrink) for kind, slow in kinds.items()}
        jobs = [
            Job(
                forwards=tuple(forward for forward, _ in pace),
                backwards=tuple(backward for _, backward in pace),
                rounds=rounds,
                weft=weft_schedules(stages),
                peers=dict.fromkeys(PEERS, stages),
            )
            for pace in paces.values()
        ]
        ranks = launch(work, jobs, ranks=stages, threads=1, timeout=START)
        return {
            kind: {"simulated": simulated(pace, stages, some[0]["orders"]), "seconds": _slowest(some)}
            for (kind, pace), some in zip(paces.items(), zip(*ranks, strict=True), strict=True)
        }

    return {"stages": {str(p): keep(f"{p} stages", partial(part, p)) for p in (STAGES[:1] if quick else STAGES)}}


def _paces(stages: int, slow: float, shrink: float) -> list[tuple[float, float]]:
    """Seconds of forward and backward of each layer; those of the middle stage are `slow` times as long."""
    times = [shrink * (slow if layer // 2 == stages // 2 else 1.0) for layer in range(2 * stages)]
    return [(FORWARD * one, BACKWARD * one) for one in times]


def weft_schedules(stages: int) -> dict[str, int]:
    """Micro-batches by schedule."""
    return dict.fromkeys(WEFT, stages) | dict.fromkeys(WARM, 2 * stages)


def _slowest(ranks: Sequence[Results]) -> dict[str, list[float]]:
    seconds = [rank["seconds"] for rank in ranks]
    return {name: [max(one) for one in zip(*(some[name] for some in seconds), strict=True)] for name in seconds[0]}


def simulated(paces: list[tuple[float, float]], stages: int, orders: Mapping[str, str]) -> dict[str, float]:
    """Seconds of a mini-batch that the simulator gives each contender; `orders` are torch's own, as files."""
    schedules = {f"weft {name}": schedule_named(name, stages, m) for name, m in weft_schedules(stages).items()}
    for name, order in PEERS.items():
        key = f"torch {name}"
        schedules[key] = schedule_named(order, stages, stages) if order else read_csv(orders[key], name=key)
    return {contender: _period(schedule, paces) for contender, schedule in schedules.items()}


def _period(schedule: Schedule, paces: list[tuple[float, float]]) -> float:
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
    rows = [[_label(name), *(middle_half(some[name], 3) for some in cases.values())] for name in names]
    times = []
    for name in names:
        of_each = [
            (one["simulated"][name], one["seconds"][name])
            for kinds in results["stages"].values()
            for one in kinds.values()
        ]
        times.append(
            [_label(name), *(f"{1e3 * statistics.median(took):.0f} ({1e3 * told:.0f})" for told, took in of_each)]
        )
    told = f"{len(rounds)} rounds; {results['environment']}."
    return {
        "ratios": f"{table(['contender', *cases], rows)}\n\n{told}",
        "milliseconds": table(["contender", *cases], times),
    }


def _label(name: str) -> str:
    """With its micro-batches, where these are more than the others'."""
    return f"{name}, m = 2p" if name.removeprefix("weft ") in WARM else name


def plots(results: Results) -> dict[str, str]:
    """Bars of every contender."""
    panels = {case: {_label(name): quartiles(some) for name, some in found.items()} for case, found in _cases(results)}
    title = "Layers that sleep: measured over simulated throughput"
    return {"ratios.svg": bars(title, panels, unit="of the simulated throughput", reference=1.0)}


def missed(results: Results) -> list[str]:
    """What is asked of weft's schedules, unless it is met; of torch's only that they are steady."""
    lines = []
    for case, found in _cases(results):
        for name, some in found.items():
            told = f"{case}: {name} is {middle_half(some, 3)} of the simulated throughput"
            if not name.startswith("weft "):
                lines += [f"{told}: unsteady"] if unsteady(some) else []
            elif (said := verdict(some, TARGET)) != "met":
                lines.append(f"{told}, asked {TARGET:g}: {said}")
    return lines
