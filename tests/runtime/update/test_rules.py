"""Linear rules give the direction of each optimizer's last update."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, Optimizer, RAdam, RMSprop

import weft
from weft.runtime.update.predictor import PredictionOptions, Predictor
from weft.runtime.update.rules import RULES, UpdatedParameter

LR = 0.05


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Remove the rules that a test registered."""
    known = dict(RULES)
    yield
    RULES.clear()
    RULES.update(known)


class Trained:
    """Two matrices after updates with random gradients, and their values before the last update."""

    def __init__(self, make: Callable[[list[Parameter]], Optimizer], updates: int = 8, **options: Any) -> None:
        made = torch.Generator().manual_seed(3)
        shapes = [(6, 4), (3, 5)]
        self.live = [Parameter(torch.randn(shape, generator=made, dtype=torch.float64)) for shape in shapes]
        self.optimizer = make(self.live)
        self.predictor = Predictor(self.optimizer, self.live, options=PredictionOptions(**options))
        self.gradients: list[list[Tensor]] = []  # of every update
        for _ in range(updates):
            self.before = [parameter.detach().clone() for parameter in self.live]
            for parameter in self.live:
                parameter.grad = torch.randn(parameter.shape, generator=made, dtype=parameter.dtype)
            self.gradients.append([parameter.grad.clone() for parameter in self.live if parameter.grad is not None])
            with self.predictor.step():
                self.optimizer.step()
            for parameter in self.live:
                parameter.grad = None

    def predict(self, ahead: int) -> list[Tensor]:
        into = [Parameter(torch.full_like(parameter, math.nan)) for parameter in self.live]
        self.predictor.predict(into, ahead)
        return [parameter.detach() for parameter in into]

    def check(self, directions: list[Tensor]) -> None:
        """Check that predictions continue straight in these directions."""
        for ahead in (1, 2, 5):
            for found, parameter, direction in zip(self.predict(ahead), self.live, directions, strict=True):
                torch.testing.assert_close(found, parameter.detach() - LR * ahead * direction, rtol=0, atol=1e-9)


def every_way(kind: Any, fused: bool = True, **options: Any) -> list[Any]:
    """An optimizer with some options, in each of its implementations."""
    words = "-".join([kind.__name__, *(f"{name}={value}" for name, value in options.items())])
    ways: list[dict[str, Any]] = [{"foreach": False}, {"foreach": True}, *([{"fused": True}] if fused else [])]
    return [pytest.param(kind, options | way, id=f"{words}-{'-'.join(way)}{int(any(way.values()))}") for way in ways]


STRAIGHT = [
    *every_way(SGD),
    *every_way(SGD, maximize=True),
    *every_way(SGD, momentum=0.9),
    *every_way(SGD, momentum=0.9, dampening=0.3, weight_decay=0.1, maximize=True),
    *every_way(SGD, momentum=0.9, nesterov=True),
    *every_way(SGD, momentum=0.9, nesterov=True, maximize=True),
    *every_way(Adam),
    *every_way(Adam, weight_decay=0.1, amsgrad=True, maximize=True),
    *every_way(Adam, weight_decay=0.1, decoupled_weight_decay=True, betas=(0.8, 0.9), eps=0.1),
    *every_way(AdamW, weight_decay=0.3),
    *every_way(AdamW, weight_decay=0.3, amsgrad=True, eps=0.1),
    *every_way(RAdam, fused=False, weight_decay=0.1),
    *every_way(RAdam, fused=False, weight_decay=0.1, decoupled_weight_decay=True, maximize=True, eps=0.1),
    *every_way(RAdam, fused=False, betas=(0.9, 0.7)),  # never enough gradients to rectify
    *every_way(Adamax, fused=False, weight_decay=0.1, maximize=True),
    *every_way(Adagrad, initial_accumulator_value=0.1, maximize=True),
    *every_way(Adagrad, eps=0.1),
    *every_way(RMSprop, fused=False, maximize=True),
    *every_way(RMSprop, fused=False, centered=True, eps=0.1),
    *every_way(RMSprop, fused=False, momentum=0.9, centered=True, weight_decay=0.1),
    *[pytest.param(Muon, {"nesterov": way}, id=f"Muon-nesterov={way}") for way in (True, False)],
    pytest.param(Muon, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3}, id="Muon-match_rms_adamw"),
]
DECOUPLED = (AdamW, Muon)


