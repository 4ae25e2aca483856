"""The law with an optimizer that knows names: Muon for hidden matrices and AdamW for the rest, in every chunk.

The oracle has its own Muon, by singular value decomposition in float64. weft iterates in float32, so the weights agree
to rounding, which five iterations multiply: 1e-5 of the largest weight.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.helpers.models import (
    MUON,
    OPTIMIZERS,
    Case,
    ask_oracle,
    batches,
    build,
    check,
    check_law,
    distance,
    expected,
    is_hidden,
    loss_fn,
    train,
)
from tests.helpers.muon_by_hand import MuonByHand
from torch import nn

import weft

ROUNDING = 1e-5
MuonCase = partial(Case, optimizer="muon")
CASES = [
    MuonCase(method="1f1b", stages=2, microbatches=2, model="conv"),
    MuonCase(method="1f1b", stages=4, microbatches=4, model="transformer", clip_norm=0.2),
    MuonCase(method="2bw", stages=4, microbatches=4, lr_scheduler="halved"),
    MuonCase(method="2bw", stages=2, microbatches=2, model="transformer", replicas=2),
    MuonCase(method="wpipe", stages=4, microbatches=4, model="transformer"),  # chunks of norms have no matrix
    MuonCase(method="wpipe", stages=2, microbatches=4, options=(("fresh", True),), flushes=(3,)),
    MuonCase(method="wpipe", stages=2, microbatches=2, model="transformer", replicas=2, clip_norm=0.2),
    MuonCase(method="weave", stages=2, microbatches=4, model="transformer"),
    MuonCase(method="pipedream", stages=4, microbatches=1),
    MuonCase(method="wpipe", stages=2, microbatches=2, precision="bf16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_muon_keeps_the_law(case: Case) -> None:
    check(case, within=ROUNDING if case.precision == "fp32" else 1e-3)  # a bf16 weight may round the other way


@pytest.mark.parametrize("ranks", [2, 4])
def test_real_ranks_keep_the_law(launch: Callable[..., list[Any]], ranks: int) -> None:
    case = MuonCase(method="wpipe", stages=2, microbatches=4, model="transformer", replicas=ranks // 2)
    for run in launch(train, case, ranks=ranks):
        check_law(run, case, within=ROUNDING)


@pytest.mark.parametrize("model", ["mlp", "transformer"])
def test_another_law_or_choice_of_matrices_differs(model: str) -> None:
    case = MuonCase(method="wpipe", stages=2, microbatches=2, model=model)
    law = expected(case)
    assert distance(law, ask_oracle(case, shift=lambda k, j: 1)) > 1e-3
    assert distance(law, ask_oracle(case, forgetful=True)) > 1e-3
    for layer in range(8):
        if any(name.startswith(f"{layer}.") and p.ndim == 2 for name, p in build(model).named_parameters()):
            wrong = partial(differing, layer)
            assert distance(law, ask_oracle(case, optimizer=partial(MuonByHand, **MUON | {"hidden": wrong}))) > 1e-3


def differing(layer: int, name: str, parameter: nn.Parameter) -> bool:
    """The other choice for the matrices of a layer."""
    return is_hidden(name, parameter) != (name.startswith(f"{layer}.") and parameter.ndim == 2)


# Names


def names_given(**options: Any) -> list[list[str]]:
    """What the optimizers of this process are given, in calls; and what the state has."""
    given: list[list[str]] = []

    def named(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        given.append([name for name, _ in named_parameters])
        return torch.optim.SGD(named_parameters, lr=0.1)  # which keeps the names

    with weft.Pipeline(
        build("transformer"), loss_fn=loss_fn, optimizer=named, schedule="wpipe", microbatches=2, **options
    ) as pipe:
        for inputs, targets in batches("transformer", 3):
            pipe.step(inputs, targets)
        pipe.flush()
        state = pipe.state_dict()
        for built in pipe._assembly.chunks.values():
            for parameter_set in built.chunk.sets:
                groups = [] if parameter_set.optimizer is None else parameter_set.optimizer.param_groups
                for group in groups:
                    for name, parameter in zip(group["param_names"], group["params"], strict=True):
                        assert torch.equal(parameter.detach(), state[name])
    return given


def test_every_rank_is_given_the_names_of_the_state(launch: Callable[..., list[Any]]) -> None:
    virtual = names_given(stages=2)
    names = [name for names in virtual for name in names]
    assert sorted(names) == sorted([name for name, _ in build("transformer").named_parameters()] + ["0.weight"])
    assert virtual.count(["0.weight"]) == 2  # tied: in the first and the last chunk, under its first name
    real = launch(names_given, ranks=2)
    assert sorted(names for rank in real for names in rank) == sorted(virtual)
    assert all(real)
    assert sorted(names_given(stages=2, replicas=2)) == sorted(2 * virtual)


def test_names_of_a_model_that_is_cut() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.body:
                x = layer(x).tanh()
            return x

    model, given = Net(), list[str]()

    def named(named_parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        given.extend(name for name, _ in named_parameters)
        return OPTIMIZERS["sgd"](parameter for _, parameter in named_parameters)

    options: dict[str, Any] = {"cut": ["body.1", "body.2", "body.3"], "example": torch.ones(4, 16)}
    weft.Pipeline(model, loss_fn=loss_fn, optimizer=named, schedule="wpipe", microbatches=2, stages=2, **options)
    assert given == list(model.state_dict())


def test_a_class_and_its_arguments() -> None:
    case = Case(method="wpipe", stages=2, microbatches=2, optimizer="adamw")
    for make in (
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        lambda named_parameters: torch.optim.AdamW(named_parameters, lr=0.01, weight_decay=0.1),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(OPTIMIZERS, "adamw", make)
            ran = train(case)
        assert distance(ran, expected(case)) == 0
