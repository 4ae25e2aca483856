"""Corrections of the convergence study: each against its formula in plain PyTorch, and the plan of their runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.convergence.corrections import (
    CANDIDATES,
    Correction,
    DelayCompensation,
    RotatedAdamW,
    SpikeCompensation,
    nesterov,
)
from benchmarks.convergence.methods import ALL_CORRECTIONS, HALF, PROFILES
from benchmarks.convergence.plan import TUNING_SEED, Run, Settings, next_runs
from benchmarks.convergence.studies import STUDIES
from tests.helpers.models import BALANCE, batches, build, loss_fn
from tests.helpers.oracle import Oracle, delays
from torch import Tensor, nn

import weft
from weft.train.job import Training, job_of

ADAMW: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1}
STAGES = MICROBATCHES = 2
UPDATES = 6


def state_of(cure: weft.cures.Cure | None, optimizer: Callable[..., Any]) -> dict[str, Tensor]:
    """The weights after some updates of `wpipe`, half of the model one update late."""
    pipe = weft.Pipeline(
        build("mlp").double(),
        loss_fn=loss_fn,
        optimizer=optimizer,
        schedule=weft.schedule("wpipe", stages=STAGES, microbatches=MICROBATCHES),
        balance=BALANCE[2 * STAGES],
        cure=cure,
    )
    for inputs, targets in batches("mlp", UPDATES):
        pipe.step(inputs.double(), targets)
    found: dict[str, Tensor] = pipe.state_dict()
    return found


class Late(Oracle):
    """The same in plain PyTorch. `delay_of` and `read` tell how late a parameter is, and what its forward read."""

    def __init__(self, optimizer: Callable[..., Any]) -> None:
        super().__init__(
            build("mlp").double(),
            loss_fn=loss_fn,
            optimizer=optimizer,
            microbatches=MICROBATCHES,
            balance=BALANCE[2 * STAGES],
            delay=delays("wpipe", STAGES, MICROBATCHES),
        )
        self.optimizer.register_step_pre_hook(lambda *_: self.before())

    def before(self) -> None: ...

    def delay_of(self, parameter: nn.Parameter) -> int:
        return max(self.delay(chunk, 0) for chunk in self.holders[parameter])

    def read(self, parameter: nn.Parameter) -> Tensor:
        version = max(0, len(self.versions) - 1 - self.delay_of(parameter))
        return self.versions[version][list(self.holders).index(parameter)]

    def run(self) -> dict[str, Tensor]:
        for inputs, targets in batches("mlp", UPDATES):
            self.step(inputs.double(), targets)
        return self.model.state_dict()


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max((one[name] - other[name]).abs().max().item() for name in one)


def adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, **ADAMW)


@pytest.mark.parametrize("strength", [2.0, 200.0])
def test_delay_compensation(strength: float) -> None:
    cure = DelayCompensation(strength=strength, decay=0.5)

    class Compensated(Late):
        def before(self) -> None:
            for parameter in filter(self.delay_of, self.holders):
                gradient = parameter.grad
                assert gradient is not None
                self.squares = self.__dict__.get("squares", {})
                mean = 0.5 * self.squares.get(parameter, 0) + 0.5 * gradient**2
                self.squares[parameter] = mean
                gap = parameter.detach() - self.read(parameter)
                parameter.grad = gradient + strength / (mean + 1e-7).sqrt() * gradient**2 * gap

    found = state_of(cure, adamw)
    assert distance(found, Compensated(adamw).run()) < 1e-12
    assert distance(found, state_of(None, adamw)) > 1e-6
    assert distance(found, state_of(replace(cure, decay=0.0), adamw)) > 1e-6


class BySpikes(torch.optim.Optimizer):
    """AdamW whose numerator is a sum over all gradients, each at its place in a course that began when it was due."""

    def __init__(self, params: Any, delay_of: Callable[[nn.Parameter], int]) -> None:
        super().__init__(params, ADAMW)
        self.delay_of = delay_of

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        (group,) = self.param_groups
        beta1, beta2 = group["betas"]
        for parameter in group["params"]:
            gradients, late = self.state[parameter].setdefault("gradients", []), self.delay_of(parameter)
            gradients.append(parameter.grad.clone())
            ages = range(len(gradients) - 1, -1, -1)
            shares = [(1 - beta1) * beta1 ** (age + late) for age in ages]
            shares[-1] = sum((1 - beta1) * beta1**missed for missed in range(late + 1))
            numerator = sum(share * each for share, each in zip(shares, gradients, strict=True)) / sum(shares)
            squares = [(1 - beta2) * beta2**age * each**2 for age, each in zip(ages, gradients, strict=True)]
            root = (torch.stack(squares).sum(0) / (1 - beta2 ** len(gradients))).sqrt()
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.sub_(group["lr"] * numerator / (root + 1e-8))


def test_spike_compensation() -> None:
    found = state_of(SpikeCompensation(), adamw)
    oracle = Late(lambda params: BySpikes(params, lambda parameter: oracle.delay_of(parameter)))
    assert distance(found, oracle.run()) < 1e-12
    assert distance(state_of(None, adamw), Late(lambda params: BySpikes(params, lambda parameter: 0)).run()) < 1e-12
    assert distance(found, state_of(None, adamw)) > 1e-4
    with pytest.raises(weft.WeftError, match="written for AdamW"):
        state_of(SpikeCompensation(), lambda params: torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("late", [2, 3])
def test_spikes_of_longer_delays(late: int) -> None:
    """The part alone, with the same gradients for both."""
    weights = torch.ones(2, 3, dtype=torch.float64)
    ours, theirs = nn.Parameter(weights.clone()), nn.Parameter(weights.clone())
    optimizer, wanted = adamw([ours]), BySpikes([theirs], lambda _: late)
    part = SpikeCompensation().treat(optimizer, [ours], late)
    assert part is not None
    for gradient in torch.randn(5, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1)):
        ours.grad, theirs.grad = gradient.clone(), gradient.clone()
        with part.step():
            optimizer.step()
        wanted.step()
        assert (ours - theirs).abs().max() < 1e-12


def test_cures_leave_chunks_without_a_delay_alone() -> None:
    parameter = nn.Parameter(torch.ones(1))
    for cure in (DelayCompensation(), SpikeCompensation()):
        assert cure.treat(adamw([parameter]), [parameter], 0) is None


def test_nesterov_has_a_constant_momentum() -> None:
    parameter = nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer = nesterov([parameter], **ADAMW)
    by_hand, mean, squares = torch.ones(3, dtype=torch.float64), torch.zeros(3), torch.zeros(3)
    for t in range(1, 6):
        gradient = torch.tensor([1.0, -t, 0.1 * t], dtype=torch.float64)
        parameter.grad = gradient.clone()
        optimizer.step()
        mean, squares = 0.8 * mean + 0.2 * gradient, 0.95 * squares + 0.05 * gradient**2
        ahead = 0.8 * mean / (1 - 0.8 ** (t + 1)) + 0.2 * gradient / (1 - 0.8**t)
        by_hand = by_hand * (1 - 0.01 * 0.1) - 0.01 * ahead / ((squares / (1 - 0.95**t)).sqrt() + 1e-8)
        assert (parameter - by_hand).abs().max() < 1e-7  # torch keeps products of momenta in float32


def rotated(named: list[tuple[str, nn.Parameter]]) -> RotatedAdamW:
    return RotatedAdamW(named, every=3, hidden=lambda name, parameter: name == "hidden", **ADAMW)


def test_rotated_adam_is_adam_in_the_basis_of_the_gradients() -> None:
    """Gradients P D Qᵀ with fixed P and Q, and a diagonal D whose order changes: bases must take v along."""
    generator = torch.Generator().manual_seed(1)
    p, q = (torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64)).Q for _ in range(2))
    matrix, other = (nn.Parameter(torch.randn(4, 4, generator=generator, dtype=torch.float64)) for _ in range(2))
    inside, beside = nn.Parameter(p.T @ matrix.detach() @ q), nn.Parameter(other.detach().clone())
    optimizer, plain = rotated([("hidden", matrix), ("other", other)]), adamw([inside, beside])
    unturned = nn.Parameter(matrix.detach().clone())
    control = adamw([unturned])
    for t in range(12):
        diagonal = torch.tensor([5.0, 1.0, 3.0, 2.0], dtype=torch.float64).roll(t // 4)
        gradient = diagonal * torch.randn(4, generator=generator, dtype=torch.float64).sign()
        matrix.grad = unturned.grad = p @ gradient.diag() @ q.T
        inside.grad, other.grad, beside.grad = gradient.diag(), matrix.grad, matrix.grad
        for each in (optimizer, plain, control):
            each.step()
    assert (p @ inside.detach() @ q.T - matrix).abs().max() < 1e-6
    assert (other - beside).abs().max() < 1e-12
    assert (unturned - matrix).abs().max() > 1e-2


def test_rotated_adam_follows_its_formula() -> None:
    generator = torch.Generator().manual_seed(2)
    matrix = nn.Parameter(torch.randn(4, 3, generator=generator, dtype=torch.float64))
    optimizer, by_hand = rotated([("hidden", matrix)]), matrix.detach().clone()
    left, right, mean, squares = (torch.zeros(n, k, dtype=torch.float64) for n, k in ((4, 4), (3, 3), (4, 3), (4, 3)))
    bases: list[Tensor] = []
    for t in range(1, 9):
        matrix.grad = gradient = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        optimizer.step()
        left, right = 0.95 * left + 0.05 * gradient @ gradient.T, 0.95 * right + 0.05 * gradient.T @ gradient
        if not bases:
            bases = [torch.linalg.eigh(side).eigenvectors for side in (left, right)]
        if t % 3 == 0:
            spectra = [(u.T @ side @ u).diag() for u, side in zip(bases, (left, right), strict=True)]
            orders = [spectrum.sort(descending=True).indices for spectrum in spectra]
            squares = squares[orders[0]][:, orders[1]]
            sides = zip(bases, orders, (left, right), strict=True)
            bases = [torch.linalg.qr(side @ u[:, order]).Q for u, order, side in sides]
        u, v = bases
        mean, squares = 0.8 * mean + 0.2 * gradient, 0.95 * squares + 0.05 * (u.T @ gradient @ v) ** 2
        inside = (u.T @ mean @ v) / (1 - 0.8**t) / ((squares / (1 - 0.95**t)).sqrt() + 1e-8)
        by_hand = by_hand * (1 - 0.01 * 0.1) - 0.01 * u @ inside @ v.T
    assert (matrix - by_hand).abs().max() < 1e-6  # beside rounding: directions without a gradient yet, over ε


def test_corrections_are_settings_or_more() -> None:
    train = Training(lr=0.5, betas=[0.8, 0.9], weight_decay=0.2)
    assert Correction().optimizer_of(train) is None
    make = Correction(optimizer=nesterov).optimizer_of(train)
    assert make is not None
    (group,) = make([nn.Parameter(torch.ones(1))]).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.5, (0.8, 0.9), 0.2)
    assert ALL_CORRECTIONS["plain"] == Correction()
    assert ALL_CORRECTIONS["optimistic"] == Correction(settings=("schedule.cure=optimistic",))


@pytest.mark.parametrize("name", CANDIDATES)
def test_every_candidate_is_a_job(name: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/tinyshakespeare.txt").write_text("text")
    settings = Settings(rate=0.1, beta=0.8)
    run = Run(study="text", method="wpipe", correction=name, settings=settings, updates=20, seed=0)
    job = job_of(None, run.sets(STUDIES["text"], tmp_path))
    published = "nadamw" in name
    assert (job.train.optimizer, job.train.betas[0]) == (("nadamw", 0.99) if published else ("adamw", 0.8))
    assert (job.schedule.predict == "exact") == ("predicted" in name)


def test_candidates_search_a_rate_each_at_the_settings_of_plain() -> None:
    """After all others; a better neighbour has its own neighbours tried."""
    studies, found, searched = {"text": STUDIES["text"]}, dict[Run, float | None](), list[Run]()
    while runs := next_runs(studies, found):
        searched += [run for run in runs if run.correction in CANDIDATES]
        assert not searched or all(run.correction in CANDIDATES for run in runs)
        # lower rates are better for candidates down to 1e-3; for others the best are 3e-3, β₁ 0.8 and a decay of 0.1
        for run in runs:
            far = abs(run.settings.beta - 0.8) + abs(run.settings.decay - 0.1)
            found[run] = abs(run.settings.rate - (1e-3 if run.correction in CANDIDATES else 3e-3)) + far
    assert {(run.method, run.updates, run.seed) for run in searched} == {(PROFILES[HALF], 500, TUNING_SEED)}
    assert {(run.settings.beta, run.settings.decay) for run in searched} == {(0.8, 0.1)}
    rates = {name: [run.settings.rate for run in searched if run.correction == name] for name in CANDIDATES}
    assert all(sorted(tried) == [3.75e-4, 7.5e-4, 1.5e-3, 3e-3, 6e-3] for tried in rates.values())
