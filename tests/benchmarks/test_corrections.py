"""The corrections of the study of convergence do what their formulas say."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.helpers.models import BALANCE, batches, build, loss_fn
from tests.helpers.oracle import Oracle, delays
from torch import Tensor

import weft
from benchmarks.convergence.corrections import (
    CURES,
    OPTIMIZERS,
    DelayCompensation,
    RotatedAdamW,
    SpikeCompensation,
    nesterov,
)
from benchmarks.convergence.methods import CANDIDATE, CANDIDATES, PLAIN
from benchmarks.convergence.plan import Run, Settings
from benchmarks.convergence.training import train
from weft.train.job import Training

UPDATES, STAGES = 8, 2
ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.99), "weight_decay": 0.1}
RUN = Run(study="text", method=CANDIDATE, correction=PLAIN, settings=Settings(rate=2e-3), updates=6, seed=0)


def weights(cure: Any = None, later: int = 1) -> dict[str, Tensor]:
    """After training a small model; its late half is `later` updates late."""
    schedule = weft.schedule("wpipe", stages=STAGES, microbatches=STAGES)
    if later > 1:
        delay = tuple(later * (chunk < STAGES) for chunk in range(2 * STAGES))
        schedule = replace(schedule, name="later", weights=weft.Weights(delay=delay))
    pipe = weft.Pipeline(
        build("mlp"),
        loss_fn=loss_fn,
        optimizer=lambda params: torch.optim.AdamW(params, **ADAMW),
        schedule=schedule,
        balance=BALANCE[schedule.chunks],
        cure=cure,
    )
    for batch in batches("mlp", UPDATES):
        pipe.step(*batch)
    return pipe.state_dict()


class Late(Oracle):
    """The same training without weft; optimizers know the delay of each parameter."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], later: int = 1) -> None:
        own = delays("wpipe", STAGES, STAGES)
        super().__init__(
            build("mlp"),
            loss_fn=loss_fn,
            optimizer=make,
            microbatches=STAGES,
            balance=BALANCE[2 * STAGES],
            delay=lambda k, j: later * own(k, j),
        )

    def trained(self) -> dict[str, Tensor]:
        for batch in batches("mlp", UPDATES):
            self.step(*batch)
        return dict(self.model.state_dict())

    def late(self) -> list[int]:
        return [max(self.delay(k, 0) for k in chunks) for chunks in self.holders.values()]


class WithDelayCompensation(Late):
    def __init__(self, cure: DelayCompensation) -> None:
        super().__init__(lambda params: torch.optim.AdamW(params, **ADAMW))
        self.cure, self.squares = cure, [torch.zeros_like(parameter) for parameter in self.holders]
        self.optimizer.register_step_pre_hook(lambda *_: self.compensate())

    def compensate(self) -> None:
        t = len(self.versions) - 1
        for i, (parameter, late) in enumerate(zip(self.holders, self.late(), strict=True)):
            g = parameter.grad
            assert g is not None
            self.squares[i] = self.cure.decay * self.squares[i] + (1 - self.cure.decay) * g**2
            factor = self.cure.strength / (self.squares[i] + self.cure.eps).sqrt()
            if late:
                parameter.grad = g + factor * g * g * (parameter.detach() - self.versions[max(0, t - late)][i])


