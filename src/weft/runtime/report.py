"""What the ranks of a run did with their time and memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean
from typing import Any

import torch
from torch import nn

from weft.metrics import RESIDENT_PARTS, SHARED_PROCESS, resident_sets
from weft.runtime.assembly import Assembly
from weft.runtime.process import Resident, malloc_settings, resident
from weft.schedule import Action, Block, Op, Schedule, Step, Timeline, delay_text, mean_over_chunks
from weft.simulate import CATEGORIES
from weft.text import format_bytes, format_count


@dataclass(frozen=True, kw_only=True)
class Report:
    """Figures of every rank, of all replicas: seconds, bytes now, at their peaks and at their sum's, messages sent."""

    schedule: Schedule
    replicas: int
    ranks: tuple[dict[str, Any], ...]

    @property
    def mean_delay(self) -> float:
        """In updates, over the micro-batches and parameters of a replica; a tied parameter counts in each chunk."""
        return _mean_delay(self._chunks)

    @property
    def _chunks(self) -> list[dict[str, Any]]:
        return [chunk for rank in self.ranks[: self.schedule.stages] for chunk in rank["chunks"]]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON data."""
        figures = {"replicas": self.replicas, "mean_delay": self.mean_delay, "ranks": list(self.ranks)}
        return self.schedule.about() | figures

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
        lines = _table([[cell.replace("_", " ") for cell in head], *rows])
        title = f"{self.schedule.title}; memory at its peak"
        return "\n".join([title, *lines, *self._resident(), self._delay(), *self._staleness()])

    def _resident(self) -> list[str]:
        """The resident set of each process, and what its peak consists of."""
        sets = resident_sets(self.ranks)
        title = "resident set, and its peak in parts" + (f"; {SHARED_PROCESS}" if len(sets) < len(self.ranks) else "")
        rows = [
            [name, *(_signed(figures[part]) for part in ("now", "peak", *RESIDENT_PARTS))]
            for name, figures in sets.items()
        ]
        malloc = ", ".join(sorted({rank["malloc"] for rank in self.ranks}))
        return [title, *_table([["", "now", "peak", *RESIDENT_PARTS.values()], *rows]), f"malloc settings: {malloc}"]

    def _delay(self) -> str:
        largest, ahead = ([chunk[name] for chunk in self._chunks] for name in ("delay", "ahead"))
        return f"delay in updates: {delay_text(self.mean_delay, largest, ahead)}"

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


def _mean_delay(chunks: Sequence[dict[str, Any]]) -> float:
    return mean_over_chunks([chunk["mean_delay"] for chunk in chunks], [chunk["parameters"] for chunk in chunks])


def _table(rows: list[list[str]]) -> list[str]:
    """The lines of a table, whose columns are as wide as their longest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def gather_report(assembly: Assembly, empty: Resident) -> Report:
    """The figures of all ranks; every process asks. `empty` is its resident set before the pipeline was built."""
    transport, own = assembly.transport, []
    for worker in assembly.driver.workers:
        worker.memory.count_all(transport.nbytes())
    explained = {"resident": explain_resident(assembly, empty), "malloc": malloc_settings()}
    for worker in assembly.driver.workers:
        own.append({"rank": worker.number} | worker.meter.as_dict() | {"chunks": worker.delays()} | explained)
    gathered = assembly.collectives.all_gather(own, purpose="gather a report")
    ranks = tuple(rank for ranks in gathered for rank in ranks)
    return Report(schedule=assembly.schedule, replicas=assembly.settings.replicas, ranks=ranks)


def empty_process(model: Any) -> Resident:
    """The resident set before a pipeline is built, without the weights of its model that are in memory already."""
    tops = model if isinstance(model, list | tuple) else [model]
    modules = [top for top in tops if isinstance(top, nn.Module)]
    tensors = [tensor for top in modules for tensor in (*top.parameters(), *top.buffers()) if tensor.is_cpu]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    torch.optim.SGD([nn.Parameter(torch.empty(0))])  # the first optimizer of a process imports 70 MiB of PyTorch
    found = resident()
    return found._replace(now=max(0, found.now - sum(storages.values())))


def explain_resident(assembly: Assembly, empty: Resident) -> dict[str, int]:
    """The resident set of this process now and at its peak, and what the peak consists of.

    The meters count bytes of the device: on an accelerator, they explain nothing here.
    """
    found, workers = resident(), assembly.driver.workers
    messages = max(0, found.shared - empty.shared)
    counted = 0
    if assembly.compute.device.type == "cpu":
        shared = min(assembly.transport.nbytes(), messages)  # is in the counted buffers, too
        counted = sum(worker.meter.peak_total for worker in workers) - shared
    return {
        "now": found.now,
        "peak": found.peak,
        "process": empty.now,
        "counted": counted,
        "messages": messages,
        "rest": found.peak - empty.now - counted - messages,
        "ranks": len(workers),
    }


def _signed(nbytes: int) -> str:
    """An amount that may be negative: memory that was counted, and never touched."""
    return f"-{format_bytes(-nbytes)}" if nbytes < 0 else format_bytes(nbytes)


def gather_timeline(assembly: Assembly, minibatches: int | None) -> Timeline:
    """What the first replica did in the last mini-batches since a flush, measured; every process asks."""
    zero, workers = assembly.transport.zero, [worker for worker in assembly.driver.workers if worker.replica == 0]
    for worker in assembly.driver.workers:
        worker.meter.read()
    own = [
        [worker.rank, [_packed(step, start - zero, end - zero) for step, start, end in cycle]]
        for worker in workers
        for cycle in list(worker.meter.cycles)[-(minibatches or len(worker.meter.cycles)) :]
    ]
    chunks = [chunk for worker in workers for chunk in worker.delays()]
    gathered = assembly.collectives.all_gather((own, chunks), purpose="gather a timeline")
    mean_delay = _mean_delay([chunk for _, chunks in gathered for chunk in chunks])
    return _timeline(assembly.schedule, [cycle for cycles, _ in gathered for cycle in cycles], mean_delay)


def _timeline(schedule: Schedule, cycles: Sequence[tuple[int, list[list[Any]]]], mean_delay: float) -> Timeline:
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
        mean_delay=mean_delay,
    )


def _packed(step: Step, start: int, end: int) -> list[Any]:
    """A block as plain JSON data."""
    return [list(step.action), *step[1:], start, end]
