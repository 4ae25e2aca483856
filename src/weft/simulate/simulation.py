"""Schedule + costs -> figures and timelines, all by executing the lowered schedule.

`simulate` runs an endless pipeline until its state repeats, which makes the steady figures exact, and drains
it. `timeline` runs one window of mini-batches and keeps every start and end, for pictures.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from weft.errors import WeftError
from weft.schedule import Block, Op, Program, Schedule, Timeline, check_sizes, lower
from weft.simulate.cost import Cost, action_durations, message_bytes
from weft.simulate.executor import Machine, Segment, State
from weft.simulate.memory import RankMemory, measure

LOOK_BACK = 64  # states to compare with in search of a repetition
PATIENCE = 100_000  # rows a rank to run, once the pipeline is full, and
PATIENCE_OF_ALL = 60_000_000  # rows of all ranks, in search of a steady state that does not come
MOST_ROWS = 150_000_000  # to fill and drain a pipeline: what goes on for minutes is refused
MOST_BLOCKS = 2_000_000


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What a schedule costs. Times in the unit of the costs; `per rank`, `per chunk`: one value each."""

    schedule: Schedule
    cost: Cost
    steady: bool  # the state repeats, so that the figures hold for ever; else they are the last cycle's
    period: float  # time of a mini-batch in the steady state
    bubble: float  # part of that time in which a rank idles, mean over ranks
    bubbles: tuple[float, ...]  # the same, per rank
    throughput: float  # micro-batches a time
    minibatches: int  # of the window that `makespan` is of
    makespan: float
    fill: float  # makespan beyond minibatches x period: the idle of fill and drain together
    versions: tuple[int, ...]  # held at the most, the newest included, per chunk
    delay: tuple[int, ...]  # updates between the version read and the version met, at the most, per chunk
    ahead: tuple[int, ...]  # updates that forwards predict, per chunk
    in_flight: tuple[float, ...]  # micro-batches at the most, in whole stages, per rank
    messages_per_microbatch: float  # hand-overs from chunk to chunk
    memory: tuple[RankMemory, ...]  # at the peak, per rank
    traffic: dict[tuple[int, int], tuple[int, float]]  # (from, to) -> messages and bytes a mini-batch

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
            "ahead": list(self.ahead),
            "in_flight": list(self.in_flight),
            "messages_per_microbatch": self.messages_per_microbatch,
            "memory": [one.bytes | {"total": one.total} for one in self.memory],
            "traffic": [
                {"from": edge[0], "to": edge[1], "messages": messages, "bytes": size}
                for edge, (messages, size) in self.traffic.items()
            ],
        }


def simulate(schedule: Schedule, cost: Cost | None = None, *, minibatches: int | None = None) -> Simulation:
    """Execute a schedule with costs (default: equal stages, F = 1, B = 2) and count.

    `minibatches` is the window that `makespan` is given for; the steady figures do not depend on it.
    """
    if minibatches is not None:
        check_sizes(minibatches=minibatches)
    cost = cost or Cost.uniform(schedule)
    program = lower(schedule)
    program.check_size(2 * program.drain + 3, MOST_ROWS, doing="simulating")
    machine = Machine(program, cost)
    stretches, period, again = _until_steady(machine)
    if not period > 0:
        raise WeftError("a simulation needs time to pass (all costs are 0); give forward or backward a time")
    run = stretches[-1].cycles.stop
    # until reads are no longer held up at version 0, and through all phases of what repeats
    settled = int((program.delay - program.batch).max()) + max(1, again)
    stretches += machine.stretches(range(run, settled))
    run = max(run, settled)
    window = minibatches or run
    skipped = max(0, window - run) // again * again if again else 0  # what repeats need not be run again
    own = max(run, window - skipped)
    stretches += machine.stretches(range(run, own))
    stretches += machine.stretches(range(own, own + program.drain), minibatches=own)
    makespan = float(machine.clock.max()) + skipped * period
    if window < own:
        makespan = max(float(one.end.max(initial=0.0)) for one in _window(Machine(program, cost), window))

    tallies = [_tally(program.op[rank], program.chunk[rank]) for rank in range(schedule.stages)]
    spent = action_durations(cost)
    busy = np.array([sum(float(spent[op, chunk]) * n for op, chunk, n in tally) for tally in tallies])
    bubbles = 1 - busy / period
    memory = measure(program, cost, stretches)
    versions = {chunk: held for one in memory for chunk, held in one.versions.items()}
    traffic, messages = _traffic(program, cost, tallies)
    return Simulation(
        schedule=schedule,
        cost=cost,
        steady=again > 0,
        period=period,
        bubble=_clean(bubbles.mean()),
        bubbles=tuple(_clean(one) for one in bubbles),
        throughput=schedule.microbatches / period,
        minibatches=window,
        makespan=makespan,
        fill=_clean(makespan - window * period),
        versions=tuple(versions.get(chunk, 1) for chunk in range(schedule.chunks)),
        delay=_of_forwards(program, program.delay),
        ahead=_of_forwards(program, program.ahead),
        in_flight=tuple(one.in_flight for one in memory),
        messages_per_microbatch=messages / schedule.microbatches,
        memory=tuple(memory),
        traffic=traffic,
    )


