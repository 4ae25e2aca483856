"""What a benchmark is, and which there are. Imports no torch: a list of them is there at once."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from weft.bench.kept import Keep
from weft.errors import WeftError

Results = Mapping[str, Any]  # what was measured, as plain JSON


class Module(Protocol):
    """What the module of a benchmark has."""

    def measure(self, *, quick: bool, keep: Keep) -> dict[str, Any]:
        """What is measured, as plain JSON; every part of it that took long is kept by `keep`."""

    def tables(self, results: Results) -> dict[str, str]:
        """Markdown by the name of its mark."""

    def plots(self, results: Results) -> dict[str, str]:
        """Pictures by the name of their file, which ends in .svg."""

    def missed(self, results: Results) -> list[str]:
        """Every target that was missed and every spread that is too wide, a line each."""


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """One of the catalog: what it is about, and how long its whole form takes."""

    about: str
    takes: str


BENCHMARKS = {
    "throughput": Benchmark(
        about="two real ranks beside torch.distributed.pipelining, DDP, FSDP2 and DeepSpeed", takes="half an hour"
    ),
    "many-stages": Benchmark(
        about="paced layers on 4 and 8 real ranks, over the simulated throughput", takes="7 minutes"
    ),
    "slow-link": Benchmark(
        about="two hosts in network namespaces, 1 Gbit/s and 100 Mbit/s; needs root", takes="5 minutes"
    ),
    "memory": Benchmark(about="bytes a rank holds, counted, resident and simulated; largest batch", takes="15 minutes"),
    "paper-scale": Benchmark(about="the papers' models and devices, simulated", takes="2 minutes"),
    "convergence": Benchmark(about="what staleness and prediction do to accuracy, on real data", takes="an hour"),
}


SHARED = ("contender", "layers", "paced", "peers", "schedules")  # modules that several benchmarks measure with
READING = ("pages.py", "report.py", "verdicts.py")  # files that measure nothing


def module_of(name: str) -> Module:
    """The module of a benchmark of the catalog."""
    if name not in BENCHMARKS:
        raise WeftError(f"no benchmark is called {name}; there are {', '.join(BENCHMARKS)}")
    return cast(Module, importlib.import_module(_module(name)))


def digest(name: str) -> str:
    """Of all sources that measure, so that parts of one form are never put together with those of another."""
    here = Path(__file__).parent
    home = here / _module(name).rpartition(".")[2]
    sources = sorted(home.glob("*.py")) if home.is_dir() else [home.with_suffix(".py")]
    sources = [source for source in sources if source.name not in READING]
    sources += [here / f"{shared}.py" for shared in SHARED]
    return hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def _module(name: str) -> str:
    return f"weft.bench.{name.replace('-', '_')}"
