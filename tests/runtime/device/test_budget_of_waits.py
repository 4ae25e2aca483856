"""The budget of waits: the table in docs/gpus.md, cell by cell, and controls that exceed it.

Virtual ranks on the pretend device, in full swing: what a step computes is complete about half a step later. `make
test` runs some cells of every row and column, `make test-all` all of them.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.device_runs import CHANCE, ROWS, Case, Targets, batch, loss_fn, pipeline
from tests.helpers.prediction_cases import LINEAR
from tests.helpers.pretend.processes import in_process
from tests.helpers.waits import COUNTED, counting_waits, waits_of
from torch import Tensor, nn

import weft
from weft.runtime.device import Uploads
from weft.runtime.engine.completions import Completions
from weft.schedule import METHODS

PAGE = Path(__file__).parents[3] / "docs" / "gpus.md"
OPTIONS: dict[str, dict[str, Any]] = {  # by the first cell of a row
    "none": {},
    "`clip_norm`": {"clip_norm": 0.1},
    "`replicas=2`": {"replicas": 2},
    "`replicas=2`, `clip_norm`": {"replicas": 2, "clip_norm": 0.1},
    "tied weights": {"model": "transformer"},
    "tied weights, `clip_norm`": {"model": "transformer", "clip_norm": 0.1},
    "BatchNorm": {"model": "conv"},
    "`recompute=True`": {"recompute": True},
    '`recompute="layer"`': {"recompute": "layer"},
    '`precision="bf16"`': {"precision": "bf16"},
    '`precision="bf16-autocast"`': {"precision": "bf16-autocast"},
    "`lr_scheduler`": {"lr_scheduler": "halved"},
    "`telemetry=1`": {"telemetry": 1},
    '`predict={"versions": "exact"}`': {"treatment": "exact"},
    '`predict={"extrapolation": "decayed"}`': {"treatment": "decayed"},
    "`cure=GapAware()`": {"treatment": "gapaware"},
    "`cure=Optimistic()`": {"treatment": "optimistic"},
    "`cure=PipeMare(…)`": {"treatment": "pipemare", "stages": 4},
    '`nan="skip"`': {"nan": "skip"},
    '`nan="skip"`, `clip_norm`': {"nan": "skip", "clip_norm": 0.1},
}


def table() -> list[tuple[str, str, str]]:
    """Option, method and budget of each cell in the docs."""
    section = PAGE.read_text("utf-8").partition("## How often the host waits")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    (_, *methods), _, *rows = rows
    return [
        (option, method.strip("`"), cell)
        for option, *cells in rows
        for method, cell in zip(methods, cells, strict=True)
    ]


def cells() -> list[Any]:
    """Those that weft accepts; all but a fifth of them are slow."""
    names = list(OPTIONS), list(METHODS)
    return [
        pytest.param(*cell, id=re.sub("[^a-z0-9]+", "-", f"{cell[1]} {cell[0]}".lower()).strip("-"), marks=marks)
        for cell in table()
        if cell[2] != "–"
        for marks in [[] if (names[0].index(cell[0]) + names[1].index(cell[1])) % 5 == 0 else [pytest.mark.slow]]
    ]


def updates_of(case: Case) -> int:
    """Updates of a mini-batch, one for each parameter set of all chunks."""
    with pipeline(case, "cpu") as pipe:
        return sum(len(chunk.sets) for worker in pipe._driver.workers for chunk in worker.chunks.values())


@pytest.mark.parametrize(("option", "method", "budget"), cells())
@in_process
def test_the_table(option: str, method: str, budget: str) -> None:
    case = Case(method=method, **OPTIONS[option])
    counted = waits_of(case)
    if budget == "0":
        assert counted.total == 0, counted.where
    else:
        assert budget == "≤ 1"
        assert set(counted.kinds) == {"device"}, counted.where
        assert 0 < counted.total <= COUNTED * updates_of(case)


def test_the_table_has_every_option_and_method() -> None:
    found = {(option, method): budget for option, method, budget in table()}
    assert set(found) == {(option, method) for option in OPTIONS for method in METHODS}
    allowed = {cell: Case(method=cell[1], **OPTIONS[cell[0]]).is_allowed for cell in found}
    assert {cell for cell, budget in found.items() if budget != "–"} == {cell for cell in allowed if allowed[cell]}
    assert {cell for cell, budget in found.items() if budget == "≤ 1"} == {
        cell for cell in allowed if allowed[cell] and "skip" in cell[0]
    }


# Optimizers


def without_bias() -> nn.Sequential:
    """Muon is for matrices."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(4)]
    return nn.Sequential(*(nn.Sequential(layer, nn.Tanh(), nn.Dropout(CHANCE)) for layer in layers))


