"""The trace file: Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

The pipeline is a process and each rank a thread of it; arrows lead from the block that makes a message to the
block that takes it, and a counter a rank shows the micro-batches in flight.
"""

from __future__ import annotations

import json
from typing import Any

from weft.draw.timeline.drawing import PASSES, Look, delay
from weft.errors import WeftError
from weft.schedule import BACKWARDS, Op, Step, Timeline

_INSIDE = 1e-3  # an arrow starts that part of a block before its end: at the very end it would be the next one's


def trace(timeline: Timeline, *, unit_us: float = 1000.0) -> str:
    """Trace events as JSON. One unit of the timeline's time becomes `unit_us` microseconds."""
    if not 0 < unit_us < float("inf"):
        raise WeftError(f"unit_us must be above 0 (got {unit_us}); for times in seconds it is 1e6")
    look = Look(timeline)
    events = [*_names(look), *_slices(look, unit_us), *_flows(look, unit_us), *_counters(look, unit_us)]
    document = {
        "displayTimeUnit": "ms",
        "metadata": {
            "schedule": look.title,
            "minibatches": timeline.minibatches,
            "unit_us": unit_us,
            "time": f"one unit of time is shown as {unit_us:g} µs",
        },
        "traceEvents": events,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def arguments(step: Step) -> dict[str, Any]:
    """An action as plain data, all numbers as the schedule counts them: from 0."""
    op, chunk, index = step.action
    if op == Op.U:
        return {"action": str(step.action), "minibatch": step.minibatch, "chunk": chunk, "version": step.version}
    return {
        "action": str(step.action),
        "microbatch": index,
        "minibatch": step.minibatch,
        "chunk": chunk,
        "version": step.version,
        "delay": delay(step),
        "ahead": step.ahead,
    }


def _names(look: Look) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": look.title}}]
    for rank, chunks in enumerate(look.held):
        held = ", ".join(map(str, chunks))
        name = f"rank {rank} (chunk{'s' if len(chunks) != 1 else ''} {held})"
        for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": rank})):
            events.append({"name": key, "ph": "M", "pid": 0, "tid": rank, "args": value})
    return events


def _slices(look: Look, unit: float) -> list[dict[str, Any]]:
    return [
        {
            "name": look.label(block.step),
            "cat": PASSES[block.step.action.op],
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": (block.start - look.begin) * unit,
            "dur": (block.end - block.start) * unit,
            "args": arguments(block.step),
        }
        for rank, row in enumerate(look.rows)
        for block in row
    ]


def _flows(look: Look, unit: float) -> list[dict[str, Any]]:
    """A start and a finish for each message whose two ends are both in the timeline."""
    takers = {_message(block.step, taken=True): block for block in look.timeline.blocks if block.step.source >= 0}
    events: list[dict[str, Any]] = []
    for sender in look.timeline.blocks:
        taker = takers.get(_message(sender.step, taken=False)) if sender.step.target >= 0 else None
        if taker is None:
            continue
        name = "activations" if sender.step.action.op == Op.F else "gradients"
        shared = {"name": name, "cat": "message", "id": len(events) // 2, "pid": 0}
        leaves = sender.end - _INSIDE * (sender.end - sender.start)
        events.append({**shared, "ph": "s", "tid": sender.rank, "ts": (leaves - look.begin) * unit})
        arrives = (taker.start - look.begin) * unit
        events.append({**shared, "ph": "f", "bp": "e", "tid": taker.rank, "ts": arrives})
    return events


def _message(step: Step, *, taken: bool) -> tuple[bool, int, int]:
    """What a message is known by at both ends: its direction, the chunk that takes it, the micro-batch."""
    op, chunk, index = step.action
    return op in BACKWARDS, chunk if taken else step.feeds, index


def _counters(look: Look, unit: float) -> list[dict[str, Any]]:
    return [
        {
            "name": f"rank {rank}: micro-batches in flight",
            "ph": "C",
            "pid": 0,
            "tid": rank,
            "ts": (time - look.begin) * unit,
            "args": {"in flight": value},
        }
        for rank in range(len(look.rows))
        for time, value in look.in_flight(rank)
    ]
