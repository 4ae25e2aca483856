"""Run `weft simulate` on growing schedules; note seconds, memory and the steady bubble."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from typing import Any, NamedTuple

from benchmarks.harness import ResumeCache
from weft.errors import RunError

REPEATS = 3
METHODS = ("1f1b", "2bw", "wpipe")
FULL = ("--update", "0.5", "--input-bytes", "1", "--bandwidth", "8", "--latency", "0.1")
SIZES = ((256, 1024), (512, 1024), (512, 2048), (1024, 2048), (1024, 4096))  # each doubles the actions
QUICK_SIZES = ((8, 32), (16, 32))


class Case(NamedTuple):
    """A schedule and its costs."""

    method: str
    stages: int
    microbatches: int
    costs: str  # default or full

    @property
    def arguments(self) -> list[str]:
        sizes = ["--stages", str(self.stages), "--microbatches", str(self.microbatches)]
        return ["simulate", self.method, *sizes, "--json", *(FULL if self.costs == "full" else ())]


def measure(*, quick: bool, cache: ResumeCache) -> dict[str, Any]:
    """Seconds and GiB of each case in each repeat, and its steady bubble."""
    repeats = 1 if quick else REPEATS
    cases = _cases(QUICK_SIZES if quick else SIZES)
    rounds = [
        [cache(f"repeat {repeat + 1}: weft {' '.join(case.arguments)}", partial(_sample, case)) for case in cases]
        for repeat in range(repeats)
    ]
    return {
        "repeats": repeats,
        "cases": [
            case._asdict()
            | {
                "seconds": [sample["seconds"] for sample in samples],
                "gib": [sample["gib"] for sample in samples],
                "steady": all(sample["steady"] for sample in samples),
                "bubble": samples[0]["bubble"],
            }
            for case, samples in zip(cases, zip(*rounds, strict=True), strict=True)
        ],
    }


def _cases(sizes: tuple[tuple[int, int], ...]) -> list[Case]:
    return [
        Case(method, stages, microbatches, costs)
        for costs, chosen in (("default", sizes), ("full", sizes[-1:]))
        for method in METHODS
        for stages, microbatches in chosen
    ]


def _sample(case: Case) -> dict[str, Any]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "weft", *case.arguments]
    with tempfile.TemporaryFile("w+") as output:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=output, env=os.environ | threads, preexec_fn=_use_one_core)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise RunError(f"{' '.join(command[1:])} failed with exit code {child.returncode}")
        output.seek(0)
        figures = json.load(output)
    kilobytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return {
        "seconds": seconds,
        "gib": kilobytes / 2**20,
        "steady": figures["steady"],
        "bubble": figures["bubble"],
    }


def _use_one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