class ByHand(torch.optim.Optimizer):
    """AdamW whose mean is written as a sum over all gradients, with the weights of spike compensation."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.gradients: list[list[Tensor]] = []
        self.late: Sequence[int] = ()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        (beta1, beta2), lr = ADAMW["betas"], ADAMW["lr"]
        parameters = self.param_groups[0]["params"]
        self.gradients.append([parameter.grad.clone() for parameter in parameters])
        t = len(self.gradients)
        for i, (parameter, late) in enumerate(zip(parameters, self.late, strict=True)):
            momentum = [beta1 ** (t - 1 - s) for s in range(t)]
            factors = [beta1**late * factor for factor in momentum]
            factors[-1] += sum(beta1**missed for missed in range(late))  # (1 - β₁^D) / (1 - β₁)
            history = [gradients[i] for gradients in self.gradients]
            mean = sum(factor * g for factor, g in zip(factors, history, strict=True)) / sum(factors)
            square = sum((1 - beta2) * beta2 ** (t - 1 - s) * g**2 for s, g in enumerate(history)) / (1 - beta2**t)
            parameter.mul_(1 - lr * ADAMW["weight_decay"]).sub_(lr * mean / (square**0.5 + 1e-8))


def by_hand(later: int) -> dict[str, Tensor]:
    oracle = Late(ByHand, later)
    optimizer = oracle.optimizer
    assert isinstance(optimizer, ByHand)
    optimizer.late = oracle.late()
    return oracle.trained()


def far(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    return max((weight - others[name]).abs().max().item() for name, weight in some.items())


@pytest.mark.parametrize("cure", [DelayCompensation(), DelayCompensation(strength=200.0, decay=0.5)])
def test_delay_compensation(cure: DelayCompensation) -> None:
    found = weights(cure)
    assert far(found, WithDelayCompensation(cure).trained()) < 1e-5
    assert far(found, WithDelayCompensation(replace(cure, strength=0.0)).trained()) > 1e-4
    assert far(weights(), WithDelayCompensation(replace(cure, strength=0.0)).trained()) < 1e-5


@pytest.mark.parametrize("later", [1, 3])
def test_spike_compensation(later: int) -> None:
    found = weights(SpikeCompensation(), later=later)
    assert far(found, by_hand(later)) < 1e-5
    assert far(weights(later=later), by_hand(later)) > 1e-3


def test_spike_compensation_needs_adamw() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    with pytest.raises(weft.WeftError, match="written for AdamW"):
        SpikeCompensation().treat(torch.optim.SGD([parameter], lr=0.1), [parameter], 1.0)


@pytest.mark.parametrize("cure", CURES.values(), ids=str)
def test_only_late_chunks_are_treated(cure: weft.cures.Cure) -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.AdamW([parameter], **ADAMW)
    assert cure.treat(optimizer, [parameter], 0.0) is None
    assert cure.treat(optimizer, [parameter], 0.5) is not None


def test_nesterov_has_a_constant_momentum() -> None:
    make = partial(moved, torch.ones(4, 4, dtype=torch.float64), steps=gradients(6))
    (beta1, beta2), weight = ADAMW["betas"], torch.ones(4, 4, dtype=torch.float64)
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, g in enumerate(gradients(6), start=1):
        mean, square = beta1 * mean + (1 - beta1) * g, beta2 * square + (1 - beta2) * g**2
        ahead = beta1 * mean / (1 - beta1 ** (t + 1)) + (1 - beta1) * g / (1 - beta1**t)
        weight = weight * (1 - ADAMW["lr"] * ADAMW["weight_decay"])
        weight = weight - ADAMW["lr"] * ahead / ((square / (1 - beta2**t)).sqrt() + 1e-8)
    training = Training(lr=ADAMW["lr"], betas=list(ADAMW["betas"]), weight_decay=ADAMW["weight_decay"])
    # torch keeps the product of the momenta in float32
    torch.testing.assert_close(make(lambda weight: nesterov(training)([weight])), weight, rtol=0, atol=1e-6)
    rising = make(lambda weight: weft.cures.NAdamW([weight], **ADAMW))
    assert (rising - weight).abs().max() > 1e-4


# Rotation


def gradients(count: int, rows: int = 4, columns: int = 4) -> list[Tensor]:
    """With two bases that have much to do with each other and nothing with the axes."""
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    left, right = torch.linalg.qr(draw(rows, rows)).Q, torch.linalg.qr(draw(columns, columns)).Q
    sizes = torch.tensor([[2.0 ** -(row + column) for column in range(columns)] for row in range(rows)])
    return [left @ (draw(rows, columns) * sizes) @ right.T for _ in range(count)]


def moved(weight: Tensor, make: Callable[[Any], torch.optim.Optimizer], steps: Sequence[Tensor]) -> Tensor:
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = make(parameter)
    for step in steps:
        parameter.grad = step.clone()
        optimizer.step()
    return parameter.detach()


def rotated(parameter: Any, **options: Any) -> RotatedAdamW:
    return RotatedAdamW([("up.weight", parameter)], **ADAMW, **options)


def adamw(parameter: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter], **ADAMW)


def test_a_rotation_that_stays_is_adamw_in_other_coordinates() -> None:
    steps = gradients(12)
    weight = torch.linspace(-1, 1, 16, dtype=torch.float64).reshape(4, 4)
    left = torch.linalg.eigh(steps[0] @ steps[0].T).eigenvectors
    right = torch.linalg.eigh(steps[0].T @ steps[0]).eigenvectors
    inside = moved(left.T @ weight @ right, adamw, [left.T @ step @ right for step in steps])
    found = moved(weight, partial(rotated, every=100, eps=1e-8), steps)
    torch.testing.assert_close(found, left @ inside @ right.T, rtol=0, atol=1e-5)
    assert (found - moved(weight, adamw, steps)).abs().max() > 1e-2
    assert (found - moved(weight, partial(rotated, every=10), steps)).abs().max() > 1e-3


def test_without_hidden_matrices_it_is_adamw() -> None:
    weight, steps = torch.ones(4, 4, dtype=torch.float64), gradients(12)
    found = moved(weight, partial(rotated, rotated=lambda name, parameter: False), steps)
    torch.testing.assert_close(found, moved(weight, adamw, steps))


def test_bases_become_eigenvectors() -> None:
    """What is off the diagonal of the turned squares vanishes, if bases are turned."""

    def off_diagonal(every: int) -> float:
        parameter = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
        optimizer = rotated(parameter, every=every)
        for step in gradients(201):
            parameter.grad = step
            optimizer.step()
        state = optimizer.state[parameter]
        turned = state["right_basis"].T @ state["right"] @ state["right_basis"]
        return math.sqrt((turned - turned.diag().diag()).square().sum() / turned.square().sum())

    assert off_diagonal(10) < 0.02
    assert off_diagonal(1000) > 0.2


@pytest.mark.slow
@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_trains(name: str) -> None:
    """Each to another loss than without a correction."""
    found = train(replace(RUN, correction=name), quick=True)
    assert found["loss"] is not None
    assert found["loss"] != train(RUN, quick=True)["loss"]


def test_names_are_those_of_candidates() -> None:
    """A candidate without a setting of its own has a cure or an optimizer."""
    assert {*CURES, *OPTIMIZERS} <= CANDIDATES.keys()
    assert {name for name, known in CANDIDATES.items() if not known.settings} <= {*CURES, *OPTIMIZERS}
