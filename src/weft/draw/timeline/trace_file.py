"""The trace file: Chrome's trace event format, which ui.perfetto.dev and chrome://tracing open.

The pipeline is a process and each rank one of its threads. Arrows lead from the block that sends a message to the block
that receives it, and a counter per rank shows the micro-batches in flight.
"""

from __future__ import annotations

import json
from typing import Any

from weft.draw.timeline.drawing import PASS_NAMES, Drawing, delay
from weft.errors import WeftError
from weft.schedule import BACKWARDS, Op, Step, Timeline

_INSIDE = 1e-3  # arrows start this share of the block before its end: exactly at the end, the next block would own them


def trace(timeline: Timeline, *, unit_us: float = 1000.0) -> str:
    """Trace events as JSON. One unit of the timeline's time becomes `unit_us` microseconds."""
    if not 0 < unit_us < float("inf"):
        raise WeftError(f"unit_us must be above 0 (got {unit_us}); use 1e6 for times in seconds")
    drawing = Drawing(timeline)
    events = [*_names(drawing), *_slices(drawing, unit_us), *_flows(drawing, unit_us), *_counters(drawing, unit_us)]
    document = {
        "displayTimeUnit": "ms",
        "metadata": {
            "schedule": drawing.title,
            "minibatches": timeline.minibatches,
            "unit_us": unit_us,
            "time": f"one unit of time is shown as {unit_us:g} µs",
        },
        "traceEvents": events,
    }
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _arguments(step: Step) -> dict[str, Any]:
    """An action as plain data. All numbers count from 0, as in the schedule."""
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


def _names(drawing: Drawing) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = [{"name": "process_name", "ph": "M", "pid": 0, "args": {"name": drawing.title}}]
    for rank, chunks in enumerate(drawing.chunks_by_rank):
        name = f"rank {rank} (chunk{'s' if len(chunks) != 1 else ''} {', '.join(map(str, chunks))})"
        for key, value in (("thread_name", {"name": name}), ("thread_sort_index", {"sort_index": rank})):
            events.append({"name": key, "ph": "M", "pid": 0, "tid": rank, "args": value})
    return events


def _slices(drawing: Drawing, unit: float) -> list[dict[str, Any]]:
    return [
        {
            "name": drawing.label(block.step),
            "cat": PASS_NAMES[block.step.action.op],
            "ph": "X",
            "pid": 0,
            "tid": rank,
            "ts": (block.start - drawing.start) * unit,
            "dur": (block.end - block.start) * unit,
            "args": _arguments(block.step),
        }
        for rank, row in enumerate(drawing.rows)
        for block in row
    ]


def _flows(drawing: Drawing, unit: float) -> list[dict[str, Any]]:
    """A start and a finish for each message whose two ends are both in the timeline."""
    blocks = drawing.timeline.blocks
    receivers = {_message(block.step, received=True): block for block in blocks if block.step.source >= 0}
    events: list[dict[str, Any]] = []
    for sender in blocks:
        receiver = receivers.get(_message(sender.step, received=False)) if sender.step.target >= 0 else None
        if receiver is None:
            continue
        name = "activations" if sender.step.action.op == Op.F else "gradients"
        shared = {"name": name, "cat": "message", "id": len(events) // 2, "pid": 0}
        leaves = sender.end - _INSIDE * (sender.end - sender.start)
        events.append({**shared, "ph": "s", "tid": sender.rank, "ts": (leaves - drawing.start) * unit})
        arrives = (receiver.start - drawing.start) * unit
        events.append({**shared, "ph": "f", "bp": "e", "tid": receiver.rank, "ts": arrives})
    return events


def _message(step: Step, *, received: bool) -> tuple[bool, int, int]:
    """The key of a message at both ends: its direction, the chunk that receives it and the micro-batch."""
    op, chunk, index = step.action
    return op in BACKWARDS, chunk if received else step.feeds, index


def _counters(drawing: Drawing, unit: float) -> list[dict[str, Any]]:
    return [
        {
            "name": f"rank {rank}: micro-batches in flight",
            "ph": "C",
            "pid": 0,
            "tid": rank,
            "ts": (time - drawing.start) * unit,
            "args": {"in flight": value},
        }
        for rank in range(len(drawing.rows))
        for time, value in drawing.in_flight(rank)
    ]
