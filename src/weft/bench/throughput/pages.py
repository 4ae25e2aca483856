"""Targets, tables and pictures of throughput: pure functions of what was measured. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from weft.bench.benchmark import Results
from weft.bench.writing import middle_half, quartiles, table, verdict
from weft.draw.plots import bars

OF_THE_LIMIT = 0.95
AHEAD = {2: 1.3, 4: 1.12, 8: 1.0}  # of torch's best schedule, by micro-batches
ASYNCHRONOUS = ("wpipe", "2bw", "xpipe")
COUNTERPARTS = {  # of weft's synchronous schedules
    "gpipe": ("GPipe",),
    "1f1b": ("1F1B",),
    "interleaved": ("Interleaved1F1B", "LoopedBFS"),
    "zb-h1": ("InterleavedZeroBubble", "ZBVZeroBubble"),
}
ENGINE = 150.0  # microseconds an action
BOTH = "both cores, mean"  # the row that turns ratios over the slower core into ratios over the mean


@dataclass(frozen=True, kw_only=True)
class Target:
    """What was asked of a model with so many micro-batches, and what each round says."""

    model: str
    microbatches: int
    what: str
    asked: float
    values: list[float]

    @property
    def verdict(self) -> str:
        """In words."""
        return verdict(self.values, self.asked)


def ratios(one: Results) -> dict[str, list[float]]:
    """Of every contender, in every round: its throughput over the limit, the slower core's beside it."""
    return {
        name: [limit / took for limit, took in zip(one["limit"][name], seconds, strict=True)]
        for name, seconds in one["seconds"].items()
    }


def both_cores(one: Results) -> list[float]:
    """What both cores could do if layers could be shared out as they are fast at each moment, over the limit."""
    limits, means = (zip(*one[key].values(), strict=True) for key in ("limit", "mean"))
    return [sum(limit) / sum(mean) for limit, mean in zip(limits, means, strict=True)]


def targets(results: Results) -> list[Target]:
    """All of them, but those of the engine."""
    found = []
    for model, sizes in results["models"].items():
        for microbatches, one in sizes.items():
            for what, asked, values in _asked(one, int(microbatches)):
                found.append(Target(model=model, microbatches=int(microbatches), what=what, asked=asked, values=values))
    return found


def _asked(one: Results, microbatches: int) -> Iterator[tuple[str, float, list[float]]]:
    of_limit = ratios(one)

    def over(name: str, other: str) -> list[float]:
        return [mine / its for mine, its in zip(of_limit[name], of_limit[other], strict=True)]

    theirs = [name for name in of_limit if name.startswith("torch ")]
    best = max(theirs, key=lambda name: statistics.median(of_limit[name]))
    for name in ASYNCHRONOUS:
        yield f"`{name}` of the limit", OF_THE_LIMIT, of_limit[f"weft {name}"]
    if microbatches in AHEAD:
        for name in ASYNCHRONOUS:
            yield f"`{name}` over torch's best", AHEAD[microbatches], over(f"weft {name}", best)
    for name, others in COUNTERPARTS.items():
        for other in others:
            yield f"`{name}` over torch's {other}", 1.0, over(f"weft {name}", f"torch {other}")


def tables(results: Results) -> dict[str, str]:
    """One of each model, the engine's cost, and the targets: a quick form's layers are too small to hide anything."""
    made = {
        model: f"{_table_of(sizes)}\n\n{_measured_on(results, sizes)}" for model, sizes in results["models"].items()
    }
    asked = {} if results.get("form") == "quick" else {"targets": _targets_table(results)}
    return made | asked | {"engine": _engine_table(results)}


def _table_of(sizes: Results) -> str:
    found = {microbatches: ratios(one) for microbatches, one in sizes.items()}
    most = max(found.values(), key=len)  # has all that the others have, in order
    rows = [[name, *(middle_half(some[name]) if name in some else "–" for some in found.values())] for name in most]
    rows.append([BOTH, *(middle_half(both_cores(one)) for one in sizes.values())])
    return table(["contender", *(f"m = {microbatches}" for microbatches in found)], rows)


def _measured_on(results: Results, sizes: Results) -> str:
    """The sentences below a table."""
    rounds = len(both_cores(next(iter(sizes.values()))))
    deepspeed = f", deepspeed {results['deepspeed']}" if results.get("deepspeed") else ""
    told = f'The limit is the slower core\'s; for ratios over the mean of both, divide by the row "{BOTH}".'
    return f"{told} {rounds} rounds; {results['environment']}{deepspeed}."


def _targets_table(results: Results) -> str:
    every = targets(results)
    sizes = sorted({one.microbatches for one in every})
    cells = {(one.model, one.what, one.microbatches): one for one in every}
    rows = []
    for model, what in dict.fromkeys((one.model, one.what) for one in every):
        row = [model, what]
        for size in sizes:
            one = cells.get((model, what, size))
            row.append("–" if one is None else f"{middle_half(one.values, 3)}, asked {one.asked:g}: {one.verdict}")
        rows.append(row)
    return table(["model", "target", *(f"m = {size}" for size in sizes)], rows, left=2)


def _engine_table(results: Results) -> str:
    rows = [
        [f"`{name}`", middle_half(costs, 0), f"{ENGINE:g}", verdict(costs, ENGINE, at_most=True)]
        for name, costs in results["engine"].items()
    ]
    return table(["schedule", "microseconds an action, median (quartiles)", "at the most", ""], rows)


def plots(results: Results) -> dict[str, str]:
    """Bars of every contender, a picture a model."""
    made = {}
    for model, sizes in results["models"].items():
        panels = {
            f"m = {microbatches}": {name: quartiles(values) for name, values in ratios(one).items()}
            for microbatches, one in sizes.items()
        }
        title = f"{model}: throughput on two ranks, median and quartiles"
        made[f"{model}.svg"] = bars(title, panels, unit="of the limit", reference=1.0)
    return made


def missed(results: Results) -> list[str]:
    """Targets that are missed, and those of which the rounds can't tell."""
    lines = []
    for one in targets(results):
        if one.verdict != "met":
            told = f"{one.what} is {middle_half(one.values)}, asked {one.asked:g}: {one.verdict}"
            lines.append(f"{one.model}, m = {one.microbatches}: {told}")
    for name, costs in results["engine"].items():
        if (found := verdict(costs, ENGINE, at_most=True)) != "met":
            told = f"{name} takes {middle_half(costs, 0)} microseconds an action"
            lines.append(f"engine: {told}, at the most {ENGINE:g}: {found}")
    return lines
