"""Tables, plots and targets of throughput."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.harness import Results
from benchmarks.rendering import bars, median_and_quartiles, quartiles, table, verdict

OF_THE_LIMIT = 0.95
OVER_TORCH = {2: 1.3, 4: 1.12, 8: 1.0}  # over torch's best schedule, by micro-batches
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
    """What is asked of a model with this many micro-batches, and what was measured in each round."""

    model: str
    microbatches: int
    what: str
    asked: float
    values: list[float]

    @property
    def verdict(self) -> str:
        return verdict(self.values, self.asked)


def ratios(case: Results) -> dict[str, list[float]]:
    """The throughput of each contender in each round, over the limit: that of the slower core just then."""
    return {
        name: [limit / measured for limit, measured in zip(case["limit"][name], seconds, strict=True)]
        for name, seconds in case["seconds"].items()
    }


def both_cores(case: Results) -> list[float]:
    """What both cores could do if layers could move to the faster one at any moment, over the limit."""
    limits, means = (zip(*case[key].values(), strict=True) for key in ("limit", "mean"))
    return [sum(limit) / sum(mean) for limit, mean in zip(limits, means, strict=True)]


def targets(results: Results) -> list[Target]:
    """All targets but those of the engine."""
    found = []
    for model, sizes in results["models"].items():
        for microbatches, case in sizes.items():
            for what, asked, values in _asked(case, int(microbatches)):
                found.append(Target(model=model, microbatches=int(microbatches), what=what, asked=asked, values=values))
    return found


def _asked(case: Results, microbatches: int) -> Iterator[tuple[str, float, list[float]]]:
    of_limit = ratios(case)

    def over(name: str, other: str) -> list[float]:
        return [value / base for value, base in zip(of_limit[name], of_limit[other], strict=True)]

    of_torch = [name for name in of_limit if name.startswith("torch ")]
    best = max(of_torch, key=lambda name: statistics.median(of_limit[name]))
    for name in ASYNCHRONOUS:
        yield f"`{name}` of the limit", OF_THE_LIMIT, of_limit[f"weft {name}"]
    if microbatches in OVER_TORCH:
        for name in ASYNCHRONOUS:
            yield f"`{name}` over torch's best", OVER_TORCH[microbatches], over(f"weft {name}", best)
    for name, others in COUNTERPARTS.items():
        for other in others:
            yield f"`{name}` over torch's {other}", 1.0, over(f"weft {name}", f"torch {other}")


def tables(results: Results) -> dict[str, str]:
    """A table for each model, the engine's cost, and the targets: none of a quick form, whose layers are too small."""
    models = {model: f"{_model_table(sizes)}\n\n{_about(results, sizes)}" for model, sizes in results["models"].items()}
    asked = {} if results.get("form") == "quick" else {"targets": _targets_table(results)}
    return models | asked | {"engine": _engine_table(results)}


def _model_table(sizes: Results) -> str:
    found = {microbatches: ratios(case) for microbatches, case in sizes.items()}
    most = max(found.values(), key=len)  # has all contenders of the others, in order
    rows = [
        [name, *(median_and_quartiles(case[name]) if name in case else "–" for case in found.values())] for name in most
    ]
    rows.append([BOTH, *(median_and_quartiles(both_cores(case)) for case in sizes.values())])
    return table(["contender", *(f"m = {microbatches}" for microbatches in found)], rows)


def _about(results: Results, sizes: Results) -> str:
    """The sentences below a table."""
    rounds = len(both_cores(next(iter(sizes.values()))))
    deepspeed = f", deepspeed {results['deepspeed']}" if results.get("deepspeed") else ""
    limit = f'The limit is the slower core\'s; for ratios over the mean of both, divide by the row "{BOTH}".'
    return f"{limit}\n{rounds} rounds; {results['environment']}{deepspeed}."


def _targets_table(results: Results) -> str:
    every = targets(results)
    sizes = sorted({target.microbatches for target in every})
    cells = {(target.model, target.what, target.microbatches): target for target in every}
    rows = [
        [model, what, *(_target_cell(cells.get((model, what, size))) for size in sizes)]
        for model, what in dict.fromkeys((target.model, target.what) for target in every)
    ]
    return table(["model", "target", *(f"m = {size}" for size in sizes)], rows, left=2)


def _target_cell(target: Target | None) -> str:
    if target is None:
        return "–"
    return f"{median_and_quartiles(target.values, 3)}, asked {target.asked:g}: {target.verdict}"


def _engine_table(results: Results) -> str:
    rows = [
        [f"`{name}`", median_and_quartiles(costs, 0), f"{ENGINE:g}", verdict(costs, ENGINE, at_most=True)]
        for name, costs in results["engine"].items()
    ]
    return table(["schedule", "microseconds an action, median (quartiles)", "at the most", ""], rows)


def plots(results: Results) -> dict[str, str]:
    """Bars of every contender, a plot for each model."""
    found = {}
    for model, sizes in results["models"].items():
        panels = {
            f"m = {microbatches}": {name: quartiles(values) for name, values in ratios(case).items()}
            for microbatches, case in sizes.items()
        }
        title = f"{model}: throughput on two ranks, median and quartiles"
        found[f"{model}.svg"] = bars(title, panels, unit="of the limit", reference=1.0)
    return found


def missed(results: Results) -> list[str]:
    """Targets that are missed, and those without a clear verdict."""
    lines = []
    for target in targets(results):
        if target.verdict != "met":
            found = f"{target.what} is {median_and_quartiles(target.values)}, target {target.asked:g}"
            lines.append(f"{target.model}, m = {target.microbatches}: {found}: {target.verdict}")
    for name, costs in results["engine"].items():
        if (result := verdict(costs, ENGINE, at_most=True)) != "met":
            found = f"{name} takes {median_and_quartiles(costs, 0)} microseconds an action"
            lines.append(f"engine: {found}, at the most {ENGINE:g}: {result}")
    return lines
