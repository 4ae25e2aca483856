"""The rules of a schedule, and the verifier that executes a schedule to check them.

The lowered streams of all ranks run, without time, through a window that is long enough to contain a steady
cycle and every delay. Messages block as they do in the runtime (`dry_run.py`).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

from weft.errors import ScheduleError, WeftError
from weft.schedule.actions import NONE, RETIRING, Action, Op
from weft.schedule.core import Schedule, check_sizes
from weft.schedule.delays import max_ahead, max_delay, mean_delay
from weft.schedule.dry_run import DryRun, pass_of
from weft.schedule.error_grid import order_grid
from weft.schedule.law import LAWS, Law, in_flight_limit
from weft.schedule.lower import lower
from weft.schedule.program import Program, Step, prediction_of
from weft.text import format_count

Row: TypeAlias = "tuple[int, int, int]"  # op, chunk, index

RULES = {
    "placement": "every chunk is on one rank, every rank holds a chunk, and an action runs on the rank of its chunk",
    "exactly once": "every micro-batch runs forward and backward exactly once in every chunk",
    "possible order": "a backward comes after its forward, and a weight gradient (W) after its input gradient (I)",
    "updates": "a chunk updates once per mini-batch, in order, after all its backwards and before those of the next",
    "in step": "a cycle needs only its mini-batch and earlier ones: no action needs the output of a later cycle",
    "no deadlock": "ranks never wait for each other forever, however slowly messages are read",
    "versions exist": "the version that a pass reads has been made before",
    "versions live": "a version is kept as long as an action will read it",
    "versions die": "a version is freed as soon as it is replaced and no action will read it",
    "predictions": "a prediction is made before it is used, from the same version, and is freed after its last use",
    "law": "forward and backward read the versions, and predict as far ahead, as the method's law states",
    "bounded": "no rank holds more micro-batches between forward and backward than its method allows",
}


@dataclass(frozen=True, kw_only=True, repr=False)
class Verdict:
    """The result for a schedule that breaks no rule."""

    schedule: Schedule
    rules: tuple[str, ...]  # the rules that were checked
    minibatches: int  # length of the window that was executed
    actions: int
    in_flight: tuple[float, ...]  # peak of each rank, in whole stages
    delay: tuple[int, ...]  # largest number of updates that forwards are late, per chunk
    mean_delays: tuple[float, ...]  # the same, mean over micro-batches
    ahead: tuple[int, ...]  # how many updates they predict beyond the version that they read, at most
    slots: int  # unread messages that a link must hold to avoid a deadlock

    def __str__(self) -> str:
        window = format_count(self.minibatches, "mini-batch")
        return f"{self.schedule.title}: every rule holds ({self.actions} actions of {window} run)"

    def __repr__(self) -> str:
        return f"<Verdict {self}>"


def verify(schedule: Schedule, *, slots: int | None = None, in_flight: float | None = None) -> Verdict:
    """Check every rule. Raises `ScheduleError` with the broken rule and a grid in which the action is marked.

    `slots`: how many unread messages a link holds (default: as many as the schedule needs, see `Verdict.slots`).
    `in_flight`: a limit on the micro-batches that a rank holds, in whole stages (default: the method's limit).
    """
    if slots is not None:
        check_sizes(slots=slots)
    if in_flight is not None and not (type(in_flight) in (int, float) and 0 < in_flight < math.inf):
        raise WeftError(f"in_flight must be a number above 0 (got {in_flight!r})")
    return verify_program(lower(schedule), slots=slots, in_flight=in_flight)


def verify_program(program: Program, *, slots: int | None = None, in_flight: float | None = None) -> Verdict:
    """`verify`, for a lowered schedule."""
    _check_streams(program)
    run = _Run(program, slots=slots, in_flight=in_flight)
    run.check_steps()
    run.check_deaths()
    return Verdict(
        schedule=program.schedule,
        rules=tuple(rule for rule in RULES if rule not in run.unchecked),
        minibatches=run.minibatches,
        actions=sum(len(steps) for steps in run.dry_run.steps),
        in_flight=tuple(held / chunks for held, chunks in zip(run.peak, run.chunks_per_rank, strict=True)),
        delay=tuple(max_delay(program, chunk) for chunk in range(program.schedule.chunks)),
        mean_delays=tuple(mean_delay(program, chunk) for chunk in range(program.schedule.chunks)),
        ahead=tuple(max_ahead(program, chunk) for chunk in range(program.schedule.chunks)),
        slots=run.dry_run.needed_slots(),
    )


def _check_streams(program: Program) -> None:
    """The rules that the streams alone show: placement, exactly once, possible order, one update."""
    schedule = program.schedule
    columns = (program.op, program.chunk, program.index)
    streams = [
        [row for row in zip(*(column[rank].tolist() for column in columns), strict=True) if row[0] != NONE]
        for rank in range(schedule.stages)
    ]

    def fail(rule: str, problem: str, rank: int, place: int = -1) -> NoReturn:
        cells = [[str(Action(Op(op), chunk, index)) for op, chunk, index in rows] for rows in streams]
        raise _error(schedule, rule, problem, order_grid(cells, {rank: place}))

    found: dict[int, Counter[tuple[int, int]]] = defaultdict(Counter)
    for rank, rows in enumerate(streams):
        for place, (op, chunk, index) in enumerate(rows):
            if schedule.placement[chunk] != rank:
                owner = schedule.placement[chunk]
                fail("placement", f"rank {rank} runs chunk {chunk}, which is on rank {owner}", rank, place)
            j = 0 if op == Op.U else index % schedule.microbatches
            found[chunk][op, j] += 1
            rule, name = ("updates", "update") if op == Op.U else ("exactly once", f"{Op(op).name} of micro-batch {j}")
            if found[chunk][op, j] > 1:
                fail(rule, f"chunk {chunk} has the {name} twice in one cycle", rank, place)
        if not schedule.chunks_of(rank):
            fail("placement", f"rank {rank} holds no chunk", rank)
        _check_order(rows, schedule, rank, fail)
    for chunk, rank in enumerate(schedule.placement):
        for j in range(schedule.microbatches):
            have = "".join(op.name for op in Op if op != Op.U and found[chunk][op, j])
            if have not in ("FB", "FIW"):
                problem = f"micro-batch {j} has {have or 'nothing'} in chunk {chunk}; it needs F and B, or F, I and W"
                fail("exactly once", problem, rank)
        if not found[chunk][Op.U, 0]:
            fail("updates", f"chunk {chunk} is never updated", rank)


def _check_order(rows: list[Row], schedule: Schedule, rank: int, fail: Callable[..., NoReturn]) -> None:
    """A micro-batch's F comes before its B or I, and its I before its W, in whatever cycles they are."""
    ran = {
        (op, chunk, index % schedule.microbatches): (-(index // schedule.microbatches), place)
        for place, (op, chunk, index) in enumerate(rows)
        if op != Op.U
    }
    for (op, chunk, j), moment in ran.items():
        for earlier, name in ((Op.F, "forward"), (Op.I, "input gradient")):
            if earlier < op and ran.get((earlier, chunk, j), moment) > moment:
                action = Action(Op(op), chunk, rows[moment[1]][2])
                fail("possible order", f"rank {rank} runs {action} before its {name}", rank, moment[1])


def _error(schedule: Schedule, rule: str, problem: str, grid: str) -> ScheduleError:
    """The problem and the rule, above a grid with the actions marked."""
    return ScheduleError(rule, f"{schedule.title}: {problem} (the rule: {RULES[rule]})", grid=grid)


@dataclass
class _ChunkState:
    """The state of a chunk during the execution."""

    retired: set[int] = field(default_factory=set)
    updates: int = 0
    alive: set[int] = field(default_factory=lambda: {0})
    died: dict[int, int] = field(default_factory=dict)  # version -> position in the rank's steps
    last_read: dict[int, int] = field(default_factory=dict)
    predictions: dict[tuple[bool, int, int], tuple[int, int]] = field(default_factory=dict)  # -> version, ahead


class _Run:
    """The execution of a program, every step checked."""

    def __init__(self, program: Program, *, slots: int | None, in_flight: float | None) -> None:
        schedule = self.schedule = program.schedule
        self.program, self.slots = program, slots
        self.max_delay = int(program.delay.max(initial=0))
        self.minibatches = program.drain + self.max_delay + 2
        self.dry_run = DryRun(program, minibatches=self.minibatches)
        self.chunks = [_ChunkState() for _ in range(schedule.chunks)]
        self.held, self.peak = [0] * schedule.stages, [0] * schedule.stages
        self.chunks_per_rank = [len(schedule.chunks_of(rank)) for rank in range(schedule.stages)]
        self.limits = [
            in_flight_limit(schedule, rank) if in_flight is None else in_flight for rank in range(schedule.stages)
        ]
        self.law: Law | None = LAWS.get(schedule.name)
        self.unchecked = {"law"} if self.law is None else set()  # rules that need a known method
        if math.inf in self.limits:
            self.unchecked.add("bounded")

    def check_steps(self) -> None:
        """Run cycle by cycle and check every step; if `slots` is given, run again with blocking messages."""
        stuck, remedy = self.dry_run.run(self._check, by_cycle=True), ""
        if stuck and not self.dry_run.run():
            self._out_of_step(self.dry_run.run(by_cycle=True))
        if not stuck and self.slots is not None:
            stuck = self.dry_run.run(slots=self.slots)
            if stuck:
                remedy = f"; use {self.dry_run.needed_slots()} slots or more"
                self.dry_run.run(slots=self.slots)
        if stuck:
            first = min(stuck)
            waits = self.dry_run.waits_for(first) + remedy
            problem = f"{format_count(len(stuck), 'rank')} can't continue; rank {first} waits {waits}"
            raise _error(self.schedule, "no deadlock", problem, order_grid(self._cells(), stuck))

    def _out_of_step(self, stuck: dict[int, int]) -> NoReturn:
        """Ranks wait for a rank that has finished its cycle: name the two whose streams do not match."""
        for rank, place in stuck.items():
            step = self.dry_run.steps[rank][place]
            if step.source not in stuck:
                problem = (
                    f"rank {rank} needs, in cycle {step.cycle} before {step.action}, what rank {step.source} runs in a "
                    f"later cycle; write both streams so that the two actions are in the same cycle "
                    f"(a mini-batch is {format_count(self.schedule.microbatches, 'micro-batch')})"
                )
                raise _error(self.schedule, "in step", problem, order_grid(self._cells(), {rank: place}))
        raise AssertionError("no waiting rank needs the output of a rank that has finished its cycle")

    def fail(self, rule: str, problem: str, rank: int, place: int | None = None) -> NoReturn:
        marks = {rank: self.dry_run.position[rank] if place is None else place}
        raise _error(self.schedule, rule, problem, order_grid(self._cells(), marks))

    def _cells(self) -> list[list[str]]:
        return [[str(step.action) for step in steps] for steps in self.dry_run.steps]

    def _check(self, rank: int, step: Step) -> None:
        chunk = self.chunks[step.action.chunk]
        if step.action.op == Op.U:
            self._check_update(rank, step, chunk)
            return
        self._check_in_flight(rank, step, chunk)
        self._check_reads(rank, step, chunk)
        self._check_law(rank, step)

    def _check_in_flight(self, rank: int, step: Step, chunk: _ChunkState) -> None:
        op, index = step.action.op, step.action.index
        if op == Op.F:
            self.held[rank] += 1
            self.peak[rank] = max(self.peak[rank], self.held[rank])
            stages, limit = self.held[rank] / self.chunks_per_rank[rank], self.limits[rank]
            if stages > limit:
                problem = f"rank {rank} holds {stages:g} micro-batches in flight, but the limit is {limit:g}"
                self.fail("bounded", problem, rank)
        if op in RETIRING:
            if step.minibatch > chunk.updates:
                problem = f"rank {rank} runs {step.action} before update {chunk.updates}, which would mix two gradients"
                self.fail("updates", problem, rank)
            chunk.retired.add(index)
            self.held[rank] -= 1

    def _check_update(self, rank: int, step: Step, chunk: _ChunkState) -> None:
        first = step.minibatch * self.schedule.microbatches
        missing = [index for index in range(first, first + self.schedule.microbatches) if index not in chunk.retired]
        if missing:
            self.fail(
                "updates", f"rank {rank} runs {step.action} before the backward of micro-batch {missing[0]}", rank
            )
        if step.minibatch != chunk.updates:
            self.fail("updates", f"rank {rank} runs {step.action} where update {chunk.updates} is due", rank)
        chunk.updates += 1
        chunk.alive.add(step.version)
        if step.dies:
            self._free_version(rank, step.version - 1, chunk)

    def _check_reads(self, rank: int, step: Step, chunk: _ChunkState) -> None:
        if step.ahead and not step.predicts:
            self._check_reuse(rank, step, chunk)
            return
        if step.version > chunk.updates:
            problem = f"{step.action} reads version {step.version}, but version {chunk.updates} is the newest"
            self.fail("versions exist", problem, rank)
        if step.version not in chunk.alive:
            self.fail("versions live", f"{step.action} reads version {step.version}, which is dead", rank)
        if step.predicts and step.version != chunk.updates:
            problem = (
                f"{step.action} predicts from version {step.version}, but version {chunk.updates} is the newest "
                "(a prediction uses the optimizer's state, which belongs to the newest version; use delay=None)"
            )
            self.fail("predictions", problem, rank)
        chunk.last_read[step.version] = self.dry_run.position[rank]
        if step.dies:
            self._free_version(rank, step.version, chunk)
        if step.predicts and not step.forgets:
            chunk.predictions[prediction_of(step, self.schedule.weights)] = (step.version, step.ahead)

    def _check_reuse(self, rank: int, step: Step, chunk: _ChunkState) -> None:
        """A step that reuses a prediction of its pass, or a backward that reuses the one of its forward."""
        source = prediction_of(step, self.schedule.weights)
        if chunk.predictions.get(source) != (step.version, step.ahead):
            first = "the mini-batch's first micro-batch makes it and must run first"
            remedy = first if self.schedule.weights.bellwether else "its forward makes it"
            problem = f"{step.action} uses a prediction of mini-batch {step.minibatch} that does not exist ({remedy})"
            self.fail("predictions", problem, rank)
        if step.forgets:
            del chunk.predictions[source]

    def _check_law(self, rank: int, step: Step) -> None:
        if self.law is None:
            return
        law = self.law(self.schedule, step.action.chunk, step.action.index % self.schedule.microbatches)
        delay, ahead = (law.forward, law.ahead) if pass_of(step) == "forward" else (law.backward, law.ahead_backward)
        if (step.version, step.ahead) != (max(0, step.minibatch - delay), ahead):
            problem = (
                f"{step.action} of mini-batch {step.minibatch} reads version {step.version} predicted {step.ahead} "
                f"ahead; the law says version {max(0, step.minibatch - delay)} and {ahead} ahead"
            )
            self.fail("law", problem, rank)

    def _free_version(self, rank: int, version: int, chunk: _ChunkState) -> None:
        if version == chunk.updates:
            self.fail("versions live", f"version {version} is freed before it is replaced", rank)
        chunk.alive.discard(version)
        chunk.died[version] = self.dry_run.position[rank]

    def check_deaths(self) -> None:
        """After the run: every prediction was freed, and every version at the first possible moment."""
        for number, (chunk, rank) in enumerate(zip(self.chunks, self.schedule.placement, strict=True)):
            for by_backward, *_ in chunk.predictions:
                problem = f"chunk {number} never frees a {'backward' if by_backward else 'forward'} prediction"
                self.fail("predictions", problem, rank, -1)
            replaced = {
                step.version - 1: place
                for place, step in enumerate(self.dry_run.steps[rank])
                if step.action.op == Op.U and step.action.chunk == number
            }
            for version in range(self.minibatches - 1 - self.max_delay):
                due = max(replaced[version], chunk.last_read.get(version, 0))
                if chunk.died.get(version) != due:
                    problem = f"version {version} of chunk {number} is kept after its last use"
                    self.fail("versions die", problem, rank, due)
