"""How fast each method is, from the results of the throughput benchmark, for plots of the loss over time.

The rates become part of this benchmark's results, so that a plot never mixes two measurements unnoticed.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from benchmarks.convergence.studies import FEWEST
from benchmarks.harness import Results
from benchmarks.throughput.pages import ratios
from weft.schedule import METHODS

Rates = dict[str, dict[str, float]]  # model -> schedule -> of the limit


def read_rates(folder: Path | None) -> Rates:
    """The rates of the throughput benchmark whose folder is beside this one; empty if it has no results."""
    path = None if folder is None else folder.parent / "throughput" / "results.json"
    return rates(json.loads(path.read_text(encoding="utf-8"))) if path is not None and path.is_file() else {}


def rates(throughput: Results) -> Rates:
    """The share of the limit of each weft schedule with as few micro-batches as here, by model.

    What synchronous training learns does not depend on the micro-batches: 1f1b stands for the fastest of all
    synchronous schedules and sizes.
    """
    found: Rates = {}
    for model, sizes in throughput["models"].items():
        reached = {
            size: {
                name.removeprefix("weft "): statistics.median(values)
                for name, values in ratios(case).items()
                if name.startswith("weft ")
            }
            for size, case in sizes.items()
        }
        few = {name: rate for name, rate in reached.get(str(FEWEST), {}).items() if _asynchronous(name)}
        best = [rate for by_name in reached.values() for name, rate in by_name.items() if not _asynchronous(name)]
        found[model] = few | ({"1f1b": max(best)} if best else {})
    return found


def _asynchronous(name: str) -> bool:
    return METHODS[name.split()[0]].asynchronous
