"""Which benchmarks exist, and where their code and results are. Imports no torch: the list appears at once."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import weft
from benchmarks.harness.resume_cache import ResumeCache
from weft.errors import WeftError
from weft.text import did_you_mean

Results = Mapping[str, Any]  # what was measured, as plain JSON
HOME = Path(__file__).parents[1]
SOURCES = {"weft": Path(weft.__file__).parent, "benchmarks": HOME}
RENDERING = (  # sources that only read results
    "weft/cli.py",
    "weft/draw/*",
    "benchmarks/rendering/*",
    "benchmarks/*/pages.py",
    "benchmarks/*/verdicts.py",
)


@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """A package with the modules `measure` and `pages`, which are imported when they are needed."""

    name: str
    about: str
    takes: str

    @property
    def package(self) -> str:
        """The name of its folder, as Python spells it."""
        return self.name.replace("-", "_")

    @property
    def folder(self) -> Path:
        """Where its README and results are."""
        return HOME / self.package

    def measure(self, *, quick: bool, cache: ResumeCache) -> dict[str, Any]:
        """Plain JSON; every part that takes long is made by `cache`."""
        found: dict[str, Any] = self._module("measure").measure(quick=quick, cache=cache)
        return found

    def tables(self, results: Results) -> dict[str, str]:
        """Markdown by the name of the table's mark."""
        found: dict[str, str] = self._module("pages").tables(results)
        return found

    def plots(self, results: Results) -> dict[str, str]:
        """SVG by the name of the file, which ends in .svg."""
        found: dict[str, str] = self._module("pages").plots(results)
        return found

    def missed(self, results: Results) -> list[str]:
        """A line for each missed target and each spread that is too wide."""
        found: list[str] = self._module("pages").missed(results)
        return found

    def _module(self, module: str) -> Any:
        return importlib.import_module(f"benchmarks.{self.package}.{module}")


BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        Benchmark(
            name="throughput",
            about="two real ranks beside torch.distributed.pipelining, DDP, FSDP2 and DeepSpeed",
            takes="40 minutes",
        ),
        Benchmark(
            name="many-stages",
            about="paced layers on 4 and 8 real ranks, over the simulated throughput",
            takes="13 minutes",
        ),
        Benchmark(
            name="slow-link",
            about="two hosts in network namespaces, 1 Gbit/s and 100 Mbit/s; needs root",
            takes="8 minutes",
        ),
        Benchmark(
            name="weave",
            about="weave on 2, 4 and 8 real ranks: layers that sleep, slow links, models, bytes of activations",
            takes="15 minutes",
        ),
        Benchmark(
            name="memory",
            about="bytes a rank holds, counted, resident and simulated; largest batch",
            takes="20 minutes",
        ),
        Benchmark(
            name="large",
            about="resident sets beside torch.distributed.pipelining and FSDP2; the largest GPT on 8 ranks of 2 GiB",
            takes="two hours",
        ),
        Benchmark(name="paper-scale", about="the papers' models and devices, simulated", takes="2 minutes"),
        Benchmark(
            name="convergence", about="what late weights do to accuracy, and what corrects it", takes="25 core-hours"
        ),
        Benchmark(
            name="wall-clock",
            about="what a language model learns in 20 minutes on two real ranks, by schedule",
            takes="90 minutes a seed",
        ),
        Benchmark(
            name="prediction", about="what weight prediction does to learning, and what it costs", takes="30 minutes"
        ),
        Benchmark(
            name="engine", about="what an action costs beyond its kernels, by part, now and before", takes="10 minutes"
        ),
        Benchmark(name="simulator", about="seconds and memory of the simulator at 1,024 stages", takes="5 minutes"),
        Benchmark(name="startup", about="seconds of import weft and weft draw", takes="20 seconds"),
    )
}


def benchmark_named(name: str) -> Benchmark:
    """A benchmark of the catalog; WeftError if there is none of this name."""
    if name not in BENCHMARKS:
        hint = did_you_mean(name, BENCHMARKS) or f"; choose one of {', '.join(BENCHMARKS)}"
        raise WeftError(f"there is no benchmark {name!r}{hint}")
    return BENCHMARKS[name]


def sources_digest(sources: Mapping[str, Path] = SOURCES) -> str:
    """Of all sources but those that only read results: parts of two versions never end up in one result."""
    whole = hashlib.sha256()
    for package, home in sources.items():
        for source in sorted(home.rglob("*.py")):
            name = f"{package}/{source.relative_to(home).as_posix()}"
            if not any(fnmatchcase(name, pattern) for pattern in RENDERING):
                whole.update(f"{name}\0".encode() + source.read_bytes() + b"\0")
    return whole.hexdigest()[:16]
