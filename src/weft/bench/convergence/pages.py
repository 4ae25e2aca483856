"""Tables, pictures and targets, of results alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from weft.bench.benchmark import Results
from weft.bench.convergence.studies import METHODS, OPTIMIZERS, STUDIES, SYNCHRONOUS
from weft.bench.convergence.verdicts import CLAIMED, Cell, cells
from weft.bench.writing import table
from weft.draw.plots import bars, lines

NAMES = {"sgd": "SGD, momentum", "adamw": "AdamW"}
ABOVE = 1.1  # times the highest point of synchronous training: a curve's points beyond are left out
SHOWN = ("wpipe", "wpipe, predicted", "xpipe", "2bw", "pipedream", SYNCHRONOUS)  # in curves, the last one on top


def tables(results: Results) -> dict[str, str]:
    """The rates, a table for each study, and the claim."""
    found = list(cells(results))
    return {
        "rates": _rates(results),
        **{study: _study([one for one in found if one.study == study]) for study in results["studies"]},
        "claim": _claim(found),
    }


def missed(results: Results) -> list[str]:
    """Where a method of the claim ends beyond seed noise, for the worse; and rates at the edge of their sweep."""
    worse = [
        f"{_panel(one.study, one.optimizer)}, {one.label}: {one.verdict} ({_difference(one)}; noise {one.noise:.3f})"
        for one in cells(results)
        if one.method in CLAIMED and one.verdict not in ("within", "better")
    ]
    edges = [place for place, tried in results["sweeps"].items() if _chosen(tried) not in list(tried)[1:-1]]
    return worse + [f"{place}: the best rate is at the edge of the sweep" for place in edges]


def plots(results: Results) -> dict[str, str]:
    """Differences to synchronous training, curves over updates and, where throughput was measured, over time."""
    found = list(cells(results))
    title = "Held-out loss, less that of synchronous training of the same seed"
    made = {}
    if differences := _differences(found):
        made["differences.svg"] = bars(title, differences, unit="nats", reference=0.0)
    if panels := _panels(results, _shown(found), lambda one: 1.0):
        made["curves.svg"] = lines("Training loss, mean of the seeds", panels, x="updates", y="loss")
    if panels := _panels(results, _shown([one for one in found if one.ranks == 2]), partial(_rate, results)):
        title = "Training loss over time, at the measured throughput of two ranks"
        made["time.svg"] = lines(title, panels, x="time, in updates at the limit", y="loss")
    return made


# Tables


def _rates(results: Results) -> str:
    rows = []
    for place, tried in results["sweeps"].items():
        shown = [f"{rate}: {'diverged' if loss is None else f'{loss:.3f}'}" for rate, loss in tried.items()]
        study, optimizer = place.split(", ")
        rows.append((study, NAMES[optimizer], _chosen(tried), "; ".join(shown)))
    head = ("study", "optimizer", "chosen rate", "held-out loss of synchronous training by rate")
    return f"{table(head, rows, left=2)}\n\n{results['environment']}."


def _chosen(tried: dict[str, float | None]) -> str:
    """The rate with the least loss."""
    return min(tried, key=lambda rate: float("inf") if (loss := tried[rate]) is None else loss)


def _study(found: Sequence[Cell]) -> str:
    head = ["method"]
    for optimizer in OPTIMIZERS:
        head += [f"{NAMES[optimizer]}: loss", "accuracy", "to synchronous", "seed noise"]
    rows = []
    for label in _labels(found):
        row = [label]
        for optimizer in OPTIMIZERS:
            row += _cells([one for one in found if (one.label, one.optimizer) == (label, optimizer)])
        rows.append(row)
    return table(head, rows)


def _labels(found: Sequence[Cell]) -> list[str]:
    """Method by method, each by its numbers of ranks."""
    order = list(METHODS)
    return list(dict.fromkeys(one.label for one in sorted(found, key=lambda one: (order.index(one.method), one.ranks))))


def _cells(of: Sequence[Cell]) -> list[str]:
    """Of one method with one optimizer, where it was run."""
    if not of:
        return [""] * 4
    (one,) = of
    ended = bool(one.losses)
    row = [_mean(one.losses, 3) if ended else "–", _mean(one.metrics, 1, 100) + " %" if ended else "–"]
    if one.method == SYNCHRONOUS:
        return [*row, "", f"{one.noise:.3f}"]
    return [*row, _difference(one) if ended else "–", one.verdict]


def _claim(found: Sequence[Cell]) -> str:
    """Of each method, the difference in units of seed noise."""
    places = list(dict.fromkeys((one.study, one.optimizer) for one in found))
    rows = []
    for label in _labels([one for one in found if one.method != SYNCHRONOUS]):
        row = [label]
        for place in places:
            here = [one for one in found if (one.study, one.optimizer, one.label) == (*place, label)]
            row.append(_units(here[0]) if here else "")
        rows.append(row)
    return table(["method", *(f"{study}, {NAMES[optimizer]}" for study, optimizer in places)], rows)


def _units(one: Cell) -> str:
    if one.verdict not in ("within", "worse", "better"):
        return one.verdict
    units = statistics.mean(one.differences) / one.noise if one.noise else 0.0  # without noise, within is equal
    return f"{units:+.1f}" if one.verdict == "within" else f"**{units:+.1f}**"


def _mean(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    apart = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{digits}f} ± {scale * apart:.{digits}f}"


def _difference(one: Cell) -> str:
    if not one.differences:
        return "no seed ended in both"
    least, most = min(one.differences), max(one.differences)
    return f"{statistics.mean(one.differences):+.3f} ({least:+.3f} to {most:+.3f})"


# Pictures


def _panel(study: str, optimizer: str) -> str:
    return f"{study}, {NAMES[optimizer]}"


def _differences(found: Sequence[Cell]) -> dict[str, dict[str, tuple[float, float, float]]]:
    panels: dict[str, dict[str, tuple[float, float, float]]] = {}
    for one in found:
        if one.method != SYNCHRONOUS and one.differences and (one.ranks == 2 or not METHODS[one.method].fixed):
            some = one.differences
            values = (min(some), statistics.mean(some), max(some))
            panels.setdefault(_panel(one.study, one.optimizer), {})[one.label] = values
    return panels


def _shown(found: Sequence[Cell]) -> list[Cell]:
    """The claimed methods and what they are compared with, each on the most ranks that it was run on."""
    most = {(one.study, one.optimizer, one.method): one for one in found}  # the last is that of the most ranks
    return [one for method in SHOWN for place, one in most.items() if place[2] == method]


def _panels(
    results: Results, shown: Sequence[Cell], rate: Callable[[Cell], float | None]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Curves over updates, each stretched by its rate, if it has one; a point is in the middle of the updates it is of.

    What is far above synchronous training would hide the rest.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in shown:
        if (of := rate(one)) is None:
            continue
        (base,) = (cell for cell in shown if (cell.study, cell.optimizer, cell.method) == (*_place(one), SYNCHRONOUS))
        highest = ABOVE * max((loss for loss in base.curve if loss is not None), default=math.inf)
        size = results["studies"][one.study]["updates"] / len(one.curve) / of
        points = [
            ((at + 0.5) * size, loss) for at, loss in enumerate(one.curve) if loss is not None and loss <= highest
        ]
        if points:
            panels.setdefault(_panel(*_place(one)), {})[one.method] = points
    return panels


def _place(one: Cell) -> tuple[str, str]:
    return one.study, one.optimizer


def _rate(results: Results, one: Cell) -> float | None:
    """Of the limit, where the throughput of the method was measured on a model like that of the study."""
    found: float | None = results.get("throughput", {}).get(STUDIES[one.study].like, {}).get(METHODS[one.method].rate)
    return found
