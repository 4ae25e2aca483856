"""1F1B with a flush (PipeDream-Flush, Megatron-LM): GPipe's time, fewer micro-batches in flight.

Rank `r` holds at most `p - r`, for every `m`. `p = 4, m = 4`:

    rank 0  1a 2a 3a 4a .  .  .  .  .  .  1A 1A .  2A 2A .  3A 3A .  4A 4A
    rank 1  .  1a 2a 3a .  .  .  .  1A 1A 4a 2A 2A .  3A 3A .  4A 4A .  .
    rank 2  .  .  1a 2a .  .  1A 1A 3a 2A 2A 4a 3A 3A .  4A 4A .  .  .  .
    rank 3  .  .  .  1a 1A 1A 2a 2A 2A 3a 3A 3A 4a 4A 4A .  .  .  .  .  .
"""

from __future__ import annotations

from weft.schedule import actions
from weft.schedule.actions import B, F
from weft.schedule.core import Schedule


def one_f_one_b(stages: int, microbatches: int) -> Schedule:
    every = range(microbatches)
    return Schedule(
        name="1f1b",
        stages=stages,
        microbatches=microbatches,
        streams=(actions.pair_up(F(rank, every), B(rank, every), warmup=stages - 1 - rank) for rank in range(stages)),
    )
