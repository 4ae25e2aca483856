"""The methods by name, and `schedule(name, stages=, microbatches=)`, which builds one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.errors import WeftError
from weft.schedule.core import Schedule, check_sizes, check_work
from weft.schedule.methods import (
    gpipe,
    interleaved,
    one_f_one_b,
    paci,
    pipedream,
    pipeoptim,
    spectrain,
    two_buffered,
    weave,
    wpipe,
    xpipe,
    zb_h1,
)
from weft.text import did_you_mean

PREDICT = "use predict, which is published or exact"
VERSIONS = "it always predicts; use versions, which is published or exact"
NEWEST = "forwards always read the newest version"
PREDICTION_OPTIONS = ("versions", "predict")
KEYWORD_ONLY = inspect.Parameter.KEYWORD_ONLY


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method and its row in the table of methods."""

    build: Callable[..., Schedule]
    asynchronous: bool
    needs: str  # rule for the number of micro-batches
    weights: str  # forward; backward
    summary: str
    instead: Mapping[str, str] = field(default_factory=dict)  # for an option that it lacks: what to use
    variants: tuple[Mapping[str, Any], ...] = ()  # options with which tables of figures show it, too

    @property
    def options(self) -> dict[str, Any]:
        """The options besides stages and microbatches, with their defaults."""
        parameters = inspect.signature(self.build).parameters.values()
        return {parameter.name: parameter.default for parameter in parameters if parameter.kind is KEYWORD_ONLY}

    @property
    def prediction_option(self) -> str | None:
        """Its option that counts predicted versions: `versions` if it always predicts, `predict` if it can."""
        return next((option for option in PREDICTION_OPTIONS if option in self.options), None)


METHODS: dict[str, Method] = {
    "gpipe": Method(
        build=gpipe,
        asynchronous=False,
        needs="any",
        weights="W(t); same",
        summary="all forwards, then all backwards",
    ),
    "1f1b": Method(
        build=one_f_one_b,
        asynchronous=False,
        needs="any",
        weights="W(t); same",
        summary="GPipe's time with at most p - r micro-batches in flight",
    ),
    "interleaved": Method(
        build=interleaved,
        asynchronous=False,
        needs="multiple of p",
        weights="W(t); same",
        summary="v chunks per rank, idle time divided by v",
    ),
    "zb-h1": Method(
        build=zb_h1,
        asynchronous=False,
        needs="any",
        weights="W(t); same",
        summary="weight gradients fill the bubble, which leaves a third of the idle time",
    ),
    "pipedream": Method(
        build=pipedream,
        asynchronous=True,
        needs="any",
        weights="newest; same",
        summary="no bubble, up to p - r - 1 stashed versions",
        instead={"fresh": NEWEST},
    ),
    "2bw": Method(
        build=two_buffered,
        asynchronous=True,
        needs=">= p",
        weights="W(t-1); same",
        summary="no bubble, two versions, one update late",
        variants=({"warmup": 2},),
        instead={
            "fresh": "2bw with fresh reads is pipedream with at least as many micro-batches as stages",
            "versions": PREDICT,
        },
    ),
    "wpipe": Method(
        build=wpipe,
        asynchronous=True,
        needs="multiple of p",
        weights="G0 W(t-1), G1 W(t); same",
        summary="no bubble, half of 2bw's extra weights and delay; fresh: less delay",
        variants=({"fresh": True}, {"warmup": 2}, {"warmup": 2, "fresh": True}),
        instead={"versions": PREDICT},
    ),
    "paci": Method(
        build=paci,
        asynchronous=True,
        needs=">= p",
        weights="newest; newest",
        summary="no bubble, no extra versions; the two passes read different weights",
        instead={"fresh": NEWEST},
    ),
    "weave": Method(
        build=weave,
        asynchronous=True,
        needs="4p/3 suffice",
        weights="newest; same",
        summary="no bubble, about p/3 (slack 0) to 2p/3 micro-batches in flight, few of them late",
        variants=({"slack": 0}, {"split": False}),
        instead={"versions": PREDICT, "fresh": NEWEST},
    ),
    "xpipe": Method(
        build=xpipe,
        asynchronous=True,
        needs="any",
        weights="predicted; predicted",
        summary="no bubble, no stash: the bellwether predicts the weights",
        instead={"predict": VERSIONS},
    ),
    "spectrain": Method(
        build=spectrain,
        asynchronous=True,
        needs="any",
        weights="predicted; predicted",
        summary="every micro-batch predicts, for both passes",
        instead={"predict": VERSIONS},
    ),
    "pipeoptim": Method(
        build=pipeoptim,
        asynchronous=True,
        needs="any",
        weights="predicted; newest",
        summary="the forward predicts, the backward reads the newest",
        instead={"predict": VERSIONS},
    ),
}


def schedule(name: str, *, stages: int, microbatches: int, **options: Any) -> Schedule:
    """Build the schedule of a method, such as `weft.schedule("wpipe", stages=4, microbatches=8)`."""
    if name not in METHODS:
        raise WeftError(f"there is no schedule {name!r}{did_you_mean(name, METHODS)}; known: {', '.join(METHODS)}")
    method = METHODS[name]
    for option in options:
        if option not in method.options:
            known = ", ".join(method.options) or "none"
            raise WeftError(f"{name} has no option {option!r}{_hint(method, option)}; its options are: {known}")
    check_sizes(stages=stages, microbatches=microbatches)
    check_work(stages=stages, microbatches=microbatches, chunks=stages)
    return method.build(int(stages), int(microbatches), **options)


def _hint(method: Method, option: str) -> str:
    """For an option that a method lacks: what to use, whose it is, or one with a similar name."""
    if option in method.instead:
        return f" ({method.instead[option]})"
    owners = methods_with(option)
    return f" (it is an option of {', '.join(owners)})" if owners else did_you_mean(option, method.options)


def methods_with(option: str) -> list[str]:
    """The methods that have an option."""
    return [name for name, method in METHODS.items() if option in method.options]


def predicting_methods() -> list[str]:
    """The methods that predict weights, always or on request."""
    return [name for name, method in METHODS.items() if method.prediction_option is not None]
