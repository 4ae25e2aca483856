"""Tables, plots and targets of memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.harness import Results, title_of
from benchmarks.rendering import bars, stacks, table
from weft.simulate import CATEGORIES

MIB = 2**20
COUNTED = ("weights", "extra_versions", "masters", "gradients", "optimizer", "activations")  # whose sum is compared
TOLERANCE = 0.05  # of the simulated bytes


def tables(results: Results) -> dict[str, str]:
    """A table of bytes for each model, and one of the largest batches."""
    found = {name: _bytes_table(model) for name, model in results["models"].items()}
    models = results["models"].values()
    if any("simulated" in model or any(cell["tried"] for cell in model["cells"]) for model in models):
        found["batch"] = _batch_table(results)
    for name, model in results["models"].items():
        if "simulated" in model:
            found[f"{name}-simulated"] = _simulated_table(model, 2 * results["microbatches"])
    return found


def _simulated_table(model: Mapping[str, Any], microbatches: int) -> str:
    head = ["method", "weights", "of them extra", "masters", "gradients", "optimizer", "activations", "sum"]
    head += ["least full rank"]
    rows = []
    for cell in model["simulated"]:
        sums = [_sum(rank) for rank in cell["ranks"]]
        fullest = cell["ranks"][sums.index(max(sums))]
        columns = [fullest["weights"] + fullest["extra_versions"], *(fullest[name] for name in COUNTED[1:])]
        name = title_of(cell["method"]).replace(" ", ", ", 1)
        rows.append([label_of(name, cell["form"]), *map(_mib, [*columns, max(sums), min(sums)])])
    return f"{table(head, rows)}\n\nMiB of the fullest rank, m = {microbatches}, batch {model['size']['batch']}."


def _bytes_table(model: Mapping[str, Any]) -> str:
    head = ["method", "weights", "of them extra", "masters", "gradients", "optimizer", "activations", "counted"]
    head += ["buffers", "resident", "counted / simulated"]
    rows = []
    for cell in model["cells"]:
        fullest = max(cell["ranks"], key=lambda rank: _sum(rank["counted"]))
        counted = fullest["counted"]
        columns = [counted["weights"] + counted["extra_versions"], counted["extra_versions"]]
        columns += [counted[name] for name in COUNTED[2:]]
        columns += [_sum(counted), counted["buffers"], fullest["resident"]]
        ratios = _ratios(cell)
        compared = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append([label_of(cell["method"], cell["form"]), *map(_mib, columns), compared])
    return table(head, rows)


def _batch_table(results: Results) -> str:
    models = results["models"]
    head = ["method"]
    for name, model in models.items():
        size = model["size"]
        head += [f"{name}, tried at {size['limit'] // MIB} MiB"]
        head += [f"simulated at {limit // MIB}" for limit in size["limits"]]
    labels = [label_of(cell["method"], cell["form"]) for cell in next(iter(models.values()))["cells"]]
    rows: list[list[object]] = []
    for place, label in enumerate(labels):
        rows.append([label])
        for model in models.values():
            cell = model["cells"][place]
            rows[-1] += [_largest(cell) if cell["tried"] else "–", *cell["simulated_largest"]]
    return f"{table(head, rows)}\n\nSamples. {results['stages']} ranks, {results['environment']}."


def plots(results: Results) -> dict[str, str]:
    """Bytes of the fullest rank by category, and the largest batches."""
    found = {}
    for name, model in results["models"].items():
        panels: dict[str, dict[str, dict[str, float]]] = {}
        for cell in model["cells"]:
            counted = max((rank["counted"] for rank in cell["ranks"]), key=_sum)
            parts = {part.replace("_", " "): counted[part] / MIB for part in CATEGORIES if part in COUNTED}
            panels.setdefault(cell["form"] or "no recompute", {})[cell["method"]] = parts
        title = f"BERT {name}, batch {model['size']['batch']}: bytes of the fullest rank"
        found[f"{name}.svg"] = stacks(title, panels, unit="MiB")
    batches = {
        label_of(name, form): largest
        for name, model in results["models"].items()
        for form in _forms(model)
        if (largest := _batches(model, form))
    }
    if batches:
        title = "The largest batch that trains within the limit"
        found["batch.svg"] = bars(title, batches, unit="samples", digits=0)
    return found


def _forms(model: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["form"] for cell in model["cells"]))


def _batches(model: Mapping[str, Any], form: str) -> dict[str, float]:
    cells = [cell for cell in model["cells"] if cell["form"] == form and cell["tried"]]
    return {cell["method"]: _largest(cell) for cell in cells}


def missed(results: Results) -> list[str]:
    """Counts apart from the simulated ones, and a wpipe that saves nothing over 2bw."""
    lines = []
    for name, model in results["models"].items():
        for cell in model["cells"]:
            label = f"{name}, {label_of(cell['method'], cell['form'])}"
            for rank, ratio in enumerate(_ratios(cell)):
                if abs(ratio - 1) > TOLERANCE:
                    lines.append(f"{label}: rank {rank} holds {ratio:.3f} of the simulated bytes, not 1 ± {TOLERANCE}")
        for form in _forms(model):
            found = {cell["method"]: cell for cell in model["cells"] if cell["form"] == form}
            if {"wpipe", "2bw"} <= found.keys():
                wpipe, two_bw = (_weights(found[method]) for method in ("wpipe", "2bw"))
                if wpipe >= two_bw:
                    label = f"{name}, {label_of('wpipe', form)}"
                    lines.append(
                        f"{label}: {_mib(wpipe)} MiB of weights and versions, no less than 2bw's {_mib(two_bw)}"
                    )
    return lines


def _weights(cell: Mapping[str, Any]) -> int:
    """Weights and their versions, of all ranks."""
    return sum(int(rank["counted"]["weights"] + rank["counted"]["extra_versions"]) for rank in cell["ranks"])


def _ratios(cell: Mapping[str, Any]) -> list[float]:
    """Counted over simulated bytes of each rank; without messages, as a run has more of them than the simulator."""
    pairs = zip(cell["ranks"], cell["simulated"], strict=True)
    return [_sum(rank["counted"]) / _sum(simulated) for rank, simulated in pairs]


def _sum(nbytes: Mapping[str, float]) -> float:
    return sum(nbytes[name] for name in COUNTED)


def _largest(cell: Mapping[str, Any]) -> int:
    return max((samples for samples, fits in cell["tried"] if fits), default=0)


def label_of(method: str, form: str) -> str:
    return f"{method}, {form}" if form else method


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f}"
