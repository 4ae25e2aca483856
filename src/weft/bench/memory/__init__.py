"""Bytes that the ranks of a BERT hold: counted by category, resident and simulated; and the largest batch."""

from __future__ import annotations

import platform
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.bench.benchmark import Results
from weft.bench.kept import Keep
from weft.bench.memory.bert import BASE, METHODS, MIB, SMALL, TINY, Size, linear
from weft.bench.memory.search import Known, Search, largest_of
from weft.bench.memory.trial import too_large
from weft.bench.writing import table
from weft.draw.plots import bars, stacks
from weft.errors import RunError, WeftError

if TYPE_CHECKING:
    from weft.simulate import RankMemory

QUICK = ("1f1b", "2bw", "wpipe")
MEASURED = {"small": SMALL, "base": BASE}
HELD = ("weights", "extra_versions", "gradients", "optimizer", "activations")  # whose sum is compared
CLOSE = 0.05  # of the simulated bytes
STARTING = 600.0  # seconds for all ranks to start
MOST = 4096  # samples, beyond which no search of a simulated batch goes


def measure(*, quick: bool, keep: Keep) -> dict[str, Any]:
    """Every method with and without recompute, on real ranks; the simulator's view of the same."""
    if (found := platform.libc_ver()[0]) != "glibc" or sys.platform != "linux":
        raise WeftError(f"this benchmark needs Linux with glibc (here: {sys.platform}, {found or 'another libc'})")
    if quick:
        return {"stages": 2, "microbatches": 2, "models": {"tiny": _quick(2)}}
    models = {name: _whole(name, size, 4, keep) for name, size in MEASURED.items()}
    return {"stages": 4, "microbatches": 4, "models": models}


def _whole(name: str, size: Size, stages: int, keep: Keep) -> dict[str, Any]:
    alone = {}
    for count in (stages, 2 * stages):
        alone[count] = keep(f"{name}: {count} chunks alone", partial(_alone, size, count))
    cells = []
    for method, recompute in product(METHODS, (False, True)):
        ran = keep(f"{name}: {_label(method, recompute)}", partial(_ran, size, method, recompute, stages))
        cells.append(ran | _simulated(size, alone[_chunks(method, stages)], method, recompute, stages))
    return {"size": asdict(size), "cells": cells}


