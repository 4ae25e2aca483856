"""WPipe: two groups of chunks; the next forwards of the first group run before its current backwards.

Chunks `0..p-1` are G0, the first half of the model, `p..2p-1` are G1; rank `r` holds chunk `r` of both, and
rank `p-1` of G0 feeds rank 0 of G1, so the links form a ring. Forwards: `p` micro-batches through G0, the same
`p` through G1, the next `p` through G0 …; backwards: `p` in G1, the same `p` in G0 …. G1 is updated before
its next forwards begin, so only G0 is one update late and holds a second version. `p = 4, m = 4`, one column =
F of a half-stage, `1a`/`1b` forward of micro-batch 1 in G0/G1, `1A`/`1B` backward:

    rank 0  1a 2a 3a 4a 1b 2b 3b 4b .  .  .  .  .  .  1B 1B 5a 2B 2B 6a 3B 3B 7a 4B 4B 8a 1A 1A 5b 2A 2A 6b 3A 3A
    rank 1  .  1a 2a 3a 4a 1b 2b 3b .  .  .  .  1B 1B 4b 2B 2B 5a 3B 3B 6a 4B 4B 7a 1A 1A 8a 2A 2A 5b 3A 3A 6b 4A
    rank 2  .  .  1a 2a 3a 4a 1b 2b .  .  1B 1B 3b 2B 2B 4b 3B 3B 5a 4B 4B 6a 1A 1A 7a 2A 2A 8a 3A 3A 5b 4A 4A 6b
    rank 3  .  .  .  1a 2a 3a 4a 1b 1B 1B 2b 2B 2B 3b 3B 3B 4b 4B 4B 5a 1A 1A 6a 2A 2A 7a 3A 3A 8a 4A 4A 5b 5B 5B
"""

from __future__ import annotations

import numpy as np

from weft.errors import WeftError
from weft.schedule.actions import B, F, Rows, alternate
from weft.schedule.core import Schedule, check_sizes, check_work
from weft.schedule.methods.interleaved import multiples
from weft.schedule.weights import Versions, Weights, predicting_weights


def wpipe(
    stages: int, microbatches: int, *, warmup: int = 1, predict: Versions | None = None, fresh: bool = False
) -> Schedule:
    """`warmup=2` runs turns of `2p` micro-batches and twice as many forwards ahead, which hides the time of a hop.

    On two ranks, turns of `p` are used where `2p` does not divide the micro-batches; they hide two thirds of it.

    `predict` compensates for G0's delay of one update; G1 has no delay.

    `fresh`: every forward of G0 reads the newest version on its rank, and its backward the same. Only the first turn
    of a mini-batch runs before the previous update, so only these micro-batches are one update late. In the paper's
    form, all are. The order of work and the versions held are the same.
    """
    check_sizes(stages=stages, microbatches=microbatches, warmup=warmup)
    check_work(stages=stages, microbatches=microbatches, chunks=2 * stages)
    if not isinstance(fresh, bool):
        raise WeftError(f"fresh must be True or False (got {fresh!r})")
    turn = turn_of(stages, microbatches, warmup)
    step = np.arange(2 * microbatches)

    def stream(rank: int) -> Rows:
        group, microbatch = _turns(step, turn)
        forwards = F(group * stages + rank, microbatch)
        group, microbatch = _turns(step - turn - warmup * (stages - 1 - rank), turn)
        backwards = B((1 - group) * stages + rank, microbatch)
        return alternate(forwards, backwards)

    options = {"warmup": (warmup, 1), "predict": (predict, None), "fresh": (fresh, False)}
    return Schedule(
        name="wpipe",
        stages=stages,
        microbatches=microbatches,
        placement=(chunk % stages for chunk in range(2 * stages)),
        streams=map(stream, range(stages)),
        weights=_weights(stages, predict, fresh),
        options={name: value for name, (value, default) in options.items() if value != default},
    )


def _weights(stages: int, predict: Versions | None, fresh: bool) -> Weights:
    if predict is not None:
        return predicting_weights(predict, bellwether=not fresh)
    return Weights(delay=(None if fresh else 1,) * stages + (0,) * stages)


def turn_of(stages: int, microbatches: int, warmup: int) -> int:
    """How many micro-batches run through one group before the other group's turn.

    `warmup` rounds of `stages`, or fewer where these do not divide the micro-batches. It is at least the number of
    forwards ahead; with less, a forward of G1 would run before G1's update.
    """
    least = max(1, -(-warmup * (stages - 1) // stages))
    for rounds in range(min(warmup, microbatches // stages), least - 1, -1):
        if microbatches % (rounds * stages) == 0:
            return rounds * stages
    times = "" if least == 1 else f"{warmup} x " if least == warmup else f"{least} to {warmup} x "
    raise WeftError(
        f"wpipe needs microbatches to be a multiple of {times}stages (microbatches: {microbatches}, stages: {stages}); "
        f"use {multiples(microbatches, least * stages)}"
    )


def _turns(step: np.ndarray, turn: int) -> tuple[np.ndarray, np.ndarray]:
    """Group and micro-batch of the `step`-th action of a pass in which the groups alternate."""
    round_of_turns, within = np.divmod(step, 2 * turn)
    return within // turn, round_of_turns * turn + within % turn
