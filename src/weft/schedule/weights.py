"""The weight policy: which weights each forward and backward reads.

A method is an order of work times a policy. A policy never names a version by number: mini-batch `t` reads
version `max(0, t - delay)`, and, where it predicts, the weights `ahead` updates beyond that version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar

from weft.errors import WeftError

Value = TypeVar("Value", int, "int | None")
Versions: TypeAlias = Literal["published", "exact"]


@dataclass(frozen=True, kw_only=True)
class Weights:
    """Which weights a micro-batch of mini-batch `t` reads in each chunk.

    `delay`       forward at `W_{t-delay}`; None: at the newest version on the rank when the forward runs
    `backward`    "forward": at the weights of its forward; "newest": at the newest version when it runs
    `ahead`       forward at weights predicted that many updates beyond that version; None: as many as lie between,
                  so that the weights are those that the mini-batch's own update meets
    `ahead_backward`   the same for a backward at the newest version
    `bellwether`  a mini-batch's first micro-batch chooses (and predicts) for all; False: each for itself

    `delay`, `ahead` and `ahead_backward` are one value for all chunks, or a tuple of one a chunk.
    """

    delay: int | tuple[int | None, ...] | None = 0
    backward: Literal["forward", "newest"] = "forward"
    ahead: int | tuple[int | None, ...] | None = 0
    ahead_backward: int | tuple[int, ...] = 0
    bellwether: bool = False

    def __post_init__(self) -> None:
        for name in ("delay", "ahead", "ahead_backward"):
            value = getattr(self, name)
            counted = (None,) if name in ("delay", "ahead") else ()
            if any(one not in counted and (type(one) is not int or one < 0) for one in _each(value)):
                raise WeftError(f"Weights.{name} is a whole number from 0, or one a chunk (got {value!r})")
        if not isinstance(self.bellwether, bool):
            raise WeftError(f"Weights.bellwether is true or false (got {self.bellwether!r})")
        if self.backward not in ("forward", "newest"):
            raise WeftError(f'Weights.backward is "forward" or "newest" (got {self.backward!r})')
        if self.backward == "forward" and any(_each(self.ahead_backward)):
            raise WeftError(
                'Weights.ahead_backward needs backward="newest": a backward at its forward\'s weights predicts nothing'
            )

    def check(self, chunks: int) -> None:
        """Refuse a policy that speaks of another number of chunks."""
        for name in ("delay", "ahead", "ahead_backward"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != chunks:
                raise WeftError(
                    f"Weights.{name} needs one value a chunk (values: {len(value)}, chunks: {chunks}); "
                    "one number serves all chunks"
                )


def predicting_weights(versions: object) -> Weights:
    """What prediction adds to an order that has none: every chunk reads what its own update will meet.

    A mini-batch's first micro-batch predicts, from the newest version, as many updates ahead as lie between. The
    backward is at the same weights ("published", as the order's own backward is at its forward's), or at the newest
    ("exact"), which are those that the update is applied to: then nothing is kept from forward to backward.
    """
    check_versions("predict", versions)
    return Weights(delay=None, ahead=None, backward="newest" if versions == "exact" else "forward", bellwether=True)


def check_versions(name: str, versions: object) -> None:
    if versions not in ("published", "exact"):
        raise WeftError(f"{name} is published or exact (got {versions!r})")


def of_chunk(value: Value | tuple[Value, ...], chunk: int) -> Value:
    return value[chunk] if isinstance(value, tuple) else value


def _each(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)
