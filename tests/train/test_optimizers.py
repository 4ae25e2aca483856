"""Optimizers of jobs: by name, with the settings that they take, or a user's function of parameters or named ones."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.train.jobs import train, weights
from tests.train.models.test_pipelines import CASES

import weft
from weft.errors import WeftError
from weft.runtime.update import takes_names
from weft.train.job import OPTIMIZERS, Training
from weft.train.models import build_model
from weft.train.optimizers import CLASSES, optimizer_of

NAMED = """
import torch

def by_name(named_parameters, lr):
    norms = [parameter for name, parameter in named_parameters if "norm" in name]
    others = [parameter for name, parameter in named_parameters if "norm" not in name]
    return torch.optim.SGD([{"params": others}, {"params": norms, "weight_decay": 0.0}], lr=lr, weight_decay=0.1)

def misnamed(named_params, lr):
    return by_name(named_params, lr)

def plain(params, lr):
    return torch.optim.SGD(params, lr=lr)
"""


def test_every_optimizer_has_a_class() -> None:
    assert set(CLASSES) == set(OPTIMIZERS)
    pairs = [("layer.weight", torch.nn.Parameter(torch.ones(3, 2)))]
    for name in OPTIMIZERS:
        make = optimizer_of(Training(optimizer=name, lr=0.5))
        assert takes_names(make) == (name == "muon")
        assert type(made := make(pairs)) is CLASSES[name]
        assert made.param_groups[0]["lr"] == 0.5


def test_muon_takes_the_settings_of_a_job() -> None:
    settings = Training(optimizer="muon", lr=0.5, momentum=0.8, betas=[0.6, 0.7], weight_decay=0.3)
    pairs = [(name, torch.nn.Parameter(torch.ones(3, 2))) for name in ("layer0.linear.weight", "head.weight")]
    matrices, others = optimizer_of(settings)(pairs).param_groups
    assert (matrices["params"], others["params"]) == ([pairs[0][1]], [pairs[1][1]])
    assert (matrices["momentum"], others["betas"], others["weight_decay"]) == (0.8, (0.6, 0.7), 0.3)


def test_a_users_function_of_named_parameters(tmp_path: Path) -> None:
    file = tmp_path / "mine_named.py"
    file.write_text(NAMED)
    pairs = [(name, torch.nn.Parameter(torch.ones(2))) for name in ("layer.weight", "norm.weight")]
    make = optimizer_of(Training(optimizer=f"{file}:by_name", lr=0.5))
    assert takes_names(make)
    assert [group["weight_decay"] for group in make(pairs).param_groups] == [0.1, 0.0]
    with pytest.raises(WeftError, match=r"calls it named_params\); call it named_parameters, or params"):
        optimizer_of(Training(optimizer=f"{file}:misnamed"))
    plain = optimizer_of(replace(Training(), optimizer=f"{file}:plain"))
    assert not takes_names(plain)
    assert len(plain([parameter for _, parameter in pairs]).param_groups) == 1


def test_a_job_with_muon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shortened: dict[str, Any] = {"train__optimizer": "muon", "train__updates": 3, "train__warmup": 0}
    assert train(name="muon", **shortened) == 0
    assert train(name="other", train__momentum=0.5, **shortened) == 0
    found, other = weights(Path("runs/muon")), weights(Path("runs/other"))
    assert not torch.equal(found["layer7.linear.weight"], other["layer7.linear.weight"])


BLOCK = {"attention.qkv", "attention.projection", "feedforward.up", "feedforward.down"}
HIDDEN = {
    "gpt": BLOCK,
    "gpt-tied": BLOCK,
    "bert": BLOCK,
    "mlp": {"layer.linear"},
    "vgg": {"hidden.linear"},
    "resnet": set(),
}  # without numbers


@pytest.mark.parametrize("case", HIDDEN)
def test_hidden_matrices_of_models(case: str) -> None:
    options, spec = CASES[case]
    named = list(build_model(options, spec, seed=0).model.named_parameters())
    hidden = [name for name, parameter in named if weft.optimizers.is_hidden_matrix(name, parameter)]
    assert {re.sub(r"\d", "", name).removesuffix(".weight") for name in hidden} == HIDDEN[case]
