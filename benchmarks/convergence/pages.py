"""Tables, plots and targets of convergence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.convergence.studies import METHODS, OPTIMIZERS, STUDIES, SYNCHRONOUS
from benchmarks.convergence.verdicts import CLAIMED, Cell, cells
from benchmarks.harness import Results
from benchmarks.rendering import bars, lines, table

NAMES = {"sgd": "SGD, momentum", "adamw": "AdamW"}
ABOVE = 1.1  # times the highest point of synchronous training: points of a curve above that are left out
SHOWN = ("wpipe", "wpipe, predicted", "xpipe", "2bw", "pipedream", SYNCHRONOUS)  # in curves, the last on top


def tables(results: Results) -> dict[str, str]:
    """The rates, a table for each study, and the claim."""
    found = list(cells(results))
    return {
        "rates": _rates(results),
        **{study: _study([cell for cell in found if cell.study == study]) for study in results["studies"]},
        "claim": _claim(found),
    }


def missed(results: Results) -> list[str]:
    """Where a method of the claim is worse than seed noise; and best rates at the edge of their sweep."""
    worse = [
        f"{_panel(cell)}, {cell.label}: {cell.verdict} ({_difference(cell)}; noise {cell.noise:.3f})"
        for cell in cells(results)
        if cell.method in CLAIMED and cell.verdict not in ("within", "better")
    ]
    edges = [place for place, tried in results["sweeps"].items() if _chosen(tried) not in list(tried)[1:-1]]
    return worse + [f"{place}: the best rate is at the edge of the sweep" for place in edges]


def plots(results: Results) -> dict[str, str]:
    """Differences to synchronous training, curves over updates and, where throughput was measured, over time."""
    found = list(cells(results))
    title = "Held-out loss, less that of synchronous training of the same seed"
    found_plots = {}
    if differences := _differences(found):
        found_plots["differences.svg"] = bars(title, differences, unit="nats", digits=3)
    if panels := _panels(results, _shown(found), lambda cell: 1.0):
        found_plots["curves.svg"] = lines("Training loss, mean of the seeds", panels, x="updates", y="loss")
    if panels := _panels(results, _shown([cell for cell in found if cell.ranks == 2]), partial(_rate, results)):
        title = "Training loss over time, at the measured throughput of two ranks"
        found_plots["time.svg"] = lines(title, panels, x="time, in updates at the limit", y="loss")
    return found_plots


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
            row += _columns([cell for cell in found if (cell.label, cell.optimizer) == (label, optimizer)])
        rows.append(row)
    return table(head, rows)


def _labels(found: Sequence[Cell]) -> list[str]:
    """Method by method, each by its numbers of ranks."""
    order = list(METHODS)
    ordered = sorted(found, key=lambda cell: (order.index(cell.method), cell.ranks))
    return list(dict.fromkeys(cell.label for cell in ordered))


def _columns(found: Sequence[Cell]) -> list[str]:
    """Of a method with an optimizer; empty if it did not run."""
    if not found:
        return [""] * 4
    (cell,) = found
    ended = bool(cell.losses)
    row = [_mean(cell.losses, 3) if ended else "–", _mean(cell.metrics, 1, 100) + " %" if ended else "–"]
    if cell.method == SYNCHRONOUS:
        return [*row, "", f"{cell.noise:.3f}"]
    return [*row, _difference(cell) if ended else "–", cell.verdict]


def _claim(found: Sequence[Cell]) -> str:
    """The difference of each method, in units of seed noise."""
    places = list(dict.fromkeys((cell.study, cell.optimizer) for cell in found))
    rows = []
    for label in _labels([cell for cell in found if cell.method != SYNCHRONOUS]):
        row = [label]
        for place in places:
            here = [cell for cell in found if (cell.study, cell.optimizer, cell.label) == (*place, label)]
            row.append(_units(here[0]) if here else "")
        rows.append(row)
    return table(["method", *(f"{study}, {NAMES[optimizer]}" for study, optimizer in places)], rows)


def _units(cell: Cell) -> str:
    if cell.verdict not in ("within", "worse", "better"):
        return cell.verdict
    units = statistics.mean(cell.differences) / cell.noise if cell.noise else 0.0  # without noise, within is equal
    return f"{units:+.1f}" if cell.verdict == "within" else f"**{units:+.1f}**"


def _mean(values: Sequence[float], digits: int, scale: float = 1.0) -> str:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{scale * statistics.mean(values):.{digits}f} ± {scale * deviation:.{digits}f}"


def _difference(cell: Cell) -> str:
    if not cell.differences:
        return "no seed ended in both"
    least, most = min(cell.differences), max(cell.differences)
    return f"{statistics.mean(cell.differences):+.3f} ({least:+.3f} to {most:+.3f})"


# Plots


def _panel(cell: Cell) -> str:
    return f"{cell.study}, {NAMES[cell.optimizer]}"


def _differences(found: Sequence[Cell]) -> dict[str, dict[str, tuple[float, float, float]]]:
    panels: dict[str, dict[str, tuple[float, float, float]]] = {}
    for cell in found:
        if cell.method != SYNCHRONOUS and cell.differences and (cell.ranks == 2 or not METHODS[cell.method].fixed):
            values = (min(cell.differences), statistics.mean(cell.differences), max(cell.differences))
            panels.setdefault(_panel(cell), {})[cell.label] = values
    return panels


def _shown(found: Sequence[Cell]) -> list[Cell]:
    """The methods of `SHOWN`, each on its largest number of ranks."""
    most = {(cell.study, cell.optimizer, cell.method): cell for cell in found}  # the last has the most ranks
    return [cell for method in SHOWN for place, cell in most.items() if place[2] == method]


def _panels(
    results: Results, shown: Sequence[Cell], rate: Callable[[Cell], float | None]
) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Curves over updates, divided by the rate; without a rate there is no curve. A point is in the middle of its part.

    Points far above synchronous training are left out: they would flatten the rest.
    """
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    synchronous = {(cell.study, cell.optimizer): cell for cell in shown if cell.method == SYNCHRONOUS}
    for cell in shown:
        if (cell_rate := rate(cell)) is None:
            continue
        losses = [loss for loss in synchronous[cell.study, cell.optimizer].curve if loss is not None]
        highest = ABOVE * max(losses, default=math.inf)
        size = results["studies"][cell.study]["updates"] / len(cell.curve) / cell_rate
        points = [
            ((part + 0.5) * size, loss) for part, loss in enumerate(cell.curve) if loss is not None and loss <= highest
        ]
        if points:
            panels.setdefault(_panel(cell), {})[cell.method] = points
    return panels


def _rate(results: Results, cell: Cell) -> float | None:
    """The share of the limit, if the method was measured on a model like that of the study."""
    rates: dict[str, dict[str, float]] = results.get("throughput", {})
    return rates.get(STUDIES[cell.study].like, {}).get(METHODS[cell.method].rate)
