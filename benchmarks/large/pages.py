"""Tables, plots and targets of large models."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.harness import Results
from benchmarks.rendering import bars, table

MIB = 2**20
MOMENTS = ("start", "training", "save", "load", "export")
COUNTED = ("weights", "masters", "extra_versions", "gradients", "optimizer", "activations")
MOST = 1.15  # of the counted bytes, at every moment
TORCH = "torch 1F1B"


def tables(results: Results) -> dict[str, str]:
    """A table for each model and number of ranks, and that of the largest models."""
    found = {_name(model): _moments_table(model) for model in results["models"]}
    if results["headline"]:
        found["headline"] = _headline_table(results)
    return found


def _name(model: Mapping[str, Any]) -> str:
    return f"{model['name']}-{model['ranks']}"


def _moments_table(model: Mapping[str, Any]) -> str:
    head = ["", *MOMENTS, "counted", "peak / counted", "seconds an update"]
    rows: list[list[object]] = []
    for cell in model["cells"]:
        fullest = max(cell["ranks"], key=peak)
        ratio = f"{worst_ratio(cell):.2f}" if fullest["counted"] else "–"
        counted = _mib(_sum(fullest["counted"])) if fullest["counted"] else "–"
        peaks = [_mib(fullest["peaks"][moment]) if moment in fullest["peaks"] else "–" for moment in MOMENTS]
        seconds = f"{fullest['seconds']['training'] / 4:.1f}"
        rows.append([label_of(cell["contestant"], cell["options"]), *peaks, counted, ratio, seconds])
    return table(head, rows)


def _headline_table(results: Results) -> str:
    headline = results["headline"]
    rows = []
    for name, found in (*headline["contestants"].items(), ("one rank alone", headline["alone"])):
        fitting = [trial["peak"] for layers, trial in found["trials"] if layers == found["layers"]]
        rows.append(
            [name, found["layers"], f"{found['parameters'] / 1e6:,.0f} M", _mib(fitting[0]) if fitting else "–"]
        )
    text = table(["", "layers", "parameters", "fullest rank, MiB"], rows)
    limit = f"{headline['ranks']} ranks of {headline['limit'] // MIB:,} MiB"
    return f"{text}\n\n{limit}, width {headline['size']['width']:,}. {results['environment']}."


def plots(results: Results) -> dict[str, str]:
    """The peak of the fullest rank, for each model; and the largest models."""
    found = {}
    for model in results["models"]:
        parts = {label_of(cell["contestant"], cell["options"]): _peak(cell) / MIB for cell in model["cells"]}
        title = f"{model['name']} on {model['ranks']} ranks: peak of the fullest rank beyond an empty process"
        found[f"{_name(model)}.svg"] = bars(title, {"": parts}, unit="MiB", digits=0)
    if results["headline"]:
        sizes = {name: cell["parameters"] / 1e6 for name, cell in results["headline"]["contestants"].items()}
        sizes["one rank alone"] = results["headline"]["alone"]["parameters"] / 1e6
        found["headline.svg"] = bars("The largest GPT that trains", {"": sizes}, unit="million parameters", digits=0)
    return found


def missed(results: Results) -> list[str]:
    """Resident sets far above what is counted, and anything that PyTorch's own ways do better."""
    lines = []
    for model in results["models"]:
        cells = {label_of(cell["contestant"], cell["options"]): cell for cell in model["cells"]}
        for label, cell in cells.items():
            if cell["ranks"][0]["counted"] and (ratio := worst_ratio(cell)) > MOST:
                lines.append(f"{_name(model)}, {label}: the peak is {ratio:.2f} of what is counted, not {MOST}")
        if {"1f1b", TORCH} <= cells.keys() and _peak(cells["1f1b"]) > _peak(cells[TORCH]):
            lines.append(
                f"{_name(model)}: 1f1b has {_mib(_peak(cells['1f1b']))} MiB, {TORCH} {_mib(_peak(cells[TORCH]))}"
            )
    return [*lines, *(_missed_headline(results["headline"]) if results["headline"] else ())]


def _missed_headline(headline: Mapping[str, Any]) -> Iterable[str]:
    layers = {name: found["layers"] for name, found in headline["contestants"].items()}
    for other in (TORCH, "FSDP2"):
        if layers["1f1b"] < layers[other]:
            yield f"headline: 1f1b trains {layers['1f1b']} layers, {other} {layers[other]}"


def peak(rank: Mapping[str, Any]) -> int:
    """The largest resident set of a rank in any moment."""
    return int(max(rank["peaks"].values()))


def worst_ratio(cell: Mapping[str, Any]) -> float:
    """Resident over counted bytes, of the rank where it is largest."""
    return max(peak(rank) / _sum(rank["counted"]) for rank in cell["ranks"])


def _peak(cell: Mapping[str, Any]) -> int:
    return max(peak(rank) for rank in cell["ranks"])


def _sum(nbytes: Mapping[str, int]) -> int:
    return sum(nbytes.get(name, 0) for name in COUNTED)


def label_of(contestant: str, options: Mapping[str, str]) -> str:
    extras = [
        *([options["precision"]] if "precision" in options else []),
        *(["layer recompute"] * ("recompute" in options)),
    ]
    return ", ".join([contestant, *extras])


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.0f}"
