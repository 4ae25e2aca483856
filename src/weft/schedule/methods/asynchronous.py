"""Asynchronous 1F1B, one order of work for six methods: a forward and a backward in turn, without a flush.

Rank `r` is `p - 1 - r` forwards ahead of its backwards. A stage updates after a mini-batch's last backward and does
not wait for other stages. So there is no bubble, but a forward reads older weights than those its update changes.
The methods differ only in the weights they read. `p = 4, m = 4`:

    rank 0  1a 2a 3a 4a .  .  .  .  .  .  1A 1A 5a 2A 2A 6a 3A 3A 7a 4A 4A 8a 5A 5A 9a 6A 6A
    rank 1  .  1a 2a 3a .  .  .  .  1A 1A 4a 2A 2A 5a 3A 3A 6a 4A 4A 7a 5A 5A 8a 6A 6A 9a 7A
    rank 2  .  .  1a 2a .  .  1A 1A 3a 2A 2A 4a 3A 3A 5a 4A 4A 6a 5A 5A 7a 6A 6A 8a 7A 7A 9a
    rank 3  .  .  .  1a 1A 1A 2a 2A 2A 3a 3A 3A 4a 4A 4A 5a 5A 5A 6a 6A 6A 7a 7A 7A 8a 8A 8A
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from weft.errors import WeftError
from weft.schedule.actions import B, F, alternate
from weft.schedule.core import Schedule, check_sizes
from weft.schedule.weights import Versions, Weights, check_versions, predicting_weights


def pipedream(stages: int, microbatches: int, *, vertical_sync: bool = False) -> Schedule:
    """Weight stashing (Narayanan et al. 2019): a backward reads the weights of its forward."""
    if not isinstance(vertical_sync, bool):
        raise WeftError(f"vertical_sync must be True or False (got {vertical_sync!r})")
    if vertical_sync and microbatches != 1:
        raise WeftError(
            f"vertical sync is defined for mini-batches of one micro-batch (microbatches: {microbatches}); "
            "use 1, or omit vertical_sync"
        )
    return _async_1f1b(
        "pipedream",
        stages,
        microbatches,
        weights=Weights(delay=stages - 1 if vertical_sync else None),
        options={"vertical_sync": True} if vertical_sync else {},
    )


def two_buffered(stages: int, microbatches: int, *, warmup: int = 1, predict: Versions | None = None) -> Schedule:
    """PipeDream-2BW (Narayanan et al. 2021): every mini-batch is one update late, so two versions are enough.

    `warmup=2` runs twice as many forwards ahead, which hides the time of a hop but holds more activations. `predict`
    compensates for the delay instead of stashing versions.
    """
    check_sizes(stages=stages, microbatches=microbatches, warmup=warmup)
    # with fewer micro-batches, a forward would run before the update that makes its version
    least = max(stages, warmup * (stages - 1))
    if microbatches < least:
        raise WeftError(
            f"2bw needs {least} or more micro-batches for two weight versions to be enough "
            f"(microbatches: {microbatches}, stages: {stages}, warmup: {warmup}); use {least}"
        )
    options: dict[str, object] = {"warmup": warmup} if warmup != 1 else {}
    weights = Weights(delay=1)
    if predict is not None:
        weights, options["predict"] = predicting_weights(predict), predict
    return _async_1f1b("2bw", stages, microbatches, weights=weights, warmup=warmup, options=options)


def paci(stages: int, microbatches: int) -> Schedule:
    """PACI (arXiv 2606.07881): both passes read the newest weights, and mini-batches are long enough for little delay.

    With `m >= p`, only the first `p - 1 - r` forwards of a mini-batch are late, by one update. Backwards read the
    weights that the update changes, so their gradients are not those of any loss where the forward was late.
    """
    check_sizes(stages=stages, microbatches=microbatches)
    if microbatches < stages:
        raise WeftError(
            f"paci needs at least as many micro-batches as stages, so that no forward is more than one update late "
            f"(microbatches: {microbatches}, stages: {stages}); use {stages}"
        )
    return _async_1f1b("paci", stages, microbatches, weights=Weights(delay=None, backward="newest"))


def xpipe(stages: int, microbatches: int, *, versions: Versions = "published") -> Schedule:
    """XPipe (Guan et al. 2019): a mini-batch's first micro-batch predicts the weights for all of them.

    "published" predicts forward and backward as in the paper; "exact" counts the actual number of updates in
    between, so the backward needs no prediction: it runs at the weights that the update changes.
    """
    check_versions("versions", versions)
    check_sizes(stages=stages, microbatches=microbatches)
    p, m, ranks = stages, microbatches, range(stages)
    if versions == "exact":
        ahead, ahead_backward = tuple(-(-(p - 1 - r) // m) for r in ranks), (0,) * p
    else:  # rounded half up, computed in halves
        ahead = tuple((2 * (p + m - 2) - r + m) // (2 * m) for r in ranks)
        ahead_backward = tuple((2 * (m + r // 2 - 1) + m) // (2 * m) for r in ranks)
    weights = Weights(delay=None, backward="newest", ahead=ahead, ahead_backward=ahead_backward, bellwether=True)
    return _async_1f1b("xpipe", stages, microbatches, weights=weights, options=_versions_option(versions))


def spectrain(stages: int, microbatches: int, *, versions: Versions = "published") -> Schedule:
    """SpecTrain (Chen et al. 2018): every micro-batch predicts, from the newest weights, for both passes.

    "exact" counts the actual number of updates in between, also within a mini-batch of several micro-batches.
    """
    check_versions("versions", versions)
    check_sizes(stages=stages, microbatches=microbatches)
    weights = Weights(
        delay=None,
        backward="newest",
        ahead=tuple(rank // 2 + stages - rank - 1 for rank in range(stages)),
        ahead_backward=tuple(rank // 2 for rank in range(stages)),
    )
    if versions == "exact":
        weights = Weights(delay=None, backward="newest", ahead=None)
    return _async_1f1b("spectrain", stages, microbatches, weights=weights, options=_versions_option(versions))


def pipeoptim(stages: int, microbatches: int, *, versions: Versions = "published") -> Schedule:
    """PipeOptim (Guan et al. 2023): the forward predicts, the backward reads the newest weights.

    The published count is for mini-batches of one micro-batch; "exact" counts the actual number of updates in between.
    """
    check_versions("versions", versions)
    check_sizes(stages=stages, microbatches=microbatches)
    ahead = tuple(stages - rank - 1 for rank in range(stages)) if versions == "published" else None
    weights = Weights(delay=None, backward="newest", ahead=ahead)
    return _async_1f1b("pipeoptim", stages, microbatches, weights=weights, options=_versions_option(versions))


def _versions_option(versions: Versions) -> dict[str, object]:
    return {"versions": versions} if versions != "published" else {}


def _async_1f1b(
    name: str,
    stages: int,
    microbatches: int,
    *,
    weights: Weights,
    warmup: int = 1,
    options: Mapping[str, object] | None = None,
) -> Schedule:
    check_sizes(stages=stages, microbatches=microbatches)
    every = np.arange(microbatches)
    return Schedule(
        name=name,
        stages=stages,
        microbatches=microbatches,
        streams=(alternate(F(rank, every), B(rank, every - warmup * (stages - 1 - rank))) for rank in range(stages)),
        weights=weights,
        options=options,
    )
