"""A second implementation of the methods with weight prediction: plain PyTorch, one process, without weft.

No pipeline, no order of work: mini-batch `t` passes chunk `k` with micro-batch `j` forward at the weights after
`t - delay` updates, predicted `ahead` more from the optimizer's state as it was after those updates, and backward at
the same weights, or at `W_t`, predicted or not. A copy of the optimizer at every version is all that is kept.
"""

import contextlib
import copy
import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from tests.helpers import muon_by_hand
from tests.helpers.oracle import Grouping, MakeOptimizer, Rounding, delays, is_finite, make_optimizer
from torch import Tensor, nn

MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Reads(NamedTuple):
    """A forward's version and the updates predicted beyond it; those of a backward at `W_t`, None: as the forward."""

    delay: int
    ahead: int
    backward: int | None


Options = list[dict[str, Any]]  # of all parameter groups
Law = Callable[[int, int], Reads]  # chunk k, micro-batch j


def prediction_law(method: str, versions: str, n: int, m: int, *, fresh: bool = False, warmup: int = 1) -> Law:
    """The published counts of the methods that predict, for `n` stages and `m` micro-batches."""
    turn = max(i * n for i in range(1, warmup + 1) if m % (i * n) == 0) if fresh else m

    def late(k: int, j: int) -> int:
        return max(0, math.ceil((n - 1 - k - j) / m))

    woven = delays("weave", n, m) if method == "weave" else late
    laws: dict[str, Law] = {
        "xpipe-published": lambda k, j: Reads(
            late(k, 0), half_up((n + m - k / 2 - 2) / m), half_up((m + k // 2 - 1) / m)
        ),
        "xpipe-exact": lambda k, j: Reads(late(k, 0), math.ceil((n - 1 - k) / m), 0),
        "spectrain-published": lambda k, j: Reads(late(k, j), k // 2 + n - k - 1, k // 2),
        "spectrain-exact": lambda k, j: Reads(late(k, j), late(k, j), 0),
        "pipeoptim-published": lambda k, j: Reads(late(k, j), n - k - 1, 0),
        "pipeoptim-exact": lambda k, j: Reads(late(k, j), late(k, j), 0),
        "2bw-published": lambda k, j: Reads(late(k, 0), late(k, 0), None),
        "2bw-exact": lambda k, j: Reads(late(k, 0), late(k, 0), 0),
        "wpipe-published": lambda k, j: Reads(1, 1, None) if k < n and j < turn else Reads(0, 0, None),
        "wpipe-exact": lambda k, j: Reads(1, 1, 0) if k < n and j < turn else Reads(0, 0, 0),
        "weave-published": lambda k, j: Reads(woven(k, j), woven(k, j), None),
        "weave-exact": lambda k, j: Reads(woven(k, j), woven(k, j), 0),
    }
    return laws[f"{method}-{versions}"]


def half_up(value: float) -> int:
    return math.floor(value + 0.5)


def direction(
    kind: str, weight: Tensor, group: Mapping[str, Any], state: Mapping[str, Tensor], *, printed: bool
) -> Tensor:
    """The direction of the last update, from its gradient `weight.grad`, the weight and the optimizer's state."""
    assert weight.grad is not None
    grad = -weight.grad if group.get("maximize") else weight.grad
    coupled = grad.add(weight.detach(), alpha=group["weight_decay"])
    t, (beta1, beta2) = int(state.get("step", 1)), group.get("betas", (0.0, 0.0))
    first, second = (1 - beta1, 1 - beta2) if printed else (1 - beta1**t, 1 - beta2**t)
    mean, buffer = state.get("exp_avg", grad), state.get("momentum_buffer")
    result: Tensor = mean / first
    if kind == "SGD" and (buffer is None or group["nesterov"]):
        result = coupled if buffer is None else coupled.add(buffer, alpha=group["momentum"])
    elif kind == "SGD" or (kind == "RMSprop" and buffer is not None):
        assert buffer is not None
        result = buffer
    elif kind == "MuonAdamW" and buffer is not None:
        result = 0.2 * math.sqrt(max(buffer.shape)) * muon_by_hand.orthogonal(buffer)
    elif kind in ("Adam", "AdamW", "NAdam", "MuonAdamW"):
        squares = state["max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq"]
        result = mean / (squares.sqrt() / math.sqrt(second) + group["eps"]) / first
    elif kind == "RAdam":
        rho_max = 2 / (1 - beta2) - 1
        rho = rho_max - 2 * t * beta2**t / (1 - beta2**t)
        if rho > 5:
            rectified = math.sqrt((rho - 4) * (rho - 2) * rho_max / ((rho_max - 4) * (rho_max - 2) * rho))
            result = result * (rectified * math.sqrt(second)) / (state["exp_avg_sq"].sqrt() + group["eps"])
    elif kind == "Adamax":
        result = mean / state["exp_inf"] / first
    elif kind == "Adagrad":
        result = coupled / (state["sum"].sqrt() + group["eps"]) / (1 + t * group["lr_decay"])  # the next rate
    elif kind == "RMSprop":
        squares = state["square_avg"] - state["grad_avg"] ** 2 if group["centered"] else state["square_avg"]
        result = coupled / (squares.sqrt() + group["eps"])
    elif kind == "Muon":  # itself makes the matrix orthogonal: without momentum and decay, from a weight of 0
        assert buffer is not None
        zero = nn.Parameter(torch.zeros_like(weight))
        zero.grad = grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer.clone()
        options = {name: group[name] for name in ("ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        muon: Any = torch.optim.Muon([zero], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, **options)
        muon.step()
        result = -zero.detach()
    else:
        raise AssertionError(kind)
    return result


class PredictionOracle:
    """Trains a copy of `model`; `groups` and `skips` as in the other oracle."""

    def __init__(
        self,
        model: nn.Sequential,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        optimizer: MakeOptimizer,
        microbatches: int,
        balance: list[int],
        law: Law,
        printed: bool = False,
        decayed: bool = False,
        clip_norm: float | None = None,
        groups: Grouping = lambda chunks: None,
        skips: bool = False,
        lr_scheduler: MakeScheduler | None = None,
        rounding: Rounding | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.holders: dict[nn.Parameter, dict[int, list[str]]] = {param: {} for param in self.model.parameters()}
        for k, end in enumerate(accumulate(balance)):
            for name, param in self.model[end - balance[k] : end].named_parameters(remove_duplicate=False):
                self.holders[param].setdefault(k, []).append(name)  # several chunks: tied
        self.loss_fn, self.microbatches, self.law = loss_fn, microbatches, law
        self.groups: dict[Hashable, list[nn.Parameter]] = {}
        for param, chunks in self.holders.items():
            self.groups.setdefault(groups(tuple(chunks)), []).append(param)
        self.skips, self.rounding = skips, rounding or Rounding(None)
        self.printed, self.decayed, self.clip_norm = printed, decayed, math.inf if clip_norm is None else clip_norm
        self.optimizer = make_optimizer(optimizer, self.model, self.holders)
        self.order = _weights(self.optimizer)
        copied = copy.deepcopy(self.model)
        shadow = make_optimizer(optimizer, copied, copied.parameters())
        self.shadow = shadow, lr_scheduler(shadow) if lr_scheduler else None  # runs ahead, to know coming rates
        self.options = [_options(shadow)]  # of each update, those of all groups
        self.scheduler = lr_scheduler(self.optimizer) if lr_scheduler else None
        self.updates, self.gradients = 0, dict[nn.Parameter, Tensor]()  # the last ones
        self.flush()

    def flush(self) -> None:  # no version from before it is read after it; the optimizer's state stays
        self.begun, self.versions = self.updates, list[torch.optim.Optimizer]()
        self.known = dict[tuple[int, int], dict[nn.Parameter, Tensor]]()
        self._keep()

    def _keep(self) -> None:
        """The newest version: a copy of the optimizer holds weights, state, options and, here, last gradients."""
        self.versions.append(copy.deepcopy(self.optimizer))
        for param, kept in zip(self.order, _weights(self.versions[-1]), strict=True):
            kept.grad = self.gradients.get(param)

    def reads(self, chunks: Iterable[int], k: int, j: int) -> Reads:
        """Tied parameters: one prediction a mini-batch, the latest and the furthest, for both passes."""
        if len(holders := list(chunks)) == 1:
            return self.law(k, j)
        delays, aheads, _ = zip(
            *(self.law(chunk, i) for chunk in holders for i in range(self.microbatches)), strict=True
        )
        return Reads(max(delays), max(aheads), None)

    def predicted(self, version: int, ahead: int) -> dict[nn.Parameter, Tensor]:
        """The weights `ahead` updates after a version; before the first update, the newest ones."""
        if (version, ahead) not in self.known:
            update = self.begun + version
            options = [self._options_of(update + i) for i in range(ahead)] if update else []
            move = self._decayed if self.decayed else self._linear
            self.known[version, ahead] = dict(zip(self.order, move(self.versions[version], options), strict=True))
        return self.known[version, ahead]

    def _linear(self, past: torch.optim.Optimizer, options: list[Options]) -> list[Tensor]:
        if not options:
            return [weight.detach() for weight in _weights(past)]
        rule = partial(direction, type(past).__name__, printed=self.printed)
        return [
            weight.detach().add(
                rule(weight, group, past.state[weight]),
                alpha=-sum(float(update["lr"]) for update in coming),
            )
            for group, *coming in zip(past.param_groups, *options, strict=True)
            for weight in group["params"]
        ]

    def _decayed(self, past: torch.optim.Optimizer, options: list[Options]) -> list[Tensor]:
        shadow = copy.deepcopy(past)
        for update in options:
            for group, scheduled in zip(shadow.param_groups, update, strict=True):
                group |= scheduled
            for weight in _weights(shadow):
                weight.grad = torch.zeros_like(weight)
            shadow.step()
        return [weight.detach() for weight in _weights(shadow)]

    def _options_of(self, update: int) -> Options:
        optimizer, scheduler = self.shadow
        while len(self.options) <= update:
            optimizer.step()  # without gradients: it does nothing
            with contextlib.suppress(ValueError):  # a scheduler that has ended keeps its last rate
                if scheduler is not None:
                    scheduler.step()
            self.options.append(_options(optimizer))
        return self.options[update]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """One update. Gradients are added by micro-batch in each chunk, then over the chunks of a tied parameter."""
        t, m, total = len(self.versions) - 1, self.microbatches, 0.0
        sums = dict[tuple[nn.Parameter, int], Tensor]()
        for j, (x, y) in enumerate(zip(inputs.chunk(m), targets.chunk(m), strict=True)):
            leaves, later, weights = (
                dict[tuple[nn.Parameter, int], Tensor](),
                list[Tensor | None](),
                dict[str, Tensor](),
            )
            for param, chunks in self.holders.items():
                for k, names in chunks.items():
                    delay, ahead, backward = self.reads(chunks, k, j)
                    leaf = self.rounding.leaf_of(self.model, param, self.predicted(max(0, t - delay), ahead)[param])
                    later.append(None if backward is None else self.predicted(t, backward)[param])
                    leaves[param, k] = leaf
                    weights |= dict.fromkeys(names, leaf)
            loss = self.loss_fn(self.rounding.output(self.model, weights, x), y) / m
            for leaf, other in zip(leaves.values(), later, strict=True):
                if other is not None:
                    leaf.data.copy_(other)  # behind autograd's back
            for key, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                wide = self.rounding.gradient(grad)
                sums[key] = sums[key] + wide if key in sums else wide
            total += loss.item()
        for param, chunks in self.holders.items():
            param.grad = sum((sums[param, k] for k in chunks), torch.zeros(())).to(param.dtype)
        for params in self.groups.values():
            if self.skips and not is_finite(param.grad for param in params):
                for param in params:
                    param.grad = None  # the optimizer leaves it as it is
            else:
                torch.nn.utils.clip_grad_norm_(params, self.clip_norm)
        self.gradients |= {param: param.grad.clone() for param in self.order if param.grad is not None}
        self.optimizer.step()  # which may overwrite them
        if self.scheduler is not None:
            self.scheduler.step()
        self.updates += 1
        self._keep()
        return total


def _weights(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _options(optimizer: torch.optim.Optimizer) -> Options:
    """What a scheduler changes."""
    names = ("lr", "momentum", "betas")
    return [{name: copy.copy(group[name]) for name in names if name in group} for group in optimizer.param_groups]
