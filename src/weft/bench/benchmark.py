"""What a benchmark is, and which there are. Imports no torch: a list of them is there at once."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Protocol, cast

from weft.bench.kept import Keep
from weft.errors import WeftError

Results = Mapping[str, Any]  # what was measured, as plain JSON
HOME = Path(__file__).parents[1]  # of weft's sources


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
        about="two real ranks beside torch.distributed.pipelining, DDP, FSDP2 and DeepSpeed", takes="40 minutes"
    ),
    "many-stages": Benchmark(
        about="paced layers on 4 and 8 real ranks, over the simulated throughput", takes="13 minutes"
    ),
    "slow-link": Benchmark(
        about="two hosts in network namespaces, 1 Gbit/s and 100 Mbit/s; needs root", takes="8 minutes"
    ),
    "memory": Benchmark(about="bytes a rank holds, counted, resident and simulated; largest batch", takes="20 minutes"),
    "paper-scale": Benchmark(about="the papers' models and devices, simulated", takes="2 minutes"),
    "convergence": Benchmark(about="what staleness and prediction do to accuracy, on real data", takes="an hour"),
}


READING = ("cli.py", "draw/*", "bench/*/pages.py", "bench/*/report.py", "bench/*/verdicts.py")  # they measure nothing


def module_of(name: str) -> Module:
    """The module of a benchmark of the catalog."""
    if name not in BENCHMARKS:
        raise WeftError(f"no benchmark is called {name}; there are {', '.join(BENCHMARKS)}")
    return cast(Module, importlib.import_module(_module(name)))


def digest(home: Path = HOME) -> str:
    """Of all sources but those that only read results: parts of one form are never put together with another's."""
    whole = hashlib.sha256()
    for source in sorted(home.rglob("*.py")):
        name = source.relative_to(home).as_posix()
        if not any(fnmatchcase(name, pattern) for pattern in READING):
            whole.update(f"{name}\0".encode() + source.read_bytes() + b"\0")
    return whole.hexdigest()[:16]


def _module(name: str) -> str:
    return f"weft.bench.{name.replace('-', '_')}"
