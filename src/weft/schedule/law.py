"""The law: which weights each method reads, as formulas, one function per method.

For micro-batch `j` of a mini-batch `t` in a chunk, the forward and the backward read version `t - delay`,
predicted `ahead` updates beyond it. The verifier compares every lowered schedule with these numbers. The
lowering does not use them: it counts updates in the order of work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from weft.schedule.building_block import BuildingBlock
from weft.schedule.core import Schedule
from weft.schedule.find_block import DEFAULT_SLACK, find_block
from weft.schedule.methods.wpipe import turn_of


class Reads(NamedTuple):
    """The delay of the weights that forward and backward read, and how many updates ahead they are predicted."""

    forward: int
    backward: int
    ahead: int = 0
    ahead_backward: int = 0


Law = Callable[[Schedule, int, int], Reads]


def synchronous(schedule: Schedule, chunk: int, j: int) -> Reads:
    return Reads(0, 0)


def pipedream(schedule: Schedule, chunk: int, j: int) -> Reads:
    delay = schedule.stages - 1 if schedule.options.get("vertical_sync") else newest_delay(schedule, chunk, j)
    return Reads(delay, delay)


def two_buffered(schedule: Schedule, chunk: int, j: int) -> Reads:
    delay = math.ceil(
        Fraction(schedule.options.get("warmup", 1) * (schedule.stages - 1 - chunk), schedule.microbatches)
    )
    return predicted(schedule, delay) or Reads(1, 1)


def wpipe(schedule: Schedule, chunk: int, j: int) -> Reads:
    """G0 is one update late: all micro-batches, or with fresh reads those of the first turn.

    In units of a forward and a backward, rank `r` runs, of any mini-batch, G0's forward `j` of turn `j // T` at
    `2m + j + T (j // T)`, and G0's update of the previous mini-batch at the end of `2m + T - 1 + w (p - 1 - r)`.
    Turns have `T >= w (p - 1)` micro-batches. So the first turn is over by then, and the second begins later.
    """
    delay = 1 if chunk < schedule.stages else 0
    if schedule.options.get("fresh"):
        delay *= j < turn_of(schedule.stages, schedule.microbatches, schedule.options.get("warmup", 1))
    return predicted(schedule, delay) or Reads(delay, delay)


def paci(schedule: Schedule, chunk: int, j: int) -> Reads:
    return Reads(newest_delay(schedule, chunk, j), 0)


def weave(schedule: Schedule, chunk: int, j: int) -> Reads:
    """In units of a building block, forward `i` of a chunk is at `F + 6 i`, and update `t` after micro-batch
    `(t + 1) m - 1` is retired, at `R + 6 ((t + 1) m - 1)`. So forward `t m + j` finds
    `floor((t m + j + 1 - n) / m)` updates made, with `n = ceil((R - F) / 6)`, the chunk's micro-batches in flight.
    """
    in_flight = block_of(schedule).chunk(chunk).in_flight
    delay = max(0, math.ceil(Fraction(in_flight - 1 - j, schedule.microbatches)))
    return predicted(schedule, delay) or Reads(delay, delay)


def predicted(schedule: Schedule, delay: int) -> Reads | None:
    """The reads with prediction, where a forward has this delay; None without it."""
    if "predict" not in schedule.options:
        return None
    return Reads(delay, 0, delay) if schedule.options["predict"] == "exact" else Reads(delay, delay, delay, delay)


def xpipe(schedule: Schedule, chunk: int, j: int) -> Reads:
    n, m, r = schedule.stages, schedule.microbatches, chunk
    delay = newest_delay(schedule, r, 0)
    if schedule.options.get("versions") == "exact":
        return Reads(delay, 0, delay)
    return Reads(delay, 0, round_half_up((n + m - Fraction(r, 2) - 2) / m), round_half_up(Fraction(m + r // 2 - 1, m)))


def spectrain(schedule: Schedule, chunk: int, j: int) -> Reads:
    if schedule.options.get("versions") == "exact":
        return Reads(newest_delay(schedule, chunk, j), 0, newest_delay(schedule, chunk, j))
    ahead = chunk // 2
    return Reads(newest_delay(schedule, chunk, j), 0, ahead + schedule.stages - chunk - 1, ahead)


def pipeoptim(schedule: Schedule, chunk: int, j: int) -> Reads:
    if schedule.options.get("versions") == "exact":
        return spectrain(schedule, chunk, j)
    return Reads(newest_delay(schedule, chunk, j), 0, schedule.stages - chunk - 1)


LAWS: dict[str, Law] = {
    "gpipe": synchronous,
    "1f1b": synchronous,
    "interleaved": synchronous,
    "zb-h1": synchronous,
    "pipedream": pipedream,
    "2bw": two_buffered,
    "wpipe": wpipe,
    "paci": paci,
    "weave": weave,
    "xpipe": xpipe,
    "spectrain": spectrain,
    "pipeoptim": pipeoptim,
}


def in_flight_limit(schedule: Schedule, rank: int) -> float:
    """How many micro-batches a rank may hold between forward and backward, in units of whole stages.

    Infinite for a schedule without a law. Every stream is bounded, because each of its cycles ends as many
    micro-batches as it begins, but only a method defines the limit.
    """
    p, m, behind = schedule.stages, schedule.microbatches, schedule.stages - 1 - rank
    warmup: int = schedule.options.get("warmup", 1)
    chunks = schedule.chunks // p
    if schedule.name == "weave":
        return block_of(schedule).peak(rank) / 2
    limits: dict[str, float] = {
        "gpipe": m,
        "1f1b": min(m, p - rank),
        "interleaved": min(m, (1 + (behind if chunks == 1 else 2 * behind + (chunks - 1) * p)) / chunks),
        "zb-h1": min(m, p),
        "wpipe": (warmup * p + warmup * behind + 1) / 2,
    }
    if schedule.name in LAWS:
        return limits.get(schedule.name, warmup * behind + 1)
    return math.inf


def newest_delay(schedule: Schedule, rank: int, j: int) -> int:
    """Updates between the forward of micro-batch `j` and the update of its mini-batch, in asynchronous 1F1B."""
    return max(0, math.ceil(Fraction(schedule.stages - 1 - rank - j, schedule.microbatches)))


def block_of(schedule: Schedule) -> BuildingBlock:
    """The building block of a `weave`."""
    options = schedule.options
    return find_block(schedule.stages, options.get("slack", DEFAULT_SLACK), options.get("split", True))


def round_half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
