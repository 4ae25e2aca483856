"""Measurements match the work done: times, messages, bytes, and a timeline that can be drawn like a simulated one.

Layers that sleep give times a lower bound that holds on any machine, however busy; the only upper bounds follow from
the clock itself. A launch of two real ranks checks that their clocks agree.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from weft.draw import grid, html, svg, trace
from weft.errors import WeftError
from weft.runtime.engine.meters import WINDOW, Meter
from weft.runtime.process import resident, resident_set
from weft.runtime.report import Report, empty_process
from weft.schedule import Block, Op, Program, Step, Timeline, lower
from weft.simulate import CATEGORIES
from weft.text import format_bytes

PACE = 0.01  # seconds that a slow layer sleeps, forward and backward
WIDTH, ROWS = 8, 8
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zb-h1", "pipedream", "2bw", "wpipe"]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor) -> Tensor:
        time.sleep(PACE)
        return given.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        time.sleep(PACE)
        return gradient


class Slow(nn.Linear):
    def forward(self, given: Tensor) -> Tensor:
        slow: Tensor = Sleep.apply(super().forward(given))  # type: ignore[no-untyped-call]
        return slow


def pipeline(schedule: str, *, stages: int | None = 2, slow: bool = False, **options: Any) -> weft.Pipeline:
    torch.manual_seed(0)
    layer = Slow if slow else nn.Linear
    return weft.Pipeline(
        nn.Sequential(*(layer(WIDTH, WIDTH) for _ in range(4))),
        loss_fn=nn.functional.mse_loss,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
        schedule=schedule,
        stages=stages,
        **({"microbatches": 4} | options),
    )


def run(pipe: weft.Pipeline, steps: int, *, flush: bool = True) -> float:
    """Train, and return the time it took."""
    batch = torch.linspace(-1, 1, ROWS * WIDTH).reshape(ROWS, WIDTH)
    start = time.monotonic()
    for _ in range(steps):
        pipe.step(batch, batch)
    if flush:
        pipe.flush()
    return time.monotonic() - start


def program_of(pipe: weft.Pipeline) -> Program:
    return lower(pipe.schedule)


# Meters


def test_a_meter_splits_time_into_busy_updating_and_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time between two actions is waiting; a delayed update counts as updating, whenever it runs."""
    clock = iter([100, 110, 130, 135, 140, 150, 157, 200])
    monkeypatch.setattr("weft.runtime.engine.meters.monotonic_ns", lambda: next(clock))
    forward, update = next(steps_of("gpipe", Op.F)), next(steps_of("gpipe", Op.U))
    meter = Meter()
    meter.begin_cycle(first=True)  # 100
    start = meter.start()  # 110: 10 waited
    meter.end(forward, start)  # 130: 20 busy
    start = meter.start()  # 135: 5 waited
    meter.end(update, start)  # 140: 5 updating
    start = meter.start()  # 150: 10 waited
    meter.end_delayed_update(start)  # 157: 7 updating
    meter.end_wait()  # 200: 43 waited
    assert (meter.busy, meter.updating, meter.waiting) == (20, 12, 68)
    assert meter.busy + meter.updating + meter.waiting == 200 - 100
    assert meter.actions == 2
    assert list(meter.cycles) == [[(forward, 110, 130), (update, 135, 140)]]
    assert meter.as_dict()["bubble"] == 0.68


def steps_of(name: str, op: Op) -> Iterator[Step]:
    program = lower(weft.schedule(name, stages=2, microbatches=2))
    return (step for step in program.steps(0, minibatches=1) if step.action.op == op)


def test_the_total_has_a_peak_too() -> None:
    """Categories peak at different times: the peak of the total is not the sum of the peaks."""
    meter = Meter()
    meter.set_bytes(activations=100)
    meter.set_bytes(activations=10, gradients=50)
    meter.set_bytes(gradients=0)
    assert meter.held["activations"] == 10
    assert (meter.peak["activations"], meter.peak["gradients"], meter.peak_total) == (100, 50, 100)
    assert (meter.at_peak["activations"], meter.at_peak["gradients"]) == (100, 0)
    meter.reset()
    assert (meter.peak["activations"], meter.peak["gradients"], meter.peak_total) == (10, 0, 10)


