"""Which chunks of a schedule are recomputed: not at all, as a whole, or layer by layer.

And which options need the weights of the forward in its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

from weft.errors import WeftError
from weft.schedule.actions import Op
from weft.schedule.core import Schedule

RecomputeChoice: TypeAlias = "bool | Literal['layer']"  # of one chunk


def is_recompute_choice(value: Any) -> bool:
    return isinstance(value, bool) or value == "layer"


def check_recompute(value: Any) -> None:
    """Refuse what is neither a choice nor a list."""
    if not is_recompute_choice(value) and (isinstance(value, str) or not isinstance(value, Sequence)):
        raise WeftError(f'recompute is true, false or "layer", or one of them a chunk (got {value!r})')


def splits_backwards(schedule: Schedule) -> bool:
    """Whether some backward runs in two halves, I and W."""
    return any(bool((stream["op"] == Op.I).any()) for stream in schedule.streams)


def recompute_choices(given: RecomputeChoice | Sequence[RecomputeChoice], schedule: Schedule) -> list[RecomputeChoice]:
    """The choice of each chunk."""
    check_recompute(given)
    choices = [given] * schedule.chunks if isinstance(given, bool | str) else list(given)
    if len(choices) != schedule.chunks or not all(map(is_recompute_choice, choices)):
        raise WeftError(
            f'recompute is true, false or "layer", or one of them a chunk (got {choices}, chunks: {schedule.chunks})'
        )
    if "layer" in choices and splits_backwards(schedule):
        whole = "weave without split" if schedule.name == "weave" else "1f1b"
        raise WeftError(
            f"{schedule.name} splits backwards and keeps the inputs and gradients of all layers for the gradients of "
            "weights, so recompute by layer would save little; recompute whole chunks, or use a schedule "
            f"with whole backwards, such as {whole}"
        )
    if any(choices):
        _need_weights_of_forward(
            schedule, "so a forward can't be computed again for its backward", remedy="leave recompute out"
        )
    return choices


def check_autocast(schedule: Schedule) -> None:
    """Refuse precision="bf16-autocast" where it would compute gradients at the wrong weights."""
    _need_weights_of_forward(
        schedule, "but what autocast saves are casts of the forward's weights", remedy='use precision="bf16"'
    )


def _need_weights_of_forward(schedule: Schedule, reason: str, *, remedy: str) -> None:
    if schedule.weights.backward != "forward":
        raise WeftError(
            f"{schedule.name} runs backwards at other weights than their forwards, {reason}; {remedy}, or use a "
            "schedule whose backward is at its forward's weights, such as wpipe or 2bw, with prediction or without"
        )
