"""Times of a device are those of its events, whatever the host's clock says; they are read late, and never waited for.

With a fake clock a matrix product takes 3 ms, an update 5 ms, and everything else no time. A chunk has two layers. So a
forward takes 6 ms and a backward 12 ms; the backward of the first layer computes no gradient of its input, which makes
9 ms. Virtual ranks take turns on one stream: while one computes, the others wait.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.pretend.processes import in_process
from tests.helpers.waits import counting_waits
from torch import Tensor, nn

import weft
from weft.errors import RunError
from weft.runtime.device import profiling
from weft.runtime.engine import device_meter, meters
from weft.schedule import Op
from weft.text import format_bytes

WIDTH = 8
TIMES = {"mm": 3.0, "_foreach_add_.List": 5.0}  # milliseconds
FORWARD, FIRST_BACKWARD, BACKWARD, UPDATE = 6.0, 9.0, 12.0, 5.0


def pipeline(schedule: str = "gpipe", *, stages: int = 2, **options: Any) -> weft.Pipeline:
    torch.manual_seed(0)
    return weft.Pipeline(
        nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2 * stages))),
        loss_fn=lambda output, target: (output * target).mean(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1, foreach=True),
        schedule=schedule,
        microbatches=2,
        stages=stages,
        device="pretend:0",
        **options,
    )


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(4, WIDTH), torch.ones(4, WIDTH)


@contextmanager
def fake_clock() -> Iterator[None]:
    """The device's clock goes as above. Each of the two ranks asks for the host's time once, when it is built."""
    pretend.load().set_clock(lambda op, device, stream: TIMES.get(op.removeprefix("aten::"), 0.0))
    with (
        mock.patch.object(meters, "monotonic_ns", side_effect=AssertionError("the host's clock")),
        mock.patch.object(device_meter, "monotonic_ns", side_effect=[0, 0]),
    ):
        yield


def times(pipe: weft.Pipeline) -> list[tuple[float, ...]]:
    """Busy, updating and waiting milliseconds of each rank."""
    return [tuple(round(1e3 * rank[name], 6) for name in ("busy", "updating", "waiting")) for rank in pipe.meters()]


@in_process
def test_figures_are_those_of_the_clock() -> None:
    with fake_clock(), pipeline() as pipe:
        for _ in range(3):
            pipe.step(*batch())
        first = 2 * (FORWARD + FIRST_BACKWARD), UPDATE, 2 * (FORWARD + BACKWARD) + UPDATE
        last = 2 * (FORWARD + BACKWARD), UPDATE, 0.0  # its turn comes when all its messages are there
        assert times(pipe) == [tuple(3 * time for time in rank) for rank in (first, last)]
        for rank, figures in zip((first, last), pipe.report().ranks, strict=True):
            assert figures["bubble"] == pytest.approx(rank[2] / sum(rank))


@in_process
def test_the_timeline_is_that_of_the_clock() -> None:
    with fake_clock(), pipeline() as pipe:
        for _ in range(3):
            pipe.step(*batch())
        timeline = pipe.timeline(minibatches=2)
        step = 2 * (2 * FORWARD + FIRST_BACKWARD + BACKWARD) + 2 * UPDATE
        assert timeline.makespan == pytest.approx(2e-3 * step)
        for block in timeline.blocks:
            backward = FIRST_BACKWARD if block.rank == 0 else BACKWARD
            expected = {Op.F: FORWARD, Op.B: backward, Op.U: UPDATE}[block.step.action.op]
            assert 1e3 * (block.end - block.start) == pytest.approx(expected)
        of_last_rank = [block for block in timeline.blocks if block.rank == 1]
        assert 1e3 * of_last_rank[0].start == pytest.approx(2 * FORWARD)
        of_first_rank = [block for block in timeline.blocks if block.rank == 0]
        starts = [0, FORWARD, step - UPDATE - 2 * FIRST_BACKWARD, step - UPDATE - FIRST_BACKWARD, step - UPDATE]
        assert [1e3 * block.start for block in of_first_rank] == pytest.approx([*starts, *(step + s for s in starts)])


@in_process
def test_meters_count_from_a_reset_on() -> None:
    """Also if the device had not computed by then what was launched before."""
    controls = pretend.load()
    with fake_clock(), pipeline() as pipe:
        pipe.step(*batch())
        pipe.reset_meters()
        assert times(pipe) == [(0, 0, 0)] * 2
        pipe.step(*batch())
        one_step = times(pipe)
        controls.set_lag(60)  # about a step
        pipe.step(*batch())
        pipe.reset_meters()
        assert times(pipe) == [(0, 0, 0)] * 2
        controls.set_lag(0)
        assert times(pipe) == [(0, 0, 0)] * 2
        pipe.step(*batch())
        assert times(pipe) == one_step
        assert len({block.step.minibatch for block in pipe.timeline().blocks}) == 4


@in_process
def test_delayed_updates_and_the_time_outside_count_as_on_the_host() -> None:
    """A user's own work between two steps is not counted; an update that waits for a norm counts as updating."""
    controls = pretend.load()
    with fake_clock(), pipeline(clip_norm=1.0) as pipe:
        for _ in range(2):
            pipe.step(*batch())
            controls.advance(torch.accelerator.current_stream(), 1000.0)
        pipe.flush()
        assert [(busy, updating) for busy, updating, _ in times(pipe)] == [
            (4 * (FORWARD + backward), 2 * UPDATE) for backward in (FIRST_BACKWARD, BACKWARD)
        ]
        assert all(waiting < 1000 for _, _, waiting in times(pipe))


