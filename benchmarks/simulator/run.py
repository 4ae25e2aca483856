"""How long the simulator takes and what it holds, at 1,024 stages x 4,096 micro-batches and on the way there.

Every measurement is a process of its own on one core, through the command line as a user runs it. Repeats are
interleaved, so that a busy minute falls on all rows alike. Ends with 1 if a row is over its limit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.writing import environment, spread, write

SECONDS, GIB = 20.0, 2.0
METHODS = ("1f1b", "2bw", "wpipe")
FULL = ("--update", "0.5", "--input-bytes", "1", "--bandwidth", "8", "--latency", "0.1")
SIZES = ((256, 1024), (512, 1024), (512, 2048), (1024, 2048), (1024, 4096))  # twice the actions from one to the next
README = Path(__file__).parent / "README.md"


class Case(NamedTuple):
    method: str
    stages: int
    microbatches: int
    full: bool

    @property
    def arguments(self) -> list[str]:
        sizes = ["--stages", str(self.stages), "--microbatches", str(self.microbatches)]
        return ["simulate", self.method, *sizes, "--json", *(FULL if self.full else ())]


class Sample(NamedTuple):
    seconds: float
    gib: float
    steady: bool
    bubble: float


def cases() -> list[Case]:
    return [
        Case(method, stages, microbatches, full)
        for full in (False, True)
        for method in METHODS
        for stages, microbatches in (SIZES if not full else SIZES[-1:])
    ]


def measure(case: Case) -> Sample:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "weft", *case.arguments]
    with tempfile.TemporaryFile("w+") as output:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=output, env=os.environ | threads, preexec_fn=_one_core)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"{' '.join(command[1:])} ended with {child.returncode}")
        output.seek(0)
        figures = json.load(output)
    kilobytes = usage.ru_maxrss / (1024 if sys.platform == "darwin" else 1)
    return Sample(seconds, kilobytes / 2**20, figures["steady"], figures["bubble"])


def _one_core() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def table(samples: dict[Case, list[Sample]]) -> str:
    lines = [
        "| method | stages | micro-batches | costs | seconds, median (least to most) | GiB | steady bubble |",
        "| --- | ---: | ---: | --- | ---: | ---: | ---: |",
    ]
    for case, some in samples.items():
        bubble = f"{some[0].bubble:.4%}" if all(one.steady for one in some) else "not steady"
        lines.append(
            f"| `{case.method}` | {case.stages} | {case.microbatches} | {'full' if case.full else 'default'} "
            f"| {spread([one.seconds for one in some], 1)} "
            f"| {max(one.gib for one in some):.2f} | {bubble} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="write table and environment into README.md")
    arguments = parser.parse_args()
    samples: dict[Case, list[Sample]] = {case: [] for case in cases()}
    for repeat in range(arguments.repeats):
        for case in samples:
            samples[case].append(measure(case))
            print(f"repeat {repeat}: {' '.join(case.arguments)}: {samples[case][-1].seconds:.1f} s", file=sys.stderr)
    text = f"{table(samples)}\n\n{arguments.repeats} interleaved repeats on one core of {environment('numpy')}."
    print(text)
    if arguments.write:
        write(README, text)
    over = [
        case
        for case, some in samples.items()
        if statistics.median(one.seconds for one in some) > SECONDS
        or max(one.gib for one in some) > GIB
        or not all(one.steady for one in some)
    ]
    for case in over:
        print(f"over {SECONDS:g} s or {GIB:g} GiB, or not steady: weft {' '.join(case.arguments)}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