FAST = ["momentum", "adamw", "fused-adamw", "nadam", "muon", "hidden-matrices"]  # the others are slow
EVERY: dict[str, Callable[..., torch.optim.Optimizer]] = LINEAR | {"nadamw": weft.cures.NAdamW}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in EVERY]
)
@in_process
def test_predictions_wait_for_nothing(name: str) -> None:
    """Of every optimizer with a rule, with rates that change."""
    for treatment in ("none", "decayed"):
        case = Case(method="xpipe", treatment=treatment, lr_scheduler="halved")
        with mock.patch.dict("tests.helpers.device_runs.MODELS", mlp=without_bias):
            counted = waits_of(case, optimizer=EVERY[name], balance=[2, 2])
        assert counted.total == 0, counted.where


@in_process
def test_rates_on_a_device_are_read_when_they_change() -> None:
    """By each rank, once per update; not at all while they stay."""

    def adam(params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=torch.tensor(0.01, device=params[0].device), capturable=True)

    case = Case(method="xpipe")
    assert waits_of(case, optimizer=adam).total == 0
    counted = waits_of(replace(case, lr_scheduler="halved"), optimizer=adam)
    assert set(counted.kinds) == {"item"}
    assert 0 < counted.total <= COUNTED * updates_of(case)


# Evaluation


@in_process
def test_evaluation_waits_at_its_end_only() -> None:
    """Of any number of batches: for the last scores; the flush before it reads the last losses."""
    controls = pretend.load()
    with pipeline(Case(method="wpipe"), "pretend:0") as pipe:
        before = controls.launches()
        pipe.evaluate([batch("mlp", 0, ROWS)])
        controls.set_lag((controls.launches() - before) // 2)
        pipe.step(*batch("mlp", 0, ROWS))
        pipe.flush()
        totals = []
        for batches in (1, 4, 8):
            with counting_waits() as counted:
                pipe.evaluate([batch("mlp", number, ROWS) for number in range(batches)])
            assert set(counted.kinds) == {"device"}, counted.where
            totals.append(counted.total)
    assert totals == [totals[0]] * 3
    assert totals[0] <= 2  # ranks


# Controls


@in_process
def test_a_loss_function_that_reads_a_number_is_counted() -> None:
    def reading(output: Tensor, target: Targets) -> Tensor:
        loss = loss_fn(output, target)
        assert loss.item() > 0
        return loss

    case = Case(method="wpipe")
    counted = waits_of(case, loss_fn=reading)
    assert counted.kinds == {"item": COUNTED * case.microbatches}
    assert "reading" in counted.where


@in_process
def test_blocking_copies_of_inputs_are_counted() -> None:
    def move(self: Uploads, tensors: list[Tensor], *, copy: bool) -> list[Tensor]:
        return [tensor.to("pretend:0") for tensor in tensors]

    case = Case(method="wpipe")
    with mock.patch.object(Uploads, "move", move):
        counted = waits_of(case)
    assert counted.kinds == {"copy to device": COUNTED * 3 * case.microbatches}  # inputs, classes and factors


@in_process
def test_losses_that_are_read_at_once_are_counted() -> None:
    def on_time(**options: Any) -> Completions:
        return Completions(**options | {"late": False})

    with mock.patch("weft.runtime.engine.worker.Completions", on_time):
        counted = waits_of(Case(method="wpipe"))
    assert set(counted.kinds) == {"device"}
    assert counted.total > COUNTED


@in_process
def test_counters_that_are_read_from_the_device_are_counted() -> None:
    with mock.patch("weft.runtime.update.predictor.on_device", return_value=False):
        counted = waits_of(Case(method="xpipe", optimizer="adamw-fused"))
    assert counted.kinds["item"] > COUNTED
