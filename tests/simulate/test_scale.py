"""1,024 stages x 4,096 micro-batches: exact figures within a limit of memory, and linear work.

Time is measured in benchmarks/simulator and not asserted here, because a busy machine would fail the test.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from weft import WeftError
from weft.schedule import schedule, verify
from weft.simulate import Cost, Link, simulate, timeline

P, M = 1024, 4096
GIB = 2**30

CHILD = """
import json, pathlib, re, resource, sys
from weft.schedule import schedule
from weft.simulate import simulate
figures = simulate(schedule(sys.argv[1], stages=int(sys.argv[2]), microbatches=int(sys.argv[3]))).as_dict()
figures["peak"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
status = pathlib.Path("/proc/self/status")
if status.exists():  # the figure of getrusage includes the parent process
    figures["peak"] = int(re.search("VmHWM: *\\\\s*([0-9]+)", status.read_text())[1]) * 1024
json.dump(figures, sys.stdout)
"""


def figures(name: str, stages: int, microbatches: int) -> dict[str, Any]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    child = subprocess.run(
        [sys.executable, "-c", CHILD, name, str(stages), str(microbatches)],
        env=os.environ | threads, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert child.returncode == 0, child.stderr
    found: dict[str, Any] = json.loads(child.stdout)
    return found


@pytest.mark.parametrize(
    ("name", "part"), [("1f1b", 4), ("2bw", 4), ("wpipe", 4), pytest.param("wpipe", 1, marks=pytest.mark.slow)]
)
def test_the_steady_state_of_a_thousand_stages(name: str, part: int) -> None:
    """At a quarter of the stages and micro-batches, in a sixteenth of the memory; and at full size for wpipe, whose two
    chunks per rank need most memory."""
    p, m = P // part, M // part
    found = figures(name, p, m)
    assert found["steady"] is True
    assert found["peak"] <= 2 * GIB / part**2
    flush = p - 1 if name == "1f1b" else 0
    assert found["period"] == 3 * (m + flush)
    assert found["bubble"] == pytest.approx(flush / (m + flush), abs=1e-12)
    assert found["fill"] == {"1f1b": 0, "2bw": 3 * (p - 1), "wpipe": 1.5 * (p - 1)}[name]
    assert found["versions"] == {"1f1b": [1] * p, "2bw": [2] * p, "wpipe": [2] * p + [1] * p}[name]
    assert found["delay"] == {"1f1b": [0] * p, "2bw": [1] * p, "wpipe": [1] * p + [0] * p}[name]
    assert found["in_flight"] == [(2 * p - r) / 2 if name == "wpipe" else p - r for r in range(p)]
    assert found["messages_per_microbatch"] == 2 * ((2 if name == "wpipe" else 1) * p - 1)
    assert found["memory"][0]["activations"] == p


class ReadCounter:
    """Counts the entries of `arrival` that the executor reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        outer = self
        executor = importlib.import_module("weft.simulate.executor")

        class Counting(np.ndarray[Any, np.dtype[np.float64]]):
            def __getitem__(self, key: Any) -> Any:
                outer.count += np.size(key) if isinstance(key, np.ndarray) else 0
                return np.asarray(self)[key]

        plain = executor.Executor.__init__

        def counting(self: Any, *arguments: Any) -> None:
            plain(self, *arguments)
            self.arrival = self.arrival.view(Counting)

        monkeypatch.setattr(executor.Executor, "__init__", counting)


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe", "interleaved", "zb-h1"])
@pytest.mark.parametrize("latency", [0.0, 0.3])
def test_work_is_linear_in_the_actions(name: str, latency: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of reads per action stays about the same."""
    reads = ReadCounter(monkeypatch)

    def reads_per_action(stages: int, microbatches: int) -> float:
        reads.count = 0
        pipe = schedule(name, stages=stages, microbatches=microbatches)
        found = simulate(pipe, Cost.uniform(pipe, link=Link(latency=latency)))
        assert found.steady
        return reads.count / (pipe.chunks * microbatches)

    start = reads_per_action(8, 32)
    for stages, microbatches in ((8, 128), (16, 64), (32, 64)):
        assert reads_per_action(stages, microbatches) < 1.6 * start, (stages, microbatches)


@pytest.mark.parametrize("stages", [32, 96])
def test_many_ranks_and_short_cycles_are_linear_too(stages: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one micro-batch, a cycle has three rows; the bookkeeping must not make ranks wait."""
    reads = ReadCounter(monkeypatch)
    window = timeline(schedule("pipedream", stages=stages, microbatches=1), minibatches=2 * stages)
    assert reads.count < 4 * len(window.blocks)


@pytest.mark.parametrize(
    ("doing", "call"),
    [
        ("simulating", lambda: simulate(schedule("pipedream", stages=5_200, microbatches=1))),
        ("checking", lambda: verify(schedule("pipedream", stages=900, microbatches=1))),
        ("keeping every block", lambda: timeline(schedule("1f1b", stages=64, microbatches=64), minibatches=10**9)),
    ],
)
def test_work_that_would_take_too_long_is_refused(doing: str, call: Callable[[], object]) -> None:
    with pytest.raises(WeftError, match=rf"^{doing}.* takes \d+ actions, but the limit is \d+.*; use fewer"):
        call()


def test_a_short_window_keeps_no_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The makespan of a window needs no blocks, which would be gigabytes at full size."""
    simulation = importlib.import_module("weft.simulate.simulation")

    def refuse(**_: object) -> None:
        raise AssertionError("a block was kept")

    monkeypatch.setattr(simulation, "Block", refuse)
    pipe = schedule("wpipe", stages=4, microbatches=8)
    assert simulate(pipe, minibatches=1).makespan == 3 * 8 + 1.5 * 3
