"""Targets, tables and pictures of throughput: pure functions of what was measured. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from weft.bench.benchmark import Results
from weft.bench.writing import quartiles, spread, table, unsteady
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
WIDE = 0.15  # the middle half of the rounds, over their median, at the most


@dataclass(frozen=True, kw_only=True)
class Target:
    """What was asked of a model with so many micro-batches, and what each round says."""

    model: str
    microbatches: int
    what: str
    asked: float
    values: list[float]

    @property
    def met(self) -> bool:
        """Whether the median reaches it."""
        return statistics.median(self.values) >= self.asked

    @property
    def verdict(self) -> str:
        """In words."""
        return "unsteady" if unsteady(self.values, WIDE) else "met" if self.met else "missed"


def ratios(one: Results) -> dict[str, list[float]]:
    """Of every contender, in every round: its throughput over the median limit of that round."""
    limits = [statistics.median(windows) for windows in one["limit"]]
    return {
        name: [limit / took for limit, took in zip(limits, seconds, strict=True)]
        for name, seconds in one["seconds"].items()
    }


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
    """One of each model, the targets, and the engine's cost."""
    made = {
        model: f"{_table_of(sizes)}\n\n{_measured_on(results, sizes)}" for model, sizes in results["models"].items()
    }
    return made | {"targets": _targets_table(results), "engine": _engine_table(results)}


def _table_of(sizes: Results) -> str:
    found = {microbatches: ratios(one) for microbatches, one in sizes.items()}
    most = max(found.values(), key=len)  # has all that the others have, in order
    rows = [[name, *(_cell(some[name]) if name in some else "–" for some in found.values())] for name in most]
    return table(["contender", *(f"m = {microbatches}" for microbatches in found)], rows)


def _measured_on(results: Results, sizes: Results) -> str:
    """The sentence below a table."""
    some = next(iter(sizes.values()))
    deepspeed = f", deepspeed {results['deepspeed']}" if results.get("deepspeed") else ""
    return f"{len(some['limit'])} rounds of {len(some['limit'][0])} limits each; {results['environment']}{deepspeed}."


def _cell(values: Sequence[float], digits: int = 2) -> str:
    low, middle, high = quartiles(values)
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def _targets_table(results: Results) -> str:
    every = targets(results)
    sizes = sorted({one.microbatches for one in every})
    cells = {(one.model, one.what, one.microbatches): one for one in every}
    rows = []
    for model, what in dict.fromkeys((one.model, one.what) for one in every):
        row = [model, what]
        for size in sizes:
            one = cells.get((model, what, size))
            row.append("–" if one is None else f"{_cell(one.values, 3)}, asked {one.asked:g}: {one.verdict}")
        rows.append(row)
    return table(["model", "target", *(f"m = {size}" for size in sizes)], rows, left=2)


def _engine_table(results: Results) -> str:
    rows = [
        [f"`{name}`", spread(costs, 0), f"{ENGINE:g}", "met" if statistics.median(costs) <= ENGINE else "missed"]
        for name, costs in results["engine"].items()
    ]
    return table(["schedule", "microseconds an action, median (least to most)", "at the most", ""], rows)


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
    """Targets of the whole form; the quick one has none, since its layers are too small to hide anything behind."""
    if results.get("form") == "quick":
        return []
    lines = [
        f"{one.model}, m = {one.microbatches}: {one.what} is {_cell(one.values)}, asked {one.asked:g}: {one.verdict}"
        for one in targets(results)
        if one.verdict != "met"
    ]
    for name, costs in results["engine"].items():
        if statistics.median(costs) > ENGINE:
            lines.append(f"engine: {name} takes {spread(costs, 0)} microseconds an action, at the most {ENGINE:g}")
    return lines
