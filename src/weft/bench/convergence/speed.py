"""How fast each method is, as the throughput benchmark has measured it on two ranks: loss over time needs that.

The rates are copied into the results of this benchmark, so that a picture never mixes two measurements unseen.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from weft.bench.benchmark import Results
from weft.bench.convergence.studies import FEWEST
from weft.bench.throughput.pages import ratios
from weft.schedule import METHODS

Rates = dict[str, dict[str, float]]  # model -> schedule -> of the limit


def rates_beside(folder: Path | None) -> Rates:
    """Of the throughput benchmark whose folder is beside this one; none if it is not there."""
    path = None if folder is None else folder.parent / "throughput" / "results.json"
    return rates(json.loads(path.read_text(encoding="utf-8"))) if path is not None and path.is_file() else {}


def rates(throughput: Results) -> Rates:
    """What each of weft's schedules reaches of the limit with as few micro-batches as here, by model.

    What synchronous training learns does not depend on the micro-batches: under the name of its schedule, 1f1b, it has
    the best of all its schedules and sizes.
    """
    found: Rates = {}
    for model, sizes in throughput["models"].items():
        reached = {
            size: {
                name.removeprefix("weft "): statistics.median(some)
                for name, some in ratios(one).items()
                if name.startswith("weft ")
            }
            for size, one in sizes.items()
        }
        few = {name: rate for name, rate in reached.get(str(FEWEST), {}).items() if _asynchronous(name)}
        best = [rate for some in reached.values() for name, rate in some.items() if not _asynchronous(name)]
        found[model] = few | ({"1f1b": max(best)} if best else {})
    return found


def _asynchronous(name: str) -> bool:
    return METHODS[name.split()[0]].asynchronous
