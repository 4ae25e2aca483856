"""Tables, plots and targets of weave."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

from benchmarks.harness import Results, title_of
from benchmarks.rendering import bars, median_and_quartiles, quartiles, table, verdict

BASE = "weft 2bw"
WOVEN = "weft weave"
WITHIN = 0.97  # of 2bw's throughput
HELD = {"weave slack 0": 0.55, "weave": 0.8}  # of wpipe's peak
WARM = ("weft wpipe warmup 2", "weft 2bw warmup 2")


def cases(results: Results) -> dict[str, Results]:
    """Races of layers that sleep, by their names in the tables."""
    found = {f"p = {stages}": case for stages, case in results["even"].items()}
    found["p = 4, uneven"] = results["uneven"]
    return found | {f"p = 4, hop of {1e3 * float(hop):g} ms": case for hop, case in results["hops"].items()}


def over(case: Results, base: str) -> dict[str, list[float]]:
    """Throughput of each contender in each round, over that of another in the same round."""
    return {
        name: [reference / own for reference, own in zip(case["seconds"][base], seconds, strict=True)]
        for name, seconds in case["seconds"].items()
    }


def over_simulated(case: Results) -> dict[str, list[float]]:
    """Measured over simulated throughput."""
    return {name: [case["simulated"][name] / own for own in seconds] for name, seconds in case["seconds"].items()}


def of_limit(case: Results) -> dict[str, list[float]]:
    """Throughput over what both cores do without a pipeline."""
    return {
        name: [limit / own for limit, own in zip(case["limit"][name], seconds, strict=True)]
        for name, seconds in case["seconds"].items()
    }


def tables(results: Results) -> dict[str, str]:
    """Paced layers over 2bw and over the simulator, models on two ranks, and bytes."""
    paced, models = cases(results), results["models"]
    names = list(next(iter(paced.values()))["seconds"])

    def rows(columns: list[dict[str, list[float]]]) -> list[list[str]]:
        return [[title_of(name), *(median_and_quartiles(column[name]) for column in columns)] for name in names]

    held = [
        [
            title_of(name),
            " ".join(f"{rank / 1024:.0f}" for rank in memory["counted"]),
            f"{max(memory['counted']) / _wpipe_peak(results):.2f}",
            f"{max(memory['counted']) / max(memory['simulated']):.3f}",
        ]
        for name, memory in results["memory"].items()
    ]
    about = f"{len(next(iter(paced.values()))['seconds'][BASE])} rounds; {results['environment']}."
    return {
        "paced": f"{table(['contender', *paced], rows([over(case, BASE) for case in paced.values()]))}\n\n{about}",
        "simulated": table(["contender", *paced], rows([over_simulated(case) for case in paced.values()])),
        "milliseconds": table(["contender", *paced], [[title_of(name), *_times(paced, name)] for name in names]),
        "models": table(
            ["contender", *(f"{model}, {what}" for model in models for what in ("of the limit", "over 2bw"))],
            rows([column for case in models.values() for column in (of_limit(case), over(case, BASE))]),
        ),
        "memory": table(["schedule", "KiB of each rank", "peak over wpipe's", "counted over simulated"], held),
    }


def _times(paced: dict[str, Results], name: str) -> list[str]:
    """Of a mini-batch, measured (simulated)."""
    return [
        f"{1e3 * statistics.median(case['seconds'][name]):.0f} ({1e3 * case['simulated'][name]:.0f})"
        for case in paced.values()
    ]


def _wpipe_peak(results: Results) -> float:
    return float(max(results["memory"]["wpipe"]["counted"]))


def plots(results: Results) -> dict[str, str]:
    """Bars of every contender over 2bw."""
    panels = {
        case: {title_of(name): quartiles(values) for name, values in over(found, BASE).items()}
        for case, found in cases(results).items()
    }
    title = "Layers that sleep: throughput over 2bw's"
    return {"paced.svg": bars(title, panels, unit="of the throughput of 2bw in the same round", reference=1.0)}


def missed(results: Results) -> list[str]:
    """Targets that are not met."""
    return [f"{text}: {result}" for text, result in verdicts(results) if result != "met"]


def verdicts(results: Results) -> Iterator[tuple[str, str]]:
    """Each target with its figure, and whether it is met."""
    for case, found in {**cases(results), **results["models"]}.items():
        values = over(found, BASE)[WOVEN]
        text = f"{case}: weave has {median_and_quartiles(values)} of 2bw's throughput, target {WITHIN:g}"
        yield text, verdict(values, WITHIN)
        if "hop" in case:
            others = [name for name in found["seconds"] if "weave" not in name and name not in WARM]
            best = min(others, key=lambda name: statistics.median(found["seconds"][name]))
            values = over(found, best)[WOVEN]
            yield f"{case}: weave has {median_and_quartiles(values)} of {best}'s, target 1", verdict(values, 1.0)
    for case, found in cases(results).items():
        ratios = over_simulated(found)
        values = [own / base for own, base in zip(ratios[WOVEN], ratios[BASE], strict=True)]
        text = f"{case}: measured over simulated is {median_and_quartiles(values)} of 2bw's, target 1"
        yield text, verdict(values, 1.0)
    for name, share in HELD.items():
        held = max(results["memory"][name]["counted"]) / _wpipe_peak(results)
        yield f"{name} holds {held:.2f} of wpipe's peak, target {share:g}", "met" if held <= share else "missed"
