"""The law: what each method reads, as formulas, one function a method.

For micro-batch `j` of a mini-batch `t` in a chunk, the forward and the backward read version `t - delay`,
predicted `ahead` updates beyond it. The verifier holds every lowered schedule against these numbers; the
lowering itself does not use them but counts updates in the order of work.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

from weft.schedule.core import Schedule


class Reads(NamedTuple):
    """How far behind (`delay`) the weights are that a pass reads, and how far ahead they are predicted."""

    forward: int
    backward: int
    ahead: int = 0
    ahead_backward: int = 0


Law = Callable[[Schedule, int, int], Reads]


def synchronous(schedule: Schedule, chunk: int, j: int) -> Reads:
    return Reads(0, 0)


def pipedream(schedule: Schedule, chunk: int, j: int) -> Reads:
    behind = schedule.stages - 1 if schedule.options.get("vertical_sync") else newest(schedule, chunk, j)
    return Reads(behind, behind)


def two_buffered(schedule: Schedule, chunk: int, j: int) -> Reads:
    behind = math.ceil(
        Fraction(schedule.options.get("warmup", 1) * (schedule.stages - 1 - chunk), schedule.microbatches)
    )
    return predicted(schedule, behind) or Reads(1, 1)


def wpipe(schedule: Schedule, chunk: int, j: int) -> Reads:
    late = 1 if chunk < schedule.stages else 0
    return predicted(schedule, late) or Reads(late, late)


def predicted(schedule: Schedule, behind: int) -> Reads | None:
    """What prediction makes of an order whose first micro-batch is so many updates behind."""
    if "predict" not in schedule.options:
        return None
    return Reads(behind, 0, behind) if schedule.options["predict"] == "exact" else Reads(behind, behind, behind, behind)


def xpipe(schedule: Schedule, chunk: int, j: int) -> Reads:
    n, m, r = schedule.stages, schedule.microbatches, chunk
    behind = newest(schedule, r, 0)
    if schedule.options.get("versions") == "exact":
        return Reads(behind, 0, behind)
    return Reads(behind, 0, round_half_up((n + m - Fraction(r, 2) - 2) / m), round_half_up(Fraction(m + r // 2 - 1, m)))


def spectrain(schedule: Schedule, chunk: int, j: int) -> Reads:
    if schedule.options.get("versions") == "exact":
        return Reads(newest(schedule, chunk, j), 0, newest(schedule, chunk, j))
    ahead = chunk // 2
    return Reads(newest(schedule, chunk, j), 0, ahead + schedule.stages - chunk - 1, ahead)


def pipeoptim(schedule: Schedule, chunk: int, j: int) -> Reads:
    if schedule.options.get("versions") == "exact":
        return spectrain(schedule, chunk, j)
    return Reads(newest(schedule, chunk, j), 0, schedule.stages - chunk - 1)


LAWS: dict[str, Law] = {
    "gpipe": synchronous,
    "1f1b": synchronous,
    "interleaved": synchronous,
    "zb-h1": synchronous,
    "pipedream": pipedream,
    "2bw": two_buffered,
    "wpipe": wpipe,
    "xpipe": xpipe,
    "spectrain": spectrain,
    "pipeoptim": pipeoptim,
}


def in_flight_limit(schedule: Schedule, rank: int) -> float:
    """Micro-batches that a rank may hold between forward and backward, in whole stages.

    Any stream is bounded, for each of its cycles ends as many micro-batches as it begins; without a law, there is
    no figure to hold it to.
    """
    p, m, behind = schedule.stages, schedule.microbatches, schedule.stages - 1 - rank
    warmup: int = schedule.options.get("warmup", 1)
    chunks = schedule.chunks // p
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


def newest(schedule: Schedule, rank: int, j: int) -> int:
    """Updates between micro-batch `j`'s forward and its own mini-batch's, under asynchronous 1F1B."""
    return max(0, math.ceil(Fraction(schedule.stages - 1 - rank - j, schedule.microbatches)))


def round_half_up(value: Fraction) -> int:
    return math.floor(value + Fraction(1, 2))