def test_a_meter_without_time_has_no_bubble() -> None:
    assert Meter().as_dict()["bubble"] == 0.0


# Virtual ranks


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, options) for name in SCHEDULES for options in ({}, {"replicas": 2})),
        *((name, {"clip_norm": 0.1}) for name in SCHEDULES),
    ],
)
def test_actions_and_messages_are_those_of_the_program(name: str, options: dict[str, Any]) -> None:
    """Every message of the program, with the bytes of its tensors; data that stays on a rank is no message."""
    pipe = pipeline(name, **options)
    run(pipe, 5)
    report = pipe.report()
    program = program_of(pipe)
    assert len(report.ranks) == 2 * pipe.replicas
    piece = ROWS // 4 // pipe.replicas * WIDTH * 4
    for rank in report.ranks:
        steps = list(program.steps(rank["rank"] % 2, minibatches=5))
        sent = sum(step.target >= 0 for step in steps)
        assert (rank["actions"], rank["messages"]) == (len(steps), sent)
        assert rank["message_bytes"] == sent * piece


def test_the_first_chunk_sends_no_gradients() -> None:
    """The inputs of chunk 0 need no gradient, and losses travel with gradients."""
    pipe = pipeline("1f1b", stages=4)
    run(pipe, 1)
    assert [rank["messages"] for rank in pipe.report().ranks] == [4, 8, 8, 4]


def test_times_are_bounded_by_the_clock_and_the_sleeping_layers() -> None:
    """Two layers per rank, four micro-batches, three mini-batches: each layer sleeps in every pass, and no rank records
    more than the wall time."""
    pipe = pipeline("1f1b", slow=True)
    wall = run(pipe, 3)
    for rank in pipe.report().ranks:
        assert rank["busy"] >= 3 * 4 * 2 * 2 * PACE
        assert rank["busy"] + rank["waiting"] + rank["updating"] <= wall
        assert rank["updating"] > 0
        assert rank["bubble"] == pytest.approx(rank["waiting"] / (rank["busy"] + rank["waiting"] + rank["updating"]))
    assert sum(rank["busy"] for rank in pipe.report().ranks) <= wall  # virtual ranks take turns


def test_one_rank_accounts_for_all_its_time() -> None:
    """It waits for nothing, and the time between actions is small compared with the layers."""
    pipe = pipeline("gpipe", stages=1, slow=True)
    wall = run(pipe, 3)
    (rank,) = pipe.report().ranks
    assert wall / 2 <= rank["busy"] + rank["waiting"] + rank["updating"] <= wall
    assert rank["messages"] == rank["message_bytes"] == 0


def test_reset_meters_start_from_zero() -> None:
    pipe = pipeline("2bw")
    run(pipe, 3)
    pipe.reset_meters()
    for rank in pipe.report().ranks:
        assert [rank[name] for name in ("busy", "waiting", "updating", "actions", "messages", "message_bytes")] == [
            0
        ] * 6
        assert rank["bubble"] == 0
        assert rank["bytes"]["weights"] == rank["peak_bytes"]["weights"] > 0
    run(pipe, 1)
    steps = list(program_of(pipe).steps(0, minibatches=1))
    assert pipe.report().ranks[0]["actions"] == len(steps)


def test_evaluation_is_not_counted_as_training() -> None:
    pipe = pipeline("1f1b")
    run(pipe, 1)
    before = pipe.report().ranks[0]
    batch = torch.ones(ROWS, WIDTH)
    pipe.evaluate([(batch, batch)] * 3)
    after = pipe.report().ranks[0]
    assert [before[name] for name in ("busy", "actions")] == [after[name] for name in ("busy", "actions")]


# Reports