@pytest.mark.parametrize(("kind", "options"), STRAIGHT)
def test_the_direction_is_that_of_the_last_update(kind: Any, options: dict[str, Any]) -> None:
    trained = Trained(lambda params: kind(params, lr=LR, **options))
    decoupled = kind in DECOUPLED or options.get("decoupled_weight_decay")
    decay = LR * trained.optimizer.param_groups[0]["weight_decay"] if decoupled else 0
    pairs = zip(trained.before, trained.live, strict=True)
    trained.check([(before * (1 - decay) - now.detach()) / LR for before, now in pairs])


def test_radam_starts_with_the_mean_alone() -> None:
    trained = Trained(lambda params: RAdam(params, lr=LR), updates=2)
    trained.check([(before - now.detach()) / LR for before, now in zip(trained.before, trained.live, strict=True)])


@pytest.mark.parametrize(
    ("kind", "options"), [*every_way(SGD, weight_decay=0.2), *every_way(SGD, weight_decay=0.2, maximize=True)]
)
def test_without_momentum_weight_decay_uses_the_newest_weights(kind: Any, options: dict[str, Any]) -> None:
    trained = Trained(lambda params: kind(params, lr=LR, **options))
    sign = -1 if options.get("maximize") else 1
    last = zip(trained.gradients[-1], trained.live, strict=True)
    trained.check([sign * gradient + 0.2 * parameter.detach() for gradient, parameter in last])


@pytest.mark.parametrize(("kind", "options"), every_way(SGD, momentum=0.9, nesterov=True, weight_decay=0.2))
def test_nesterov_with_decay(kind: Any, options: dict[str, Any]) -> None:
    trained = Trained(lambda params: kind(params, lr=LR, **options))
    expected = []
    for gradient, parameter in zip(trained.gradients[-1], trained.live, strict=True):
        expected.append(
            gradient + 0.2 * parameter.detach() + 0.9 * trained.optimizer.state[parameter]["momentum_buffer"]
        )
    trained.check(expected)


def test_rmsprop_and_adagrad_with_decay() -> None:
    rmsprop = Trained(lambda params: RMSprop(params, lr=LR, alpha=0.9, eps=0.01, weight_decay=0.2))
    adagrad = Trained(lambda params: Adagrad(params, lr=LR, eps=0.01, weight_decay=0.2))
    for trained, name in ((rmsprop, "square_avg"), (adagrad, "sum")):
        expected = []
        for gradient, parameter in zip(trained.gradients[-1], trained.live, strict=True):
            root = trained.optimizer.state[parameter][name].sqrt() + 0.01
            expected.append((gradient + 0.2 * parameter.detach()) / root)
        trained.check(expected)


def test_adagrad_predicts_at_the_decayed_rate_of_the_next_update() -> None:
    trained = Trained(lambda params: Adagrad(params, lr=LR, lr_decay=0.5), updates=8)
    for bias in ("adam", "printed"):
        trained.predictor.options = PredictionOptions(bias=bias)
        last, following = 1 + 7 * 0.5, 1 + 8 * 0.5
        pairs = zip(trained.before, trained.live, strict=True)
        trained.check([(before - now.detach()) / LR * last / following for before, now in pairs])


def moments(gradients: list[Tensor], beta1: float, beta2: float) -> tuple[Tensor, Tensor]:
    """The running means of the gradients and their squares, as explicit weighted sums."""
    count = len(gradients)
    mean = sum((1 - beta1) * beta1 ** (count - 1 - t) * gradient for t, gradient in enumerate(gradients))
    square = sum((1 - beta2) * beta2 ** (count - 1 - t) * gradient**2 for t, gradient in enumerate(gradients))
    assert isinstance(mean, Tensor)
    assert isinstance(square, Tensor)
    return mean, square


