"""The law: what each method reads, as formulas, one function a method.

For micro-batch `j` of a mini-batch `t` in a chunk, the forward and the backward read version `t - delay`,
predicted `ahead` updates beyond it. The verifier holds every lowered schedule against these numbers; the
lowering itself does not use them but counts updates in the order of work.
"""

from __future__ import annotations

from collections.abc import Callable
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
    return Reads(1, 1)


def wpipe(schedule: Schedule, chunk: int, j: int) -> Reads:
    late = 1 if chunk < schedule.stages else 0
    return Reads(late, late)


def xpipe(schedule: Schedule, chunk: int, j: int) -> Reads:
    versions = schedule.options.get("versions", "published")
    return Reads(
        newest(schedule, chunk, 0),
        0,
        xpipe_forward(schedule.stages, schedule.microbatches, chunk, versions),
        xpipe_backward(schedule.microbatches, chunk, versions),
    )


def spectrain(schedule: Schedule, chunk: int, j: int) -> Reads:
    ahead = chunk // 2
    return Reads(newest(schedule, chunk, j), 0, ahead + schedule.stages - chunk - 1, ahead)


def pipeoptim(schedule: Schedule, chunk: int, j: int) -> Reads:
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

    A schedule without a law may hold all that its window of mini-batches has under way.
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
    latest = min(int(rows["index"].min(initial=0)) for rows in schedule.streams)
    return m * (1 - latest // m)


def newest(schedule: Schedule, rank: int, j: int) -> int:
    """Updates between micro-batch `j`'s forward and its own mini-batch's, under asynchronous 1F1B."""
    return max(0, ceil_div(schedule.stages - 1 - rank - j, schedule.microbatches))


def xpipe_forward(stages: int, microbatches: int, rank: int, versions: str) -> int:
    if versions == "exact":
        return ceil_div(stages - 1 - rank, microbatches)
    return round_half_up(2 * (stages + microbatches - 2) - rank, 2 * microbatches)


def xpipe_backward(microbatches: int, rank: int, versions: str) -> int:
    return 0 if versions == "exact" else round_half_up(microbatches + rank // 2 - 1, microbatches)


def ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)


def round_half_up(numerator: int, denominator: int) -> int:
    return (2 * numerator + denominator) // (2 * denominator)
