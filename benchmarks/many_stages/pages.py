"""Tables, plots and targets of many-stages."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.harness import Results
from benchmarks.rendering import bars, median_and_quartiles, quartiles, table, unsteady, verdict

WARM = ("2bw warmup 2", "wpipe warmup 2")  # they need two micro-batches a rank
TARGET = 0.95


def ratios(case: Results) -> dict[str, list[float]]:
    """Measured over simulated throughput of each contender in each round."""
    return {name: [case["simulated"][name] / seconds for seconds in rounds] for name, rounds in case["seconds"].items()}


def _cases(results: Results) -> Iterator[tuple[str, Results]]:
    for stages, kinds in results["stages"].items():
        for kind, case in kinds.items():
            yield f"p = {stages}, {kind}", case


def tables(results: Results) -> dict[str, str]:
    """Measured over simulated, and the milliseconds of a mini-batch."""
    cases = dict(_cases(results))
    found = {name: ratios(case) for name, case in cases.items()}
    first = next(iter(found.values()))
    names, rounds = list(first), next(iter(first.values()))
    rows = [[_label(name), *(median_and_quartiles(case[name], 3) for case in found.values())] for name in names]
    times = [[_label(name), *(_milliseconds(case, name) for case in cases.values())] for name in names]
    about = f"{len(rounds)} rounds; {results['environment']}."
    return {
        "torch": f"{_torch_table(cases)}\n\n{about}",
        "ratios": f"{table(['contender', *cases], rows)}\n\n{about}",
        "milliseconds": table(["contender", *cases], times),
    }


def over_torch(case: Results, name: str, *opponents: str) -> list[float]:
    """Throughput over that of the fastest of some of torch's schedules, in each round."""
    sizes = 2 if name.removeprefix("weft ") in WARM else 1
    return [
        sizes * min(others) / seconds
        for seconds, *others in zip(
            case["seconds"][name], *(case["seconds"][other] for other in opponents), strict=True
        )
    ]


def _torch_table(cases: dict[str, Results]) -> str:
    """Each of weft's schedules over torch's 1F1B, and over the best of torch's."""
    every = [name for name in next(iter(cases.values()))["seconds"] if name.startswith("torch ")]
    columns = [(case, opponents) for case in cases for opponents in (("torch 1F1B",), tuple(every))]
    head = ["contender", *(f"{case}, over {'the best' if len(names) > 1 else '1F1B'}" for case, names in columns)]
    rows = [
        [_label(name), *(median_and_quartiles(over_torch(cases[case], name, *names)) for case, names in columns)]
        for name in next(iter(cases.values()))["seconds"]
        if name.startswith("weft ")
    ]
    return table(head, rows)


def _milliseconds(case: Results, name: str) -> str:
    """Measured (simulated)."""
    return f"{1e3 * statistics.median(case['seconds'][name]):.0f} ({1e3 * case['simulated'][name]:.0f})"


def _label(name: str) -> str:
    """With its micro-batches, if it has more than the others."""
    return f"{name}, m = 2p" if name.removeprefix("weft ") in WARM else name


def plots(results: Results) -> dict[str, str]:
    """Bars of every contender."""
    panels = {
        case: {_label(name): quartiles(values) for name, values in ratios(found).items()}
        for case, found in _cases(results)
    }
    title = "Layers that sleep: measured over simulated throughput"
    return {"ratios.svg": bars(title, panels, unit="of the simulated throughput", reference=1.0)}


def missed(results: Results) -> list[str]:
    """Targets of weft's schedules; torch's need only be steady."""
    lines = []
    for case, found in _cases(results):
        for name, values in ratios(found).items():
            text = f"{case}: {name} is {median_and_quartiles(values, 3)} of the simulated throughput"
            if not name.startswith("weft "):
                lines += [f"{text}: unsteady"] if unsteady(values) else []
            elif (result := verdict(values, TARGET)) != "met":
                lines.append(f"{text}, target {TARGET:g}: {result}")
    return lines