def check_report(report: Report) -> None:
    data = report.as_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["schedule"] == report.schedule.name
    assert [rank["rank"] for rank in data["ranks"]] == list(range(report.schedule.stages * report.replicas))
    for rank in data["ranks"]:
        assert list(rank["bytes"]) == list(CATEGORIES)
        assert set(rank["peak_bytes"]) == {*CATEGORIES, "total"}
        for category, held in rank["bytes"].items():
            assert 0 <= held <= rank["peak_bytes"][category] <= rank["peak_bytes"]["total"]
        assert sum(rank["bytes"].values()) <= rank["peak_bytes"]["total"] <= sum(rank["peak_bytes"].values())
        assert list(rank["bytes_at_peak"]) == list(CATEGORIES)
        assert sum(rank["bytes_at_peak"].values()) == rank["peak_bytes"]["total"]
    title, head, *lines = str(report).splitlines()
    assert report.schedule.title in title
    count = len(data["ranks"])
    rows, (*resident, malloc) = lines[:count], lines[count:]
    check_resident(data["ranks"], *resident)
    assert malloc == f"malloc settings: {', '.join(sorted({rank['malloc'] for rank in data['ranks']}))}"
    assert len({len(line) for line in (head, *rows)}) == 1  # columns are aligned
    for name in ("busy", "waiting", "update", "bubble", "messages", "extra versions", "peak total"):
        assert name in head
    names = re.split(r"\s{2,}", head.strip())
    for rank, row in zip(data["ranks"], rows, strict=True):
        cells = re.split(r"\s{2,}", row.strip())
        assert cells[0] == str(rank["rank"])
        assert cells[4] == f"{rank['bubble']:.1%}"
        assert cells[5] == str(rank["messages"])
        assert cells[names.index("peak total")] == format_bytes(rank["peak_bytes"]["total"])


def check_resident(ranks: list[dict[str, Any]], title: str, head: str, *rows: str) -> None:
    """The parts of each resident set add up to its peak; virtual ranks share one."""
    sets = {rank: figures["resident"] for rank, figures in enumerate(ranks)}
    for figures in sets.values():
        parts = {name: figures[name] for name in ("process", "counted", "messages", "rest")}
        assert sum(parts.values()) == figures["peak"] >= figures["now"] > 0
        assert min(parts["process"], parts["counted"]) > 0
    shared = sets[0]["ranks"] > 1
    assert sets[0]["ranks"] == (len(ranks) if shared else 1)
    assert ("virtual ranks share one process" in title) == shared
    assert re.split(r"\s{2,}", head.strip()) == ["now", "peak", "empty process", "counted", "shared messages", "rest"]
    names = [f"ranks 0–{len(ranks) - 1}"] if shared else [f"rank {rank}" for rank in sets]
    for name, figures, row in zip(names, sets.values(), rows, strict=not shared):
        assert re.split(r"\s{2,}", row.strip())[:3] == [name, *map(format_bytes, (figures["now"], figures["peak"]))]


