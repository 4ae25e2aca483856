"""Corrections that the study tries beyond the settings of a job; each short, with its formula and its source.

They keep what a run needs and nothing else: no state of theirs goes into a checkpoint. What helps becomes a part of
weft, what doesn't stays here, with its figure in the study.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

import weft
from weft.errors import WeftError
from weft.train.job import Training


@dataclass(frozen=True, kw_only=True)
class DelayCompensation(weft.cures.Cure):
    """The gradient at the weights of the update, by a Taylor series with squared gradients as the Hessian's diagonal.

        g + λ g² (W_met - W_read)        λ = strength / √(s + ε)        s ← decay · s + (1 - decay) g²

    The weights that were read are known exactly. λ is larger where gradients are small. The defaults are those of the
    authors for CIFAR-10, with SGD; nothing in the formula knows that the optimizer divides gradients by their size.

    Zheng et al.: Asynchronous Stochastic Gradient Descent with Delay Compensation, ICML 2017: DC-ASGD-a.
    """

    strength: float = 2.0
    decay: float = 0.95
    eps: float = 1e-7

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> weft.cures.CurePart | None:
        return _Compensation(live, self) if delay > 0 else None


class _Compensation(weft.cures.CurePart):
    def __init__(self, live: Sequence[Parameter], cure: DelayCompensation) -> None:
        self._live, self._cure = live, cure
        self._squares = [torch.zeros_like(parameter) for parameter in live]
        self._read: deque[list[Tensor]] = deque()  # by the mini-batches in flight

    @torch.no_grad()
    def first_read(self, weights: Sequence[Tensor]) -> None:
        self._read.append([weight.to(live.dtype, copy=True) for weight, live in zip(weights, self._live, strict=True)])

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        cure = self._cure
        with torch.no_grad():
            for parameter, read, square in zip(self._live, self._read.popleft(), self._squares, strict=True):
                if (gradient := parameter.grad) is not None:
                    squared = gradient * gradient
                    square.lerp_(squared, 1 - cure.decay)
                    gradient.add_(squared * (parameter - read) / (square + cure.eps).sqrt(), alpha=cure.strength)
        yield

    def skip(self) -> None:
        self._read.popleft()


@dataclass(frozen=True)
class SpikeCompensation(weft.cures.Cure):
    """Of a gradient that is D updates late, the steps that it has missed are made at once; then it decays as ever.

    With SGD and momentum μ, v ← μ v + g, the step is

        μ^D v + (1 - μ^D) / (1 - μ) g

    so that every gradient has moved the weights as far as it would have without a delay, from its update on. For D = 1
    this is Nesterov's momentum with a constant μ. The paper has no form for Adam. Its mean is (1 - μ) v with μ = β₁, so
    the same weights of gradients, with a sum of 1, take the place of its bias-corrected mean m / (1 - β₁^t), over the
    same denominator √(v / (1 - β₂^t)) + ε:

        (β₁^D m + (1 - β₁^D) g) / (1 - β₁^(t+D))

    Kosson, Chiley, Venigalla, Hestness, Köster: Pipelined Backpropagation at Scale, MLSys 2021 (arXiv 2003.11666).
    """

    def treat(self, optimizer: Optimizer, live: Sequence[Parameter], delay: float) -> weft.cures.CurePart | None:
        if not isinstance(optimizer, AdamW):
            raise WeftError(f"spike compensation is written for AdamW (got {type(optimizer).__name__})")
        return _Spikes(optimizer, delay) if delay > 0 else None


class _Spikes(weft.cures.CurePart):
    """Moves weights from where AdamW's step has led to where the compensated step leads."""

    def __init__(self, optimizer: AdamW, delay: float) -> None:
        self._optimizer, self._delay = optimizer, delay

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        yield
        with torch.no_grad():
            for group in self._optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._compensate(parameter, self._optimizer.state[parameter], group)

    def _compensate(self, parameter: Parameter, state: dict[str, Any], group: dict[str, Any]) -> None:
        (beta1, beta2), updates = group["betas"], float(state["step"])
        kept, mean = beta1**self._delay, state["exp_avg"]
        compensated = (kept * mean + (1 - kept) * parameter.grad) / (1 - beta1 ** (updates + self._delay))
        root = (state["exp_avg_sq"] / (1 - beta2**updates)).sqrt_().add_(group["eps"])
        parameter.sub_((compensated - mean / (1 - beta1**updates)) / root, alpha=float(group["lr"]))


