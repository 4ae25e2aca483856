"""The order of work with one norm over all chunks: nothing that reads an update runs before the norm is known.

The norm of mini-batch `t` is known when its last backward is done, in the first chunk. Until then no chunk has
`W_{t+1}`. A rank with several chunks may have work that reads it before work that the norm needs, and would wait for
itself. So *norm order* cuts the stream of each rank after its last update by a mini-batch. What reads the update, or
needs the output of what does, moves behind the cut:

    without  | … 3B3 3U0 0B2 3F4 0B3 0U0 | …      3F4 reads W_1 of chunk 3, which waits for 0B3
    with     | … 3B3 3U0 0B2 0B3 0U0 | 3F4 …

Cycle `c` has the updates by one mini-batch, on all ranks, and nothing that needs them. So a norm needs no later cycle
than its own, and who waits for it is in a later one: waits form no circle. Rows keep their place between the updates
of their chunk, so each reads the version that it read before: the law is the same, and the price is idle time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.schedule.actions import BACKWARDS, Op, Rows, is_any


def in_norm_order(
    streams: Sequence[Rows], lowered: Sequence[Mapping[str, npt.NDArray[Any]]], *, chunks: int, microbatches: int
) -> list[Rows]:
    """The streams of all ranks in norm order; `lowered` has the columns `batch` and `delay` of their rows."""
    waits = [
        _wait(rows["op"] == Op.U, columns["batch"].astype(np.int64), columns["delay"])
        for rows, columns in zip(streams, lowered, strict=True)
    ]
    forward, backward = np.full((2, chunks, microbatches), np.iinfo(np.int64).min)
    for rows, wait in zip(streams, waits, strict=True):
        for table, mask in ((forward, rows["op"] == Op.F), (backward, is_any(rows["op"], BACKWARDS))):
            table[rows["chunk"][mask], rows["index"][mask] % microbatches] = wait[mask]
    forward = np.maximum.accumulate(forward)  # along the chunks, as messages run
    backward = np.maximum(np.maximum.accumulate(backward[::-1])[::-1], forward[-1])
    ordered = []
    for rows, wait, columns in zip(streams, waits, lowered, strict=True):
        place = rows["chunk"], rows["index"] % microbatches
        needs = np.where(rows["op"] == Op.F, forward[place], backward[place])
        cycle = columns["batch"] + np.where(rows["op"] == Op.U, wait, np.maximum(wait, needs))
        ordered.append(_by_cycle(rows, cycle, microbatches))
    return ordered


def _wait(update: npt.NDArray[np.bool_], batch: npt.NDArray[np.int64], delay: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The cycle of each row, after its mini-batch: that of the next cut, and not before the version that it reads."""
    height, place = len(batch), np.arange(len(batch))
    cut = (place - batch * height)[update].max(initial=0)  # the last update by mini-batch 0
    wait: npt.NDArray[Any] = np.maximum(-((cut - place) // height), batch - delay) - batch
    return wait


def _by_cycle(rows: Rows, cycle: npt.NDArray[Any], microbatches: int) -> Rows:
    moved = rows.copy()
    moved["index"] -= (cycle * np.where(rows["op"] == Op.U, 1, microbatches)).astype(np.int32)
    ordered: Rows = moved[np.argsort(np.arange(len(rows)) - cycle * len(rows), kind="stable")]
    return ordered