def timeline(schedule: Schedule, cost: Cost | None = None, *, minibatches: int) -> Timeline:
    """Run a window of mini-batches, from an empty pipeline to an empty pipeline, and keep every block."""
    check_sizes(minibatches=minibatches)
    cost = cost or Cost.uniform(schedule)
    program = lower(schedule)
    program.check_size(minibatches + program.drain, MOST_BLOCKS, doing="keeping every block of")
    spent, stretches = action_durations(cost), list(_window(Machine(program, cost), minibatches))
    blocks = []
    for rank in range(schedule.stages):
        ends = (end for one in stretches for end in one.end[rank, one.live[rank]].tolist())
        for step, end in zip(program.steps(rank, minibatches=minibatches), ends, strict=True):
            start = end - float(spent[step.action.op, step.action.chunk])
            blocks.append(Block(rank=rank, start=start, end=end, step=step))
    return Timeline(
        schedule=schedule,
        minibatches=minibatches,
        blocks=tuple(blocks),
        makespan=max(block.end for block in blocks),
    )


def _window(machine: Machine, minibatches: int) -> Iterator[Segment]:
    """Run a window of mini-batches."""
    return machine.stretches(range(minibatches + machine.program.drain), minibatches=minibatches)


def _until_steady(machine: Machine) -> tuple[list[Segment], float, int]:
    """Run until the state repeats: what ran, the time of a mini-batch, how many mini-batches repeat (0: none do)."""
    stretches: list[Segment] = []
    states: list[State] = []
    ranks, height = machine.program.op.shape
    while True:
        run = len(stretches) * machine.most
        stretches.append(machine.run(range(run, run + machine.most)))
        run += machine.most
        if run < machine.program.drain:
            continue  # some rows have not begun to run: what looks alike need not go on alike
        states.append(machine.state(run))
        now = states[-1]
        for back, before in enumerate(reversed(states[-1 - LOOK_BACK : -1]), start=1):
            if now.repeats(before):
                again = back * machine.most
                return stretches, (now.now - before.now) / again, again
        more = run + machine.most
        if len(states) > 2 and (more * height > PATIENCE or more * height * ranks > PATIENCE_OF_ALL):
            half = len(states) // 2
            passed = (len(states) - 1 - half) * machine.most
            return stretches, (now.now - states[half].now) / passed, 0


def _tally(op: np.ndarray, chunk: np.ndarray) -> list[tuple[int, int, int]]:
    """How many rows there are of each op and chunk."""
    kinds, times = np.unique(op.astype(np.int64) + (chunk.astype(np.int64) << 8), return_counts=True)
    return [(int(kind) & 255, int(kind) >> 8, int(n)) for kind, n in zip(kinds, times, strict=True) if int(kind) >= 0]


def _traffic(
    program: Program, cost: Cost, tallies: list[list[tuple[int, int, int]]]
) -> tuple[dict[tuple[int, int], tuple[int, float]], int]:
    """Messages and bytes of each link in a cycle, and the hand-overs from chunk to chunk."""
    placement = program.schedule.placement
    traffic: dict[tuple[int, int], tuple[int, float]] = {}
    hand_overs = 0
    for rank, tally in enumerate(tallies):
        for op, chunk, times in tally:
            to = int(program.feeds[op, chunk])
            if to < 0:
                continue
            hand_overs += times
            if placement[to] != rank:
                messages, size = traffic.get((rank, placement[to]), (0, 0.0))
                size += times * message_bytes(cost, Op(op), chunk)
                traffic[rank, placement[to]] = (messages + times, size)
    return traffic, hand_overs


def _of_forwards(program: Program, column: np.ndarray) -> tuple[int, ...]:
    """The largest value of a column among each chunk's forwards."""
    return tuple(
        int(column[rank, (program.op[rank] == Op.F) & (program.chunk[rank] == chunk)].max(initial=0))
        for chunk, rank in enumerate(program.schedule.placement)
    )


def _clean(value: float) -> float:
    """Rounding noise around 0 as 0."""
    return 0.0 if abs(value) < 1e-9 else float(value)
