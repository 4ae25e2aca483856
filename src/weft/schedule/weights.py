"""The weight policy: which weights each forward and backward reads.

A method is an order of work times a policy. A policy gives versions relative to the mini-batch: mini-batch `t` reads
version `max(0, t - delay)`, or the weights predicted `ahead` updates beyond that version.
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

    `delay`       the forward reads `W_{t-delay}`; None: the newest version on the rank when the forward runs
    `backward`    "forward": the backward reads the weights of its forward; "newest": the newest version when it runs
    `ahead`       the forward reads weights predicted this many updates beyond that version; None: as many as lie
                  in between, so it reads the weights that the mini-batch's update will change
    `ahead_backward`   the same for a backward with "newest"
    `bellwether`  the first micro-batch of a mini-batch selects (and predicts) the weights of all its micro-batches;
                  False: each micro-batch selects its own, and those of a mini-batch that keep the same prediction for
                  their backwards share it
    `norm`        "global": an update waits for the norm of the gradients of all chunks, and the streams are put in an
                  order that lets it (`norm_order.py`); "group": chunks that would have to wait have norms of their own

    `delay`, `ahead` and `ahead_backward` are one value for all chunks, or a tuple with one value per chunk.
    """

    delay: int | tuple[int | None, ...] | None = 0
    backward: Literal["forward", "newest"] = "forward"
    ahead: int | tuple[int | None, ...] | None = 0
    ahead_backward: int | tuple[int, ...] = 0
    bellwether: bool = False
    norm: Literal["group", "global"] = "group"

    def __post_init__(self) -> None:
        for name in ("delay", "ahead", "ahead_backward"):
            value = getattr(self, name)
            special = (None,) if name in ("delay", "ahead") else ()
            if any(entry not in special and (type(entry) is not int or entry < 0) for entry in _entries(value)):
                raise WeftError(f"Weights.{name} is a whole number from 0, or one per chunk (got {value!r})")
        if not isinstance(self.bellwether, bool):
            raise WeftError(f"Weights.bellwether is true or false (got {self.bellwether!r})")
        if self.backward not in ("forward", "newest"):
            raise WeftError(f'Weights.backward is "forward" or "newest" (got {self.backward!r})')
        if self.norm not in ("group", "global"):
            raise WeftError(f'Weights.norm is "group" or "global" (got {self.norm!r})')
        if self.backward == "forward" and any(_entries(self.ahead_backward)):
            raise WeftError(
                'Weights.ahead_backward needs backward="newest": otherwise a backward reads the weights of its forward'
            )

    def shares_predictions(self, chunk: int) -> bool:
        """Whether micro-batches of a mini-batch that predict equally far use one prediction."""
        return self.bellwether or (self.backward == "forward" and of_chunk(self.ahead, chunk) is None)

    def check(self, chunks: int) -> None:
        """Reject a policy for another number of chunks."""
        for name in ("delay", "ahead", "ahead_backward"):
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != chunks:
                raise WeftError(
                    f"Weights.{name} needs one value per chunk (values: {len(value)}, chunks: {chunks}); "
                    "use a single number for all chunks"
                )


def predicting_weights(versions: object, *, bellwether: bool = True) -> Weights:
    """The policy that adds prediction to an order of work: every chunk reads the weights that its update will change.

    The first micro-batch of a mini-batch (without `bellwether`: each of them) predicts from the newest version, as
    many updates ahead as lie in between. The backward reads the same weights ("published"), or the newest ("exact"),
    which are those that the update is applied to; then nothing is kept from forward to backward.
    """
    check_versions("predict", versions)
    backward: Literal["forward", "newest"] = "newest" if versions == "exact" else "forward"
    return Weights(delay=None, ahead=None, backward=backward, bellwether=bellwether)


def check_versions(name: str, versions: object) -> None:
    if versions not in ("published", "exact"):
        raise WeftError(f"{name} must be published or exact (got {versions!r})")


def of_chunk(value: Value | tuple[Value, ...], chunk: int) -> Value:
    return value[chunk] if isinstance(value, tuple) else value


def _entries(value: object) -> tuple[object, ...]:
    return value if isinstance(value, tuple) else (value,)
