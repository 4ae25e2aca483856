"""ZB-H1 (Qi et al. 2023): 1F1B with the backward split, the weight gradients moved into the bubble.

A backward is split into `I` (input gradient, which the previous rank waits for) and `W` (weight gradient, which no
rank waits for). Rank `r` delays its `W` by `r` micro-batches, so every rank holds `p` micro-batches, as the first
rank of 1F1B does. `p = 4, m = 4`, with F, I and W of equal cost; `1i` and `1w` are I and W of micro-batch 1:

    rank 0  1a 2a 3a 4a .  .  .  1i 1w 2i 2w 3i 3w 4i 4w
    rank 1  .  1a 2a 3a .  .  1i 4a 2i 1w 3i 2w 4i 3w 4w
    rank 2  .  .  1a 2a .  1i 3a 2i 4a 3i 1w 4i 2w 3w 4w
    rank 3  .  .  .  1a 1i 2a 2i 3a 3i 4a 4i 1w 2w 3w 4w
"""

from __future__ import annotations

import numpy as np

from weft.schedule import actions
from weft.schedule.actions import F, I, Op, Rows, W, join
from weft.schedule.core import Schedule


def zb_h1(stages: int, microbatches: int) -> Schedule:
    def stream(rank: int) -> Rows:
        every = np.arange(microbatches)
        late = min(rank, microbatches)
        table = actions.pair_up(F(rank, every), I(rank, every), warmup=stages - 1 - rank)
        inputs = np.flatnonzero(table["op"] == Op.I)
        on_time = np.insert(table, inputs[late:] + 1, W(rank, every[: microbatches - late]))
        return join(on_time, W(rank, every[microbatches - late :]))

    return Schedule(name="zb-h1", stages=stages, microbatches=microbatches, streams=map(stream, range(stages)))