def test_the_resident_set_is_what_the_system_counts() -> None:
    """And the counted bytes of a rank are in it: a model of 64 MiB, and as much held by somebody else."""
    model = nn.Sequential(*(nn.Linear(1 << 11, 1 << 11, bias=False) for _ in range(4)))
    empty = empty_process(model)
    size = 64 << 20
    assert abs(resident().now - empty.now - size) < 1 << 20
    assert empty_process(model.to("meta")).now >= resident().now - (1 << 20)
    pipe = pipeline("1f1b")
    before = pipe.resident()
    ballast = torch.ones(size // 4)
    after = pipe.resident()
    assert after["now"] - before["now"] >= 0.9 * size
    assert after["counted"] == before["counted"] >= pipe.meters()[0]["bytes"]["weights"]
    assert after["peak"] >= after["now"]
    del ballast


def test_without_proc_only_the_peak_is_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peak = resident().peak
    monkeypatch.setattr(resident_set, "STATUS", tmp_path / "nothing")
    found = resident()
    assert found.now == found.peak
    assert found.shared == 0
    assert abs(found.peak - peak) < 1 << 24


@pytest.mark.parametrize("name", ["1f1b", "wpipe"])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_report_is_data_and_a_table(name: str, replicas: int) -> None:
    pipe = pipeline(name, replicas=replicas)
    check_report(pipe.report())  # before the first step
    run(pipe, 3)
    check_report(pipe.report())


# Timelines


def check_timeline(shown: Timeline, program: Program, expected: dict[int, list[Step]]) -> None:
    """Every action of the window once, in the order of the program, one at a time, and after its inputs."""
    found: dict[int, list[Block]] = {rank: [] for rank in expected}
    for block in shown.blocks:
        found[block.rank].append(block)
    for rank, blocks in found.items():
        assert [block.step for block in blocks] == expected[rank]
        assert all(block.start <= block.end for block in blocks)
        assert all(block.end <= following.start for block, following in pairwise(blocks))
    assert min(block.start for block in shown.blocks) == 0
    assert shown.makespan == max(block.end for block in shown.blocks)
    check_messages(shown)


def check_messages(shown: Timeline, *, at_least: float = 0.0) -> int:
    """Check that a receiver starts more than `at_least` after its sender; return the number of messages."""
    senders = {
        (block.step.action.op == Op.F, block.step.feeds, block.step.action.index): block
        for block in shown.blocks
        if block.step.feeds >= 0
    }
    count = 0
    for block in shown.blocks:
        if block.step.needs >= 0 and block.step.action.op != Op.W:
            key = block.step.action.op == Op.F, block.step.action.chunk, block.step.action.index
            if key in senders:  # otherwise sent before the window
                assert block.start > senders[key].start + at_least
                count += 1
    return count


def check_pictures(shown: Timeline) -> None:
    """All drawings, with every block."""
    actions = Counter(str(block.step.action) for block in shown.blocks)
    assert Counter(re.findall(r"<title>action: (\S+)\n", svg(shown))) == actions
    data = json.loads(re.findall(r'id="data"[^>]*>(.*?)</script>', html(shown), re.DOTALL)[0])
    assert Counter(data["strings"][fields[0]] for fields in data["blocks"]["fields"]) == actions
    events = json.loads(trace(shown, unit_us=1e6))["traceEvents"]
    assert Counter(event["args"]["action"] for event in events if event["ph"] == "X") == actions
    lines = grid(shown, width=200, versions=True).splitlines()
    for rank in range(shown.schedule.stages):
        assert any(line.startswith(f"rank {rank}  ") for line in lines)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_timeline_of_a_whole_run(name: str) -> None:
    pipe = pipeline(name)
    run(pipe, 4)
    shown = pipe.timeline()
    program = program_of(pipe)
    expected = {rank: list(program.steps(rank, minibatches=4)) for rank in range(2)}
    check_timeline(shown, program, expected)
    assert shown.minibatches == 4
    assert check_messages(shown) == sum(
        s.needs >= 0 and s.action.op != Op.W for steps in expected.values() for s in steps
    )
    check_pictures(shown)


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_a_timeline_of_the_last_mini_batches(name: str) -> None:
    """In the middle of a run, with the requested number of cycles; a flushed run is forgotten in the next."""
    pipe = pipeline(name)
    run(pipe, 3)
    run(pipe, 6, flush=False)
    program = program_of(pipe)
    shown = pipe.timeline(2)
    check_timeline(shown, program, {rank: [s for c in (4, 5) for s in program.cycle(rank, c)] for rank in range(2)})
    check_pictures(shown)
    whole = pipe.timeline()
    check_timeline(whole, program, {rank: [s for c in range(6) for s in program.cycle(rank, c)] for rank in range(2)})
    assert len(pipe.timeline(100).blocks) == len(whole.blocks)


def test_a_timeline_keeps_a_window_of_cycles() -> None:
    """It is always recorded, so it must not grow with the run."""
    pipe = pipeline("1f1b")
    run(pipe, WINDOW + 10, flush=False)
    program = program_of(pipe)
    shown = pipe.timeline()
    cycles = range(10, WINDOW + 10)
    check_timeline(shown, program, {rank: [s for c in cycles for s in program.cycle(rank, c)] for rank in range(2)})
    assert shown.minibatches == WINDOW


def test_a_timeline_of_replicas_is_that_of_the_first() -> None:
    pipe = pipeline("2bw", replicas=2)
    run(pipe, 3)
    program = program_of(pipe)
    check_timeline(pipe.timeline(), program, {rank: list(program.steps(rank, minibatches=3)) for rank in range(2)})


def test_updates_that_wait_for_others_are_in_the_timeline_once() -> None:
    pipe = pipeline("2bw", clip_norm=0.1)
    run(pipe, 4)
    program = program_of(pipe)
    check_timeline(pipe.timeline(), program, {rank: list(program.steps(rank, minibatches=4)) for rank in range(2)})


def test_drawing_an_empty_timeline_is_refused() -> None:
    pipe = pipeline("1f1b")
    shown = pipe.timeline()
    assert (shown.blocks, shown.minibatches, shown.makespan) == ((), 0, 0.0)
    with pytest.raises(WeftError, match="at least one block"):
        svg(shown)


# Real ranks


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The measurements of a rank."""

    name: str
    wall: float
    report: Report
    timeline: Timeline
    middle: Timeline


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("gpipe", "1f1b", "2bw", "wpipe", "zb-h1")),
    ("2bw", {"clip_norm": 0.1}),
]


def measure() -> list[Measured]:
    """Run every case on this rank."""
    torch.set_num_threads(1)
    run(pipeline("gpipe", stages=None), 1)  # warm-up: triggers lazy loading
    found = []
    for name, options in CASES:
        pipe = pipeline(name, stages=None, slow=True, **options)
        dist.barrier()
        wall = run(pipe, 2, flush=False)
        middle = pipe.timeline(1)
        wall += run(pipe, 1)
        found.append(Measured(name=name, wall=wall, report=pipe.report(), timeline=pipe.timeline(), middle=middle))
    return found


@pytest.fixture(scope="module")
def measured(launch: Callable[..., list[Any]]) -> list[list[Measured]]:
    """By rank, then by case."""
    return launch(measure, ranks=2)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join([name, *options]) for name, options in CASES])
def test_real_ranks_measure_themselves(measured: list[list[Measured]], case: int) -> None:
    """Every rank gets the figures of all ranks; each accounts for at least half of its time."""
    first, second = (ran[case] for ran in measured)
    assert first.report.as_dict() == second.report.as_dict()
    check_report(first.report)
    program = lower(first.report.schedule)
    for rank, figures in enumerate(first.report.ranks):
        steps = list(program.steps(rank, minibatches=3))
        total = figures["busy"] + figures["waiting"] + figures["updating"]
        assert figures["busy"] >= 3 * 4 * 2 * 2 * PACE  # two layers per rank, forward and backward
        assert measured[rank][case].wall / 2 <= total <= measured[rank][case].wall
        assert figures["actions"] == len(steps)
        assert figures["messages"] == sum(step.target >= 0 for step in steps)
        assert figures["message_bytes"] == figures["messages"] * ROWS // 4 * WIDTH * 4
        assert figures["bytes"]["buffers"] > 0


def test_a_rank_that_has_to_wait_shows_a_bubble(measured: list[list[Measured]]) -> None:
    """Under gpipe, rank 0 is idle while rank 1 runs the last forward and the first backward, each of two slow layers;
    rank 1 is idle while rank 0 runs the first forward and, except in the last mini-batch, the last backward."""
    report = measured[0][0].report
    assert report.schedule.name == "gpipe"
    assert report.ranks[0]["waiting"] >= 3 * 2 * 2 * PACE
    assert report.ranks[1]["waiting"] >= 3 * 2 * PACE
    assert all(0 < rank["bubble"] < 1 for rank in report.ranks)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[" ".join([name, *options]) for name, options in CASES])
def test_clocks_of_real_ranks_agree(measured: list[list[Measured]], case: int) -> None:
    """A receiver starts after its sender by at least the time that the sender's layers sleep. If the clocks differed by
    more, or were read at the wrong moment, a message would arrive too early."""
    first, second = (ran[case] for ran in measured)
    assert first.timeline.blocks == second.timeline.blocks
    program = lower(first.report.schedule)
    check_timeline(first.timeline, program, {rank: list(program.steps(rank, minibatches=3)) for rank in range(2)})
    layers = 4 // program.schedule.chunks
    assert check_messages(first.timeline, at_least=layers * PACE) > 0
    check_pictures(first.timeline)
    check_timeline(first.middle, program, {rank: list(program.cycle(rank, 1)) for rank in range(2)})
    check_pictures(first.middle)
