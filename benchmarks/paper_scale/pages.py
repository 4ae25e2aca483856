"""Tables and plots of paper-scale, and the papers' claims that weft's model does not reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Results, title_of
from benchmarks.paper_scale.sensitivity import compare, fastest, place
from benchmarks.rendering import bars, lines, stacks, table
from weft.simulate import CATEGORIES
from weft.text import format_figure

SHOWN = ("gpipe", "2bw", "wpipe", "xpipe", "weave", "weave slack 0")
WITH_CURVE = ("gpipe", "2bw", "wpipe", "weave")  # the curves of xpipe and paci equal 2bw's
FASTER, SMALLER, IDLE = 1.4, 0.64, 0.02  # the papers' claims
CLAIM_SLACK = 0.005  # 1.4 and 36 % are printed with two digits

Cells = list[dict[str, Any]]


def tables(results: Results) -> dict[str, str]:
    """The best cells, memory, idle shares, and the effect of each assumption."""
    return {
        "best": f"{_best(results['cells'])}\n\nSimulated on {results.get('environment', 'any machine')}.",
        "memory": _memory(results["cells"]),
        "idle": _idle(results["cells"]),
        "slack": _slack(results["cells"]),
        "assumptions": _assumptions(results["assumptions"]),
    }


def _best(models: Mapping[str, Cells]) -> str:
    rows = []
    for model, cells in models.items():
        best = {method: cell for (method,), cell in fastest(cells, "method").items()}
        for method, cell in best.items():
            gain = f"{cell['throughput'] / best['gpipe']['throughput']:.2f}" if "gpipe" in best else "–"
            row = (model, title(method), place(cell), str(cell["microbatches"]), f"{cell['throughput']:.1f}", gain)
            rows.append((*row, f"{cell['total_gb']:.1f}", format_figure(cell["mean_delay"])))
    head = ("model", "method", "best that fits", "m", "samples/s", "× gpipe", "GB", "mean delay")
    return table(head, rows, left=3)


def _memory(models: Mapping[str, Cells]) -> str:
    rows = []
    for model, cells in models.items():
        for depth, width in _grids(cells):
            row = [model, f"({depth},{width})"]
            for recompute in (False, True):
                by_method = {
                    method: {
                        cell["batch"]: cell
                        for cell in cells
                        if (cell["method"], cell["depth"], cell["recompute"]) == (method, depth, recompute)
                    }
                    for method in ("wpipe", "2bw")
                }
                wpipe, two_bw = by_method.values()
                ratios = [wpipe[batch]["total_gb"] / two_bw[batch]["total_gb"] for batch in two_bw]
                row += [f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if ratios else "–"]
                row += [" / ".join(_largest(cells_of_method) for cells_of_method in (wpipe, two_bw))]
            rows.append(row)
    head = ("model", "grid", "bytes, kept", "largest batch", "bytes, recomputed", "largest batch")
    return table(head, rows, left=2)


def _largest(cells: Mapping[int, Mapping[str, Any]]) -> str:
    return str(max((batch for batch, cell in cells.items() if cell["fits"]), default="–"))


def _idle(models: Mapping[str, Cells]) -> str:
    rows = []
    methods = list(dict.fromkeys(cell["method"] for cells in models.values() for cell in cells))
    for model, cells in models.items():
        for grid in _grids(cells):
            idle = _idle_of(cells, grid)
            rows.append([model, f"({grid[0]},{grid[1]})", *(_percent(idle.get(method)) for method in methods)])
    return table(("model", "grid", *map(title, methods)), rows, left=2)


def _slack(models: Mapping[str, Cells]) -> str:
    """At the largest batch, activations kept."""
    methods = list(dict.fromkeys(cell["method"] for cells in models.values() for cell in cells))
    rows = []
    for model, cells in models.items():
        for depth, width in _grids(cells):
            found = {
                cell["method"]: f"{cell['mean_delay']:.2g} / {round(cell['slack'], 2):g}"
                for cell in cells
                if (cell["depth"], cell["width"]) == (depth, width) and cell["slack"] is not None
            }
            rows.append([model, f"({depth},{width})", *(found.get(method, "–") for method in methods)])
    return table(("model", "grid", *map(title, methods)), rows, left=2)


def title(method: str) -> str:
    """`wpipe fresh True` as `wpipe, fresh`."""
    return title_of(method).replace(" ", ", ", 1)


def _idle_of(cells: Cells, grid: tuple[int, int]) -> dict[str, float]:
    """At the largest batch, activations kept; whether it fits or not, as idling is a property of the order."""
    largest = max(cell["batch"] for cell in cells)
    return {
        cell["method"]: cell["idle"]
        for cell in cells
        if (cell["depth"], cell["width"]) == grid and cell["batch"] == largest and not cell["recompute"]
    }


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _assumptions(studied: Mapping[str, Mapping[str, Any]]) -> str:
    rows = []
    for model, changed in studied.items():
        for name, found in changed.items():
            row = [model, name, _ends(found["memory"]), _at(found["memory"], "least_at"), _ends(found["cell"])]
            row += [_most(found["batch"]), _most(found["grid"]), _at(found["grid"], "most_at"), _most(found["best"])]
            rows.append(row)
    bytes_, samples = (
        ("bytes, same cell", "least at"),
        ("samples/s, same cell", "same batch", "same grid", "at", "best"),
    )
    return table(("model", "assumption", *bytes_, *samples), rows, left=2)


def _at(found: Mapping[str, Any] | None, which: str) -> str:
    return "–" if found is None else str(found[which])


def _ends(found: Mapping[str, Any] | None) -> str:
    return "–" if found is None else f"{found['least']:.2f} to {found['most']:.2f}"


def _most(found: Mapping[str, Any] | None) -> str:
    return "–" if found is None else f"{found['most']:.2f}"


def plots(results: Results) -> dict[str, str]:
    """Throughput over the batch, bytes by category, idle shares."""
    cells = results["cells"]
    return {
        "throughput.svg": lines(
            "Samples a second that fit in 16 GB, with recompute where it must be",
            {name: curves for name, curves in _throughputs(cells).items() if curves},
            x="batch",
            y="samples/s",
            powers_of_two=True,
        ),
        "memory.svg": stacks("Bytes of the fullest rank, BERT on 8 devices, recompute", _stacks(cells), unit="GB"),
        "idle.svg": bars(
            "Idle part of a steady mini-batch, largest batch", _idles(cells), unit="%", digits=1, reference=100 * IDLE
        ),
    }


def _throughputs(models: Mapping[str, Cells]) -> dict[str, dict[str, list[tuple[float, float]]]]:
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for model, cells in models.items():
        for depth, width in _grids(cells):
            best = fastest([cell for cell in cells if cell["depth"] == depth], "method", "batch")
            curves: dict[str, list[tuple[float, float]]] = {}
            for (method, batch), cell in sorted(best.items(), key=lambda item: item[0][1]):
                if method in WITH_CURVE:
                    curves.setdefault(method, []).append((batch, cell["throughput"]))
            panels[f"{model}, {depth} × {width}"] = curves
    return panels


def _stacks(models: Mapping[str, Cells]) -> dict[str, dict[str, dict[str, float]]]:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for model in [model for model in models if model in ("bert-96", "bert-192")]:
        for cell in models[model]:
            if cell["recompute"] and cell["batch"] == 64:
                panel = panels.setdefault(f"{model}, {cell['depth']} × {cell['width']}, batch 64", {})
                panel[title(cell["method"])] = {name.replace("_", " "): cell["gb"][name] for name in CATEGORIES}
    return panels


def _idles(models: Mapping[str, Cells]) -> dict[str, dict[str, float]]:
    panels: dict[str, dict[str, float]] = {}
    for model, cells in models.items():
        for grid in _grids(cells):
            idle = _idle_of(cells, grid)
            panels[f"{model}, {grid[0]} × {grid[1]}"] = {
                title(method): 100 * idle[method] for method in SHOWN if method in idle
            }
    return panels


def missed(results: Results) -> list[str]:
    """The papers' claims that weft's model does not reach, and where."""
    lines = []
    for model, cells in results["cells"].items():
        found = compare(cells)
        if found["memory"] and found["memory"]["least"] > SMALLER + CLAIM_SLACK:
            least, at = found["memory"]["least"], found["memory"]["least_at"]
            lines.append(f"{model}: wpipe holds {1 - least:.0%} less than 2bw at the best, {at}; the paper says 36%")
        gains = {way: found[way]["most"] for way in ("cell", "batch", "grid", "best") if found[way]}
        if gains and max(gains.values()) < FASTER - CLAIM_SLACK:
            way = max(gains, key=lambda name: gains[name])
            lines.append(f"{model}: wpipe is {gains[way]:.2f} x 2bw at the best ({way}); the paper says 1.4")
        for grid in _grids(cells):
            idle = _idle_of(cells, grid).get("xpipe", 0.0)
            if idle > IDLE:
                lines.append(
                    f"{model}, ({grid[0]},{grid[1]}): xpipe idles {idle:.1%}; negligible would be below {IDLE:.0%}"
                )
        if unsteady := sum(not cell["steady"] for cell in cells):
            lines.append(f"{model}: {unsteady} cells have no steady state")
    return lines


def _grids(cells: Cells) -> list[tuple[int, int]]:
    return list(dict.fromkeys((cell["depth"], cell["width"]) for cell in cells))
