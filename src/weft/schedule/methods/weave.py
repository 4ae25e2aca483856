"""Weave: a V of chunks without a bubble, in which a micro-batch leaves soon after it came.

Rank `r` holds chunks `r` and `2p-1-r`. A micro-batch runs down the ranks through the first half of the model (`1a`)
and up through the second half (`1b`), so data and loss are both on rank 0. Its gradients run down (`1j`) and up
(`1i`) again. The gradients of the weights (`1x` and `1w`), which no rank waits for, run on the units that are left.

Each micro-batch does what the one before it did, six units later. Find `1j` on rank 0, `2j` six columns further on,
`3j` six columns after that: every column is the one six columns before it, with the next micro-batch. As each rank
has six things to do for a micro-batch and no two of them fall on the same unit modulo 6, no unit stays free, and the
order goes on for ever without a bubble. `p = 4, m = 4, slack=0`, one column = F, I or W of a half-stage:

    rank 0  1a 2a .  .  .  .  .  1b 1j 1x 3a .  .  2b 2j 1i 1w 2x 4a 3b 3j 2i 2w 3x 5a 4b 4j 3i 3w 4x 6a 5b 5j 4i 4w
    rank 1  .  1a .  .  .  .  1b 2a .  1j 1x .  2b 3a 1i 2j 1w 2x 3b 4a 2i 3j 2w 3x 4b 5a 3i 4j 3w 4x 5b 6a 4i 5j 4w
    rank 2  .  .  1a .  .  1b .  .  2a .  1j 2b 1x 1i 3a 1w 2j 3b 2x 2i 4a 2w 3j 4b 3x 3i 5a 3w 4j 5b 4x 4i 6a 4w 5j
    rank 3  .  .  .  1a 1b .  .  .  .  2a 2b 1j 1i 1w 1x 3a 3b 2j 2i 2w 2x 4a 4b 3j 3i 3w 3x 5a 5b 4j 4i 4w 4x 6a 6b

Here a message is needed as soon as it is there. `slack` is how much longer it may take, or how late a rank may be,
before anybody waits, in forwards of a stage (two columns). With 0.5, the default, a pass reaches the next rank two
columns later, not one, and two thirds more micro-batches are in flight. `building_block.py` has the distances,
`find_block.py` their choice.

A forward reads the newest weights of its chunk, its backward the same. The only late micro-batches are those that are
in flight when their chunk is updated. So little in flight means little memory, and little delay as well.
"""

from __future__ import annotations

import math

import numpy as np

from weft.errors import WeftError
from weft.schedule.actions import Op, Rows, alternate, rows
from weft.schedule.building_block import PERIOD
from weft.schedule.core import Schedule, check_sizes, check_work, is_number
from weft.schedule.find_block import DEFAULT_SLACK, find_block
from weft.schedule.weights import Versions, Weights, predicting_weights


def weave(
    stages: int,
    microbatches: int,
    *,
    slack: float = DEFAULT_SLACK,
    split: bool = True,
    predict: Versions | None = None,
) -> Schedule:
    """`split=False` runs backwards whole, which needs more in flight.

    `predict` compensates for the delay of the micro-batches that are late, each by its own number of updates.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    check_work(stages=stages, microbatches=microbatches, chunks=2 * stages)
    if not (is_number(slack) and 0 <= slack < math.inf):
        raise WeftError(f"slack is a number of forwards of a stage, 0 or more (got {slack!r})")
    if not isinstance(split, bool):
        raise WeftError(f"split must be True or False (got {split!r})")
    block = find_block(stages, slack, split)
    least = max(1, *(chunk.in_flight - 1 for rank in range(stages) for chunk in block.chunks(rank)))
    if microbatches < least:
        raise WeftError(
            f"weave needs {least} or more micro-batches for two weight versions to be enough (microbatches: "
            f"{microbatches}, stages: {stages}, slack: {slack:g}, split: {split}); use {least}"
            f"{', or less slack' if slack else ''}"
        )

    every = np.arange(microbatches)

    def stream(rank: int) -> Rows:
        down, up = block.chunks(rank)
        starts = [
            (start, op, chunk)
            for chunk, times in ((rank, down), (2 * stages - 1 - rank, up))
            for start, op in ((times.forward, Op.F), (times.backward, Op.I if split else Op.B), (times.weight, Op.W))
            if start is not None
        ]
        in_order = sorted(starts, key=lambda action: action[0] % PERIOD)
        return alternate(*(rows(op, chunk, every - start // PERIOD) for start, op, chunk in in_order))

    whole = int(slack) == slack
    options: dict[str, object] = {"slack": int(slack) if whole else slack} if slack != DEFAULT_SLACK else {}
    options |= {} if split else {"split": False}
    return Schedule(
        name="weave",
        stages=stages,
        microbatches=microbatches,
        placement=(*range(stages), *reversed(range(stages))),
        streams=map(stream, range(stages)),
        weights=Weights(delay=None) if predict is None else predicting_weights(predict, bellwether=False),
        options=options | ({"predict": predict} if predict is not None else {}),
    )
