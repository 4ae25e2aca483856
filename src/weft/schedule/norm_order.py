"""The order of work with one norm over all chunks: nothing that reads an update runs before the norm is known.

The norm of mini-batch `t` is known when its last backward is done, in the first chunk. Until then no chunk has
`W_{t+1}`. A rank with several chunks may have work that reads it before work that the norm needs, and would wait for
itself. So *norm order* cuts the stream of each rank after its last update of a mini-batch, and what reads an update
moves behind the cut:

    without  | 3F4 3B4 0B2 3U0 3F5 0B3 0U0 | …         3F5 reads W_1 of chunk 3, which waits for 0B3
    with     | 3F4 3B4 0B2 3U0 0B3 0U0 | 3F5 …

Cycle `c` has all updates by one mini-batch, on all ranks, and nothing that reads them. So a norm needs no later cycle
than its own, and whoever waits for it is in a later one: if every cycle can end without later ones (the verifier's
rule "in step"), waits form no circle. Rows keep their place between the updates of their chunk, so each reads the
version that it read before: the law is the same, and the price is idle time.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.schedule.actions import Op, Rows


def in_norm_order(
    rows: Rows, batch: npt.NDArray[np.integer], delay: npt.NDArray[np.integer], microbatches: int
) -> Rows:
    """The stream of a rank in norm order; `batch` and `delay` are those of its lowered rows."""
    height, place = len(rows), np.arange(len(rows))
    update = rows["op"] == Op.U
    if not update.any():
        return rows
    cut = (place - batch.astype(np.int64) * height)[update].max()  # the last update by mini-batch 0
    cycle = np.maximum(-((cut - place) // height), batch - delay)  # of the next cut, and not before the version read
    order = np.argsort(place - cycle * height, kind="stable")
    moved = rows.copy()
    moved["index"] -= (cycle * np.where(update, 1, microbatches)).astype(np.int32)
    ordered: Rows = moved[order]
    return ordered
