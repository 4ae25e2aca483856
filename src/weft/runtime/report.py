"""What the ranks of a run did with their time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

from weft.runtime.assembly import Assembly
from weft.schedule import Action, Block, Op, Schedule, Step, Timeline
from weft.simulate import CATEGORIES
from weft.text import format_bytes, format_count


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of every rank, of all replicas: seconds, bytes now, at their peaks and at their sum's, messages sent."""

    schedule: Schedule
    replicas: int
    ranks: tuple[dict[str, Any], ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        return self.schedule.about() | {"replicas": self.replicas, "ranks": list(self.ranks)}

    def __str__(self) -> str:
        device = sorted({name for rank in self.ranks for name in rank.get("allocator", {})})
        head = ["rank", "busy s", "waiting s", "update s", "bubble", "messages", *CATEGORIES, "peak total", *device]
        rows = [
            [
                str(rank["rank"]),
                *(f"{rank[name]:.3f}" for name in ("busy", "waiting", "updating")),
                f"{rank['bubble']:.1%}",
                str(rank["messages"]),
                *(format_bytes(rank["peak_bytes"][name]) for name in (*CATEGORIES, "total")),
                *(format_bytes(rank.get("allocator", {}).get(name, 0)) for name in device),
            ]
            for rank in self.ranks
        ]
        table = [[cell.replace("_", " ") for cell in head], *rows]
        widths = [max(len(row[column]) for row in table) for column in range(len(head))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]
        return "\n".join([f"{self.schedule.title}; memory at its peak", *lines, *self._staleness()])

    def _staleness(self) -> list[str]:
        """How far from the weights that their updates met mini-batches were computed, on average, if sampled."""
        lines = []
        for chunk in (chunk for rank in self.ranks for chunk in rank["chunks"] if chunk["samples"]):
            predicted, stale = (mean(sample[name] for sample in chunk["samples"]) for name in ("predicted", "stale"))
            lines.append(
                f"chunk {chunk['chunk']}: {format_count(chunk['delay'], 'update')} late, "
                f"predicted {chunk['ahead']} ahead; "
                f"distance to the weights met: {predicted:.3g}, without prediction {stale:.3g}"
            )
        return lines


def gather_report(assembly: Assembly) -> Report:
    """The figures of all ranks; every process asks."""
    transport, own = assembly.transport, []
    for worker in assembly.driver.workers:
        worker.memory.count_all(transport.nbytes())
        own.append({"rank": worker.number} | worker.meter.as_dict() | {"chunks": worker.delays()})
    gathered = assembly.collectives.all_gather(own, purpose="gather a report")
    ranks = tuple(rank for ranks in gathered for rank in ranks)
    return Report(schedule=assembly.schedule, replicas=assembly.settings.replicas, ranks=ranks)


def gather_timeline(assembly: Assembly, minibatches: int | None) -> Timeline:
    """What the first replica did in the last mini-batches since a flush, measured; every process asks."""
    zero = assembly.transport.zero
    for worker in assembly.driver.workers:
        worker.meter.read()
    own = [
        [worker.rank, [_packed(step, start - zero, end - zero) for step, start, end in cycle]]
        for worker in assembly.driver.workers
        if worker.replica == 0
        for cycle in list(worker.meter.cycles)[-(minibatches or len(worker.meter.cycles)) :]
    ]
    gathered = assembly.collectives.all_gather(own, purpose="gather a timeline")
    return _timeline(assembly.schedule, [cycle for cycles in gathered for cycle in cycles])


def _timeline(schedule: Schedule, cycles: Sequence[tuple[int, list[list[Any]]]]) -> Timeline:
    """The packed blocks of all ranks, from the start of the first one on."""
    blocks = []
    for rank, packed_blocks in cycles:
        for action, *rest, start, end in packed_blocks:
            op, chunk, index = action
            step = Step(Action(Op(op), chunk, index), *rest)
            blocks.append(Block(rank=rank, start=start / 1e9, end=end / 1e9, step=step))
    begin = min((block.start for block in blocks), default=0.0)
    moved = [
        Block(rank=block.rank, start=block.start - begin, end=block.end - begin, step=block.step) for block in blocks
    ]
    minibatches = {block.step.minibatch for block in moved}
    return Timeline(
        schedule=schedule,
        minibatches=len(minibatches),
        blocks=tuple(moved),
        makespan=max((block.end for block in moved), default=0.0),
    )


def _packed(step: Step, start: int, end: int) -> list[Any]:
    """A block as plain JSON data."""
    return [list(step.action), *step[1:], start, end]