@pytest.mark.parametrize("kind", [Adam, AdamW, NAdam])
@pytest.mark.parametrize("bias", ["adam", "printed"])
@pytest.mark.parametrize("updates", [1, 8])
def test_adam_by_its_formula(kind: Any, bias: str, updates: int) -> None:
    trained = Trained(lambda params: kind(params, lr=LR, betas=(0.8, 0.95), eps=0.01), updates, bias=bias)
    power = 1 if bias == "printed" else updates
    expected = []
    for gradients in zip(*trained.gradients, strict=True):
        mean, square = moments(list(gradients), 0.8, 0.95)
        root = (square / (1 - 0.95**power)).sqrt()
        expected.append(mean / (1 - 0.8**power) / (root + 0.01))
    trained.check(expected)


def test_printed_corrections_of_adamax() -> None:
    trained = Trained(lambda params: Adamax(params, lr=LR, betas=(0.8, 0.95)), bias="printed")
    states = [trained.optimizer.state[parameter] for parameter in trained.live]
    trained.check([state["exp_avg"] / (1 - 0.8) / state["exp_inf"] for state in states])


@pytest.mark.parametrize("extrapolation", ["linear", "decayed"])
def test_complex_weights(extrapolation: str) -> None:
    """Optimizers and predictions both treat a complex number as two real numbers."""
    for kind in (Adam, RMSprop, SGD):
        runs = []
        for parts in (False, True):
            torch.manual_seed(0)
            start = torch.randn(3, 2, dtype=torch.complex64)
            parameter = Parameter(torch.view_as_real(start) if parts else start)
            optimizer = kind([parameter], lr=LR)
            predictor = Predictor(optimizer, [parameter], options=PredictionOptions(extrapolation=extrapolation))
            for t in range(3):
                gradient = start * (t + 1)
                parameter.grad = torch.view_as_real(gradient) if parts else gradient
                with predictor.step():
                    optimizer.step()
            into = Parameter(torch.empty_like(parameter))
            predictor.predict([into], 2)
            runs.append(into.detach() if parts else torch.view_as_real(into.detach()))
        torch.testing.assert_close(runs[0], runs[1])


# The registry


class Own(Adam):
    """A user's optimizer: weft knows no rule for it."""


def test_an_optimizer_without_a_rule_is_refused() -> None:
    with pytest.raises(weft.WeftError) as caught:
        Trained(lambda params: Own(params, lr=LR))
    message = str(caught.value)
    assert message.startswith(
        "Own has no linear rule of prediction (those that have one: Adagrad, Adam, AdamW, Adamax, "
    )
    assert '"extrapolation": "decayed"' in message
    assert "@weft.linear_rule(Own)" in message
    Trained(lambda params: Own(params, lr=LR), extrapolation="decayed").predict(2)


def test_a_user_registers_a_rule_in_a_few_lines() -> None:
    @weft.linear_rule(Own)
    def direction(parameter: UpdatedParameter) -> Tensor:
        mean: Tensor = parameter.state["exp_avg"]
        return mean / parameter.correction(0.9)

    trained = Trained(lambda params: Own(params, lr=LR))
    trained.check([trained.optimizer.state[parameter]["exp_avg"] / (1 - 0.9**8) for parameter in trained.live])
    assert trained.predictor.nbytes == 0

    @weft.linear_rule(Own, gradient=True)
    def last(parameter: UpdatedParameter) -> Tensor:
        assert parameter.gradient is not None
        return parameter.gradient

    trained = Trained(lambda params: Own(params, lr=LR, maximize=True))
    trained.check([-gradient for gradient in trained.gradients[-1]])
    assert trained.predictor.nbytes == sum(parameter.nbytes for parameter in trained.live)


@pytest.mark.parametrize("kinds", [(), (Own, "Adam"), (lambda given: given.gradient,)])
def test_a_rule_is_for_classes_of_optimizers(kinds: tuple[Any, ...]) -> None:
    with pytest.raises(weft.WeftError, match=r"a linear rule is for a class of torch\.optim\.Optimizer"):
        weft.linear_rule(*kinds)
    assert Own not in RULES