class RotatedAdamW(Optimizer):
    """AdamW whose squared gradients are those in the eigenbasis of the gradients, which stands for that of the Hessian.

    For hidden matrices, with E[·] a running mean that decays with β₂, and Adam's usual bias corrections,

        L = E[G Gᵀ],  R = E[Gᵀ G]                U, V: their eigenvectors, every 10 updates by U ← Q of QR(L U)
        M ← β₁ M + (1 - β₁) G                    S ← β₂ S + (1 - β₂) (Uᵀ G V)²
        W ← (1 - lr λ) W - lr · U ((Uᵀ M V) / (√S + ε)) Vᵀ

    All other parameters are not rotated: that is AdamW. The authors argue that Adam swings less along directions of
    much curvature if it works in their basis, so that a late gradient is less wrong. Rotating both sides, and every 10
    updates, is their main setting; the first bases are those of the first gradient. Apart from where M is kept, this is
    SOAP (Vyas et al., 2024). It changes synchronous training, too.

    Jung, Shin, Lee: Mitigating Staleness in Asynchronous Pipeline Parallelism via Basis Rotation, ICML 2026 (arXiv
    2602.03515).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, Parameter]],
        lr: float,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        every: int = 10,
        rotated: Callable[[str, Parameter], bool] = weft.optimizers.is_hidden_matrix,
    ) -> None:
        groups: list[dict[str, Any]] = [{"params": [], "rotated": True}, {"params": [], "rotated": False}]
        for name, parameter in named_parameters:
            groups[0 if rotated(name, parameter) else 1]["params"].append(parameter)
        options = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "every": every}
        super().__init__(groups, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, parameter.grad, group)

    def _step(self, parameter: Parameter, gradient: Tensor, group: dict[str, Any]) -> None:
        state, (beta1, beta2) = self.state[parameter], group["betas"]
        if not state:
            state |= {"step": 0, "mean": torch.zeros_like(parameter), "squares": torch.zeros_like(parameter)}
        state["step"] += 1
        state["mean"].lerp_(gradient, 1 - beta1)
        mean = state["mean"] / (1 - beta1 ** state["step"])
        if group["rotated"]:
            for side, product in (("left", gradient @ gradient.T), ("right", gradient.T @ gradient)):
                _turn(state, side, product, beta2, group["every"])
            left, right = state["left_basis"], state["right_basis"]
            mean, gradient = left.T @ mean @ right, left.T @ gradient @ right
        state["squares"].lerp_(gradient * gradient, 1 - beta2)
        step = mean / ((state["squares"] / (1 - beta2 ** state["step"])).sqrt_() + group["eps"])
        step = left @ step @ right.T if group["rotated"] else step
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=group["lr"])


def _turn(state: dict[str, Any], side: str, product: Tensor, decay: float, every: int) -> None:
    """Add to the running mean of one side, and turn its basis when it is time."""
    if side not in state:
        state[side] = torch.zeros_like(product)
    state[side].lerp_(product, 1 - decay)
    if state["step"] == 1:
        state[f"{side}_basis"] = torch.linalg.eigh(state[side]).eigenvectors.flip(1)  # the largest first, as QR has it
    elif state["step"] % every == 1 % every:
        state[f"{side}_basis"] = torch.linalg.qr(state[side] @ state[f"{side}_basis"]).Q


def _made(optimizer: Callable[..., Optimizer], **options: Any) -> Callable[[Training], Callable[..., Optimizer]]:
    """A function from a job's settings to a maker of optimizers."""
    return lambda train: functools.partial(
        optimizer,
        lr=train.lr,
        betas=(train.betas[0], train.betas[1]),
        weight_decay=train.weight_decay,
        **options,
    )


def nesterov(train: Training) -> Callable[..., Optimizer]:
    """AdamW with Nesterov's look-ahead and a constant momentum μ = β₁: NAdam without its slow rise of μ from β₁ / 2.

        W ← W - lr · (μ m / (1 - μ^(t+1)) + (1 - μ) g / (1 - μ^t)) / (√(v / (1 - β₂^t)) + ε)

    Ajanthan et al.: Nesterov Method for Asynchronous Pipeline Parallel Optimization, ICML 2025, whose experiments leave
    the rise in (`weft.cures.NAdamW`).
    """
    return _made(weft.cures.NAdamW, momentum_decay=1e9)(train)


CURES: dict[str, weft.cures.Cure] = {  # of those corrections that have one
    "delay compensation": DelayCompensation(),
    "spike compensation": SpikeCompensation(),
}
OPTIMIZERS: dict[str, Callable[[Training], Callable[..., Optimizer]]] = {  # in place of the job's
    "nesterov": nesterov,
    "nesterov, predicted": nesterov,
    "basis rotation": _made(RotatedAdamW),
    "basis rotation, optimistic": _made(RotatedAdamW),
}
