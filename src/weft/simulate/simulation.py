"""Figures and timelines of a schedule with costs, by executing the lowered schedule.

`simulate` runs an endless pipeline until its state repeats, so the steady figures are exact, and then drains it.
`timeline` runs one window of mini-batches and keeps every start and end, for drawings.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.schedule import (
    Block,
    Op,
    Program,
    Schedule,
    Timeline,
    check_sizes,
    lower,
    max_ahead,
    max_delay,
    mean_delay,
    mean_over_chunks,
)
from weft.simulate.cost import Cost, action_durations, message_bytes
from weft.simulate.executor import Executor, Segment, State
from weft.simulate.memory import RankMemory, measure
from weft.simulate.slack import Slack, slack

LOOK_BACK = 64  # earlier states to compare with
PATIENCE = 100_000  # rows per rank to run, once the pipeline is full, before the search for a steady state ends
PATIENCE_OF_ALL = 60_000_000  # the same for the rows of all ranks
MAX_ROWS = 150_000_000  # rows to fill and drain a pipeline: more would take minutes
MAX_BLOCKS = 2_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """The figures of a schedule. Times are in the unit of the costs."""

    schedule: Schedule
    cost: Cost
    steady: bool  # the state repeats, so the figures are exact; otherwise they are those of the last cycles
    period: float  # time per mini-batch in the steady state
    bubble: float  # share of the period in which a rank is idle, mean over ranks
    bubbles: tuple[float, ...]  # the same, per rank
    throughput: float  # micro-batches per time
    minibatches: int  # length of the window of `makespan`
    makespan: float
    fill: float  # makespan - minibatches x period: the idle time of filling and draining
    versions: tuple[int, ...]  # largest number held, the newest included, per chunk
    delay: tuple[int, ...]  # largest number of updates between the version read and the version updated, per chunk
    mean_delay: float  # the same, mean over micro-batches and parameters (the weight bytes of the chunks)
    mean_delays: tuple[float, ...]  # mean over micro-batches, per chunk
    ahead: tuple[int, ...]  # how many updates ahead forwards predict, per chunk
    in_flight: tuple[float, ...]  # largest number of micro-batches, in whole stages, per rank
    messages_per_microbatch: float  # hand-overs from chunk to chunk
    memory: tuple[RankMemory, ...]  # peak, per rank
    traffic: dict[tuple[int, int], tuple[int, float]]  # (from, to) -> messages and bytes per mini-batch

    @cached_property
    def slack(self) -> Slack | None:
        """Computed when it is asked for; None for a schedule with too many actions."""
        return slack(self.schedule, self.cost)

    def as_dict(self) -> dict[str, Any]:
        """The figures as plain JSON data."""
        return self.schedule.about() | {
            "steady": self.steady,
            "bubble": self.bubble,
            "bubbles": list(self.bubbles),
            "throughput": self.throughput,
            "period": self.period,
            "minibatches": self.minibatches,
            "makespan": self.makespan,
            "fill": self.fill,
            "versions": list(self.versions),
            "delay": list(self.delay),
            "mean_delay": self.mean_delay,
            "mean_delays": list(self.mean_delays),
            "ahead": list(self.ahead),
            "in_flight": list(self.in_flight),
            "slack": None if self.slack is None else self.slack.as_dict(),
            "messages_per_microbatch": self.messages_per_microbatch,
            "memory": [rank.bytes | {"total": rank.total} for rank in self.memory],
            "traffic": [
                {"from": edge[0], "to": edge[1], "messages": messages, "bytes": size}
                for edge, (messages, size) in self.traffic.items()
            ],
        }


def simulate(schedule: Schedule, cost: Cost | None = None, *, minibatches: int | None = None) -> Simulation:
    """Execute a schedule with costs (default: equal stages, F = 1, B = 2).

    `minibatches` is the window of `makespan`; the steady figures do not depend on it.
    """
    if minibatches is not None:
        check_sizes(minibatches=minibatches)
    cost = cost or Cost.uniform(schedule)
    program = lower(schedule)
    program.check_size(2 * program.drain + 3, MAX_ROWS, doing="simulating")
    executor = Executor(program, cost)
    segments, period, repeat = _until_steady(executor)
    if not period > 0:
        raise WeftError("a simulation needs a cost above 0 (all times are 0); set forward or backward")
    run = segments[-1].cycles.stop
    # until reads no longer stop at version 0, and through one whole repetition
    settled = int((program.delay - program.batch).max()) + max(1, repeat)
    segments += executor.segments(range(run, settled))
    run = max(run, settled)
    window = minibatches or run
    skipped = max(0, window - run) // repeat * repeat if repeat else 0  # repetitions need not be executed
    executed = max(run, window - skipped)
    segments += executor.segments(range(run, executed))
    segments += executor.segments(range(executed, executed + program.drain), minibatches=executed)
    makespan = float(executor.clock.max()) + skipped * period
    if window < executed:
        makespan = max(float(segment.end.max(initial=0.0)) for segment in _window(Executor(program, cost), window))

    tallies = [_tally(program.op[rank], program.chunk[rank]) for rank in range(schedule.stages)]
    spent = action_durations(cost)
    busy = np.array([sum(float(spent[op, chunk]) * n for op, chunk, n in tally) for tally in tallies])
    bubbles = 1 - busy / period
    memory = measure(program, cost, segments)
    versions = {chunk: held for rank in memory for chunk, held in rank.versions.items()}
    traffic, messages = _traffic(program, cost, tallies)
    chunks = range(schedule.chunks)
    of_model, of_chunks = _mean_delay(program, cost)
    return Simulation(
        schedule=schedule,
        cost=cost,
        steady=repeat > 0,
        period=period,
        bubble=_clean(bubbles.mean()),
        bubbles=tuple(_clean(bubble) for bubble in bubbles),
        throughput=schedule.microbatches / period,
        minibatches=window,
        makespan=makespan,
        fill=_clean(makespan - window * period),
        versions=tuple(versions.get(chunk, 1) for chunk in chunks),
        delay=tuple(max_delay(program, chunk) for chunk in chunks),
        mean_delay=of_model,
        mean_delays=of_chunks,
        ahead=tuple(max_ahead(program, chunk) for chunk in chunks),
        in_flight=tuple(rank.in_flight for rank in memory),
        messages_per_microbatch=messages / schedule.microbatches,
        memory=tuple(memory),
        traffic=traffic,
    )


def timeline(schedule: Schedule, cost: Cost | None = None, *, minibatches: int) -> Timeline:
    """Run a window of mini-batches, from an empty pipeline to an empty pipeline, and keep every block."""
    check_sizes(minibatches=minibatches)
    cost = cost or Cost.uniform(schedule)
    program = lower(schedule)
    program.check_size(minibatches + program.drain, MAX_BLOCKS, doing="keeping every block of")
    spent, segments = action_durations(cost), list(_window(Executor(program, cost), minibatches))
    blocks = []
    for rank in range(schedule.stages):
        ends = (end for segment in segments for end in segment.end[rank, segment.live[rank]].tolist())
        for step, end in zip(program.steps(rank, minibatches=minibatches), ends, strict=True):
            start = end - float(spent[step.action.op, step.action.chunk])
            blocks.append(Block(rank=rank, start=start, end=end, step=step))
    spare = slack(schedule, cost)
    return Timeline(
        schedule=schedule,
        minibatches=minibatches,
        blocks=tuple(blocks),
        makespan=max(block.end for block in blocks),
        mean_delay=_mean_delay(program, cost)[0],
        slack=None if spare is None else spare.messages,
    )


def _window(executor: Executor, minibatches: int) -> Iterator[Segment]:
    """Run a window of mini-batches."""
    return executor.segments(range(minibatches + executor.program.drain), minibatches=minibatches)


def _until_steady(executor: Executor) -> tuple[list[Segment], float, int]:
    """Run until the state repeats. Returns the segments, the time per mini-batch and the length of the repetition in
    mini-batches (0: no repetition was found)."""
    segments: list[Segment] = []
    states: list[State] = []
    ranks, height = executor.program.op.shape
    while True:
        run = len(segments) * executor.max_cycles
        segments.append(executor.run(range(run, run + executor.max_cycles)))
        run += executor.max_cycles
        if run < executor.program.drain:
            continue  # not all rows run yet, so equal states need not continue equally
        states.append(executor.state(run))
        state = states[-1]
        for back, before in enumerate(reversed(states[-1 - LOOK_BACK : -1]), start=1):
            if state.repeats(before):
                repeat = back * executor.max_cycles
                return segments, (state.now - before.now) / repeat, repeat
        more = run + executor.max_cycles
        if len(states) > 2 and (more * height > PATIENCE or more * height * ranks > PATIENCE_OF_ALL):
            half = len(states) // 2
            passed = (len(states) - 1 - half) * executor.max_cycles
            return segments, (state.now - states[half].now) / passed, 0


def _tally(op: np.ndarray, chunk: np.ndarray) -> list[tuple[int, int, int]]:
    """The number of rows of each op and chunk."""
    kinds, times = np.unique(op.astype(np.int64) + (chunk.astype(np.int64) << 8), return_counts=True)
    return [(int(kind) & 255, int(kind) >> 8, int(n)) for kind, n in zip(kinds, times, strict=True) if int(kind) >= 0]


def _traffic(
    program: Program, cost: Cost, tallies: list[list[tuple[int, int, int]]]
) -> tuple[dict[tuple[int, int], tuple[int, float]], int]:
    """Messages and bytes of each link per cycle, and the number of hand-overs from chunk to chunk."""
    placement = program.schedule.placement
    traffic: dict[tuple[int, int], tuple[int, float]] = {}
    hand_overs = 0
    for rank, tally in enumerate(tallies):
        for op, chunk, times in tally:
            receiver = int(program.feeds[op, chunk])
            if receiver < 0:
                continue
            hand_overs += times
            if placement[receiver] != rank:
                messages, size = traffic.get((rank, placement[receiver]), (0, 0.0))
                size += times * message_bytes(cost, Op(op), chunk)
                traffic[rank, placement[receiver]] = (messages + times, size)
    return traffic, hand_overs


def _mean_delay(program: Program, cost: Cost) -> tuple[float, tuple[float, ...]]:
    """The mean delay of the model and of each chunk."""
    delays = tuple(mean_delay(program, chunk) for chunk in range(len(cost.chunks)))
    return mean_over_chunks(delays, [chunk.weight_bytes for chunk in cost.chunks]), delays


def _clean(value: float) -> float:
    """Replace rounding noise around 0 by 0."""
    return 0.0 if abs(value) < 1e-9 else float(value)
