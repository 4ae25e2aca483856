"""An option of `Pipeline` is described once, in `Settings`; the signature, and all that derives from it, agree."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import Any

import pytest
import torch

import weft
from weft.errors import WeftError
from weft.runtime.assembly import Settings
from weft.runtime.assembly.consistency import check


def settings(**options: Any) -> Settings:
    return Settings(loss_fn=torch.nn.functional.mse_loss, optimizer=torch.optim.SGD, **options)


def test_the_signature_of_pipeline_is_that_of_the_settings() -> None:
    parameters = inspect.signature(weft.Pipeline.__init__).parameters
    signature = {
        name: parameter.default for name, parameter in parameters.items() if name not in ("self", "model", "unknown")
    }
    described = {
        option.name: inspect.Parameter.empty if option.default is MISSING else option.default
        for option in fields(Settings)
    }
    assert signature == described


@pytest.mark.parametrize(
    ("schedule", "option", "problem"),
    [
        ("weave", {"slack": 0}, r'use schedule=weft.schedule\("weave", stages=2, microbatches=..., slack=0\)'),
        ("wpipe", {"fresh": True}, r'"wpipe", stages=2, microbatches=..., fresh=True\)'),
        ("2bw", {"split": False}, r'"weave", stages=2, microbatches=..., split=False\)'),
        ("wpipe", {"clipnorm": 1.0}, "unexpected keyword argument 'clipnorm', did you mean 'clip_norm'"),
    ],
)
def test_options_of_a_schedule_are_refused_with_the_line_that_works(
    schedule: str, option: dict[str, Any], problem: str
) -> None:
    given: dict[str, Any] = {"loss_fn": None, "optimizer": None, "stages": 2, "schedule": schedule}
    with pytest.raises((WeftError, TypeError), match=problem):
        weft.Pipeline([], **given, **option)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("replicas", 2),
        ("recompute", [True, False]),
        ("clip_norm", 1.0),
        ("precision", "bf16"),
        ("precision", "bf16-autocast"),
        ("nan", "skip"),
        ("max_skips", 3),
        ("seed", 1),
        ("predict", {"versions": "exact"}),
        ("cure", weft.cures.GapAware()),
    ],
)
def test_ranks_must_agree_on_what_decides_the_result(option: str, value: Any) -> None:
    """The error names the option and both values."""
    ranks = [{"settings": given.compared(), "model": []} for given in (settings(), settings(**{option: value}))]
    with pytest.raises(WeftError, match=rf"all ranks need the same {option} \(rank 0: .*, rank 1: .*\)"):
        check(ranks)
    check([ranks[1], ranks[1]])


def test_options_that_may_differ_between_ranks() -> None:
    """Where a rank computes and how long it waits changes no result."""
    assert settings(device="cpu", deadline=5.0, telemetry=3).compared() == settings().compared()


def test_a_checkpoint_records_replicas_precision_and_seed() -> None:
    given = {"replicas": 2, "precision": "bf16", "seed": 7}
    assert settings(**given).about() == given


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("recompute", 1, 'recompute is true, false or "layer", or one of them a chunk .got 1'),
        ("recompute", "layers", 'recompute is true, false or "layer", or one of them a chunk .got .layers.'),
        ("clip_norm", 0.0, "clip_norm is a number above 0"),
        ("norm", "all", 'norm is "group" or "global"'),
        ("norm", "global", 'norm="global" lets updates wait for a norm.*set one of them, or leave norm out'),
        ("deadline", float("inf"), "deadline is a number of seconds above 0"),
        ("seed", True, "seed is a whole number"),
        ("nan", "ignore", 'nan is "stop" or "skip"'),
        ("max_skips", 0, "max_skips must be a whole number of 1 or more"),
        ("max_skips", 2.5, "max_skips must be a whole number of 1 or more"),
        ("predict", {"version": "exact"}, "predict has no choice 'version', did you mean 'versions'"),
        ("telemetry", 0, "telemetry"),
    ],
)
def test_each_option_is_checked_before_anything_is_built(option: str, value: Any, problem: str) -> None:
    with pytest.raises(WeftError, match=problem):
        settings(**{option: value})