@in_process
def test_figures_lag_and_wait_for_nothing() -> None:
    controls = pretend.load()
    with fake_clock(), pipeline("2bw") as pipe:
        pipe.step(*batch())
        before = times(pipe)
        controls.set_lag(10_000)
        with counting_waits() as counted:
            pipe.step(*batch())
            for read in (pipe.meters, pipe.report, pipe.timeline, pipe.reset_meters):
                read()
        assert counted.total == 0, counted.where
        assert before != [(0, 0, 0)] * 2
        assert times(pipe) == [(0, 0, 0)] * 2
        assert sum(rank["actions"] for rank in pipe.meters()) == 0  # since the reset
        controls.set_lag(0)


@in_process
def test_no_cycle_waits_to_compare_clocks() -> None:
    with pipeline(stages=3) as pipe:
        with counting_waits() as counted:
            pipe.step(*batch())
        assert counted.total == 0, counted.where


@in_process
def test_a_device_that_never_starts_is_an_error_at_the_deadline() -> None:
    controls = pretend.load()
    controls.set_lag(10**9)
    with pytest.raises(RunError, match=r"pretend:0 did nothing for 0.01 s"):
        device_meter.DeviceMeter(torch.device("pretend:0"), 0.01)
    controls.set_lag(0)


@in_process
def test_times_are_on_the_hosts_clock() -> None:
    """So that ranks with devices of their own have one time axis."""
    with pipeline() as pipe:
        begin = time.monotonic_ns()
        for _ in range(3):
            pipe.step(*batch())
        pipe.flush()
        end = time.monotonic_ns()
        for worker in pipe._driver.workers:
            worker.meter.read()
            moments = [moment for cycle in worker.meter.cycles for _, *block in cycle for moment in block]
            assert begin <= min(moments) <= max(moments) <= end + 10**6  # of rounding


# Ranges for profilers


class Ranges:
    """A fake of `torch.cuda.nvtx`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.depth = self.deepest = 0

    def range_push(self, name: str) -> None:
        self.names.append(name)
        self.depth += 1
        self.deepest = max(self.depth, self.deepest)

    def range_pop(self) -> None:
        self.depth -= 1
        assert self.depth >= 0


def with_ranges(run: Callable[[], Any]) -> Ranges:
    ranges = Ranges()
    profiling._ranges.cache_clear()
    try:
        with mock.patch.object(torch.get_device_module("pretend"), "nvtx", ranges, create=True):
            run()
    finally:
        profiling._ranges.cache_clear()
    return ranges


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1", "wpipe"])
@in_process
def test_ranges_have_the_names_of_actions(schedule: str) -> None:
    """In the order in which virtual ranks execute them."""
    executed: list[str] = []

    def run() -> None:
        with pipeline(schedule, balance=[1] * 4 if schedule == "wpipe" else "parameters") as pipe:
            for _ in range(3):
                pipe.step(*batch())
            blocks = sorted(pipe.timeline().blocks, key=lambda block: block.start)
            executed.extend(str(block.step.action) for block in blocks)

    ranges = with_ranges(run)
    assert sorted(ranges.names[: len(executed)]) == sorted(executed)
    assert {"0F0", "1F0", "0U0"} < set(ranges.names)
    assert (ranges.depth, ranges.deepest) == (0, 1)


@in_process
def test_a_device_without_ranges_has_none() -> None:
    profiling.push_range(torch.device("pretend:0"), "0F0")
    profiling.pop_range(torch.device("pretend:0"))
    assert with_ranges(lambda: None).names == []


# Memory of the allocator


@in_process
def test_reports_have_the_peaks_of_the_allocator() -> None:
    with pipeline() as pipe:
        pipe.step(*batch())
        report = pipe.report()
        peaks = {
            "allocated": torch.accelerator.max_memory_allocated(0),
            "reserved": torch.accelerator.max_memory_reserved(0),
        }
        assert peaks["reserved"] >= peaks["allocated"] > 4 * WIDTH * WIDTH * 4  # weights
        data = json.loads(json.dumps(report.as_dict()))
        assert [rank["allocator"] for rank in data["ranks"]] == [peaks] * 2
        head, *rows = str(report).splitlines()[1:4]
        assert head.split()[-2:] == ["allocated", "reserved"]
        for row in rows:
            assert row.endswith("  ".join(format_bytes(peak).rjust(len(name)) for name, peak in peaks.items()))


def test_the_cpu_has_no_allocator_to_ask() -> None:
    assert profiling.allocator_peaks(torch.device("cpu")) == {}


@in_process
def test_a_device_that_does_not_count_memory_has_no_figures() -> None:
    failing = SimpleNamespace(max_memory_allocated=mock.Mock(side_effect=NotImplementedError))
    with mock.patch.object(torch, "accelerator", failing):
        assert profiling.allocator_peaks(torch.device("pretend:0")) == {}
