"""GPipe (Huang et al. 2019): all forwards, all backwards, an update.

`p = 4, m = 4`, a backward costs two forwards:

    rank 0  1a 2a 3a 4a .  .  .  .  .  .  .  .  .  1A 1A 2A 2A 3A 3A 4A 4A
    rank 1  .  1a 2a 3a 4a .  .  .  .  .  .  1A 1A 2A 2A 3A 3A 4A 4A .  .
    rank 2  .  .  1a 2a 3a 4a .  .  .  1A 1A 2A 2A 3A 3A 4A 4A .  .  .  .
    rank 3  .  .  .  1a 2a 3a 4a 1A 1A 2A 2A 3A 3A 4A 4A .  .  .  .  .  .
"""

from __future__ import annotations

from weft.schedule.actions import B, F, join
from weft.schedule.core import Schedule


def gpipe(stages: int, microbatches: int) -> Schedule:
    every = range(microbatches)
    return Schedule(
        name="gpipe",
        stages=stages,
        microbatches=microbatches,
        streams=(join(F(rank, every), B(rank, every)) for rank in range(stages)),
    )