def _quick(stages: int) -> dict[str, Any]:
    """A tiny model, one start of the ranks for all methods, no search."""
    import weft
    from weft.bench.memory.held import rank_cells

    counts = (stages, 2 * stages)  # chunks
    ranks = weft.launch(rank_cells, TINY, QUICK, stages, counts, ranks=stages, timeout=STARTING)
    alone = {count: ranks[place % stages][1][place // stages] for place, count in enumerate(counts)}
    cells = []
    for place, method in enumerate(QUICK):
        cell = {"method": method, "recompute": False, "ranks": [held[place] for held, _ in ranks], "tried": []}
        cells.append(cell | _simulated(TINY, alone[_chunks(method, stages)], method, False, stages))
    return {"size": asdict(TINY), "cells": cells}


def _chunks(method: str, stages: int) -> int:
    from weft.schedule import schedule

    return schedule(method, stages=stages, microbatches=stages).chunks


def _alone(size: Size, chunks: int) -> list[dict[str, Any]]:
    from weft.bench.memory.alone import chunk_bytes

    return chunk_bytes(size, chunks)


def _ran(size: Size, method: str, recompute: bool, stages: int) -> dict[str, Any]:
    """What the ranks say; a batch that does not fit ends them, and the search goes on in new ones."""
    held: list[Any] = []
    search = Search(step=stages)
    while not held or ((method, recompute) in size.tried and search.next() is not None):
        now, search.known = _go_on(size, method, recompute, stages, search.known)
        held = held or now
    tried = sorted([samples, fits] for samples, fits in search.known.items())
    return {"method": method, "recompute": recompute, "ranks": held, "tried": tried}


def _go_on(size: Size, method: str, recompute: bool, stages: int, known: Known) -> tuple[list[Any], Known]:
    """What each rank holds (nothing if batches are known already), and what is known now."""
    import weft
    from weft.bench.memory.held import rank_memory

    with tempfile.TemporaryDirectory() as folder:
        job = (size, method, recompute, stages, known, folder)
        try:
            ranks = weft.launch(rank_memory, *job, ranks=stages, timeout=STARTING)
        except RunError:
            found = too_large(Path(folder))
            if found is None:
                raise
            return found["held"], dict(found["known"]) | {found["trying"]: False}
    return [one for one, _ in ranks], ranks[0][1]


def _simulated(size: Size, alone: list[dict[str, Any]], method: str, recompute: bool, stages: int) -> dict[str, Any]:
    """Bytes of every rank for the batch that was run, and the largest batches whose bytes are within the limits."""

    def fits(samples: int, *, limit: int) -> bool:
        return samples <= MOST and max(one.total for one in _memory(alone, method, recompute, stages, samples)) <= limit

    ran = _memory(alone, method, recompute, stages, size.batch)
    return {
        "simulated": [one.apart_from_messages for one in ran],  # as the engine's meters count
        "simulated_largest": [largest_of(partial(fits, limit=limit), step=stages) for limit in size.limits],
    }


def _memory(
    alone: list[dict[str, Any]], method: str, recompute: bool, stages: int, samples: int
) -> tuple[RankMemory, ...]:
    from weft.schedule import schedule
    from weft.simulate import ChunkCost, Cost, simulate

    each = samples / stages
    chunks = tuple(
        ChunkCost(
            activation_bytes=linear(one["activations"], each),
            input_bytes=linear(one["input"], each),
            weight_bytes=one["weights"],
            gradient_bytes=one["gradients"],
            optimizer_bytes=one["optimizer"],
            recompute=recompute,
        )
        for one in alone
    )
    return simulate(schedule(method, stages=stages, microbatches=stages), Cost(chunks=chunks)).memory


# Pages


def tables(results: Results) -> dict[str, str]:
    """One of bytes for each model, and one of the largest batches."""
    made = {name: _bytes_table(model) for name, model in results["models"].items()}
    if any(cell["tried"] for model in results["models"].values() for cell in model["cells"]):
        made["batch"] = _batch_table(results)
    return made


def _bytes_table(model: Mapping[str, Any]) -> str:
    head = ["method", "weights", "of them extra", "gradients", "optimizer", "activations", "counted", "buffers"]
    head += ["resident", "counted / simulated"]
    rows = []
    for cell in model["cells"]:
        fullest = max(cell["ranks"], key=lambda one: _sum(one["counted"]))
        counted = fullest["counted"]
        columns = [counted["weights"] + counted["extra_versions"], counted["extra_versions"]]
        columns += [counted[name] for name in HELD[2:]]
        columns += [_sum(counted), counted["buffers"], fullest["resident"]]
        ratios = _ratios(cell)
        told = f"{min(ratios):.3f} to {max(ratios):.3f}"
        rows.append([_label(cell["method"], cell["recompute"]), *map(_mib, columns), told])
    return table(head, rows)


def _batch_table(results: Results) -> str:
    models = results["models"]
    head = ["method"]
    for name, model in models.items():
        size = model["size"]
        head += [f"{name}, tried at {size['limit'] // MIB} MiB"]
        head += [f"simulated at {limit // MIB}" for limit in size["limits"]]
    labels = [_label(cell["method"], cell["recompute"]) for cell in next(iter(models.values()))["cells"]]
    rows: list[list[object]] = []
    for place, label in enumerate(labels):
        rows.append([label])
        for model in models.values():
            cell = model["cells"][place]
            rows[-1] += [_largest(cell) if cell["tried"] else "–", *cell["simulated_largest"]]
    return f"{table(head, rows)}\n\nSamples. {results['stages']} ranks, {results['environment']}."


def plots(results: Results) -> dict[str, str]:
    """Bytes of the fullest rank by category, and the largest batches."""
    pictures = {}
    for name, model in results["models"].items():
        panels: dict[str, dict[str, dict[str, float]]] = {}
        for cell in model["cells"]:
            counted = max((one["counted"] for one in cell["ranks"]), key=_sum)
            parts = {part.replace("_", " "): counted[part] / MIB for part in HELD}
            panels.setdefault("recompute" if cell["recompute"] else "no recompute", {})[cell["method"]] = parts
        title = f"BERT {name}, batch {model['size']['batch']}: bytes of the fullest rank"
        pictures[f"{name}.svg"] = stacks(title, panels, unit="MiB")
    batches = {
        f"{name}{', recompute' if recompute else ''}": found
        for name, model in results["models"].items()
        for recompute in (False, True)
        if (found := _batches(model, recompute=recompute))
    }
    if batches:
        pictures["batch.svg"] = bars("The largest batch that trains within the limit", batches, unit="samples")
    return pictures


def _batches(model: Mapping[str, Any], *, recompute: bool) -> dict[str, float]:
    cells = [cell for cell in model["cells"] if cell["recompute"] == recompute and cell["tried"]]
    return {cell["method"]: _largest(cell) for cell in cells}


def missed(results: Results) -> list[str]:
    """Counts that are not the simulated ones, and a wpipe that saves nothing over 2bw."""
    lines = []
    for name, model in results["models"].items():
        for cell in model["cells"]:
            label = f"{name}, {_label(cell['method'], cell['recompute'])}"
            for rank, ratio in enumerate(_ratios(cell)):
                if abs(ratio - 1) > CLOSE:
                    lines.append(f"{label}: rank {rank} holds {ratio:.3f} of the simulated bytes, not 1 ± {CLOSE}")
        for recompute in (False, True):
            found = {cell["method"]: cell for cell in model["cells"] if cell["recompute"] == recompute}
            if {"wpipe", "2bw"} <= found.keys():
                ours, theirs = (_weights(found[method]) for method in ("wpipe", "2bw"))
                if ours >= theirs:
                    label = f"{name}, {_label('wpipe', recompute)}"
                    lines.append(
                        f"{label}: {_mib(ours)} MiB of weights and versions, no less than 2bw's {_mib(theirs)}"
                    )
    return lines


def _weights(cell: Mapping[str, Any]) -> int:
    """Weights and their versions, of all ranks."""
    return sum(int(one["counted"]["weights"] + one["counted"]["extra_versions"]) for one in cell["ranks"])


def _ratios(cell: Mapping[str, Any]) -> list[float]:
    """Counted over simulated, by rank; without messages, of which there are more in a run than the simulator knows."""
    return [_sum(one["counted"]) / _sum(other) for one, other in zip(cell["ranks"], cell["simulated"], strict=True)]


def _sum(held: Mapping[str, float]) -> float:
    return sum(held[name] for name in HELD)


def _largest(cell: Mapping[str, Any]) -> int:
    return max((samples for samples, fits in cell["tried"] if fits), default=0)


def _label(method: str, recompute: bool) -> str:
    return f"{method}, recompute" if recompute else method


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:.1f}"
