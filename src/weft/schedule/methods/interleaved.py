"""Interleaved 1F1B (Narayanan et al. 2021): `v` chunks per rank, which divides the idle time by `v`.

Micro-batches run in rounds of `p`: `p` through a rank's first chunk, the same `p` through its second, and so
on; backwards in the same way from the last chunk. `p = 2, m = 4, v = 2`, one column = F of a half-stage:

    rank 0  1a 2a 1b 2b 3a .  1B 1B 4a 2B 2B 3b 1A 1A 4b 2A 2A .  3B 3B .  4B 4B 3A 3A 4A 4A
    rank 1  .  1a 2a 1b 1B 1B 2b 2B 2B 3a 1A 1A 4a 2A 2A 3b 3B 3B 4b 4B 4B 3A 3A 4A 4A .  .
"""

from __future__ import annotations

import numpy as np

from weft.errors import WeftError
from weft.schedule import actions
from weft.schedule.actions import B, F
from weft.schedule.core import Schedule, check_sizes, check_work


def interleaved(stages: int, microbatches: int, *, chunks: int = 2) -> Schedule:
    check_sizes(chunks=chunks)
    check_work(stages=stages, microbatches=microbatches, chunks=stages * chunks)
    if microbatches % stages:
        raise WeftError(
            f"interleaved needs microbatches to be a multiple of stages "
            f"(microbatches: {microbatches}, stages: {stages}); use {multiples(microbatches, stages)}"
        )
    step = np.arange(chunks * microbatches)
    turn, within = np.divmod(step, stages * chunks)
    local = within // stages  # which of the rank's chunks
    microbatch = turn * stages + within % stages

    def stream(rank: int) -> actions.Rows:
        forwards = F(local * stages + rank, microbatch)
        backwards = B((chunks - 1 - local) * stages + rank, microbatch)
        behind = stages - 1 - rank
        return actions.pair_up(
            forwards, backwards, warmup=behind if chunks == 1 else 2 * behind + (chunks - 1) * stages
        )

    return Schedule(
        name="interleaved",
        stages=stages,
        microbatches=microbatches,
        placement=(chunk % stages for chunk in range(stages * chunks)),
        streams=map(stream, range(stages)),
        options={"chunks": chunks},
    )


def multiples(value: int, of: int) -> str:
    """The nearest multiples of `of` below and above `value`, for error messages."""
    below = value // of * of
    return f"{below} or {below + of}" if below else f"{of}"
