"""A second implementation of each method: its formula in plain PyTorch, one process, without weft.

No pipeline, no schedule, no order of work: mini-batch `t` passes chunk `k` with micro-batch `j` at the weights
after `t - delay(k, j)` updates, forward and backward, and the sum of its gradients makes the next version.
"""

import copy
import inspect
import math
from collections.abc import Callable, Hashable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

Delay = Callable[[int, int], int]  # chunk k, micro-batch j -> how many updates its weights are behind
MakeOptimizer = Callable[[Any], torch.optim.Optimizer]  # of parameters, or of pairs with their names
Grouping = Callable[[tuple[int, ...]], Hashable]  # the chunks that hold a parameter -> the group that skips with it


# By stages, slack and split, for each chunk: the forwards of `weave` that begin before a micro-batch is retired.
LATE_IN_WEAVE = {
    (1, 0.5, True): "00",
    (2, 0.5, True): "2110",
    (3, 0.5, True): "332210",
    (4, 0.5, True): "44322110",
    (8, 0.5, True): "A998776554432210",
    (1, 0, True): "00",
    (2, 0, True): "2100",
    (3, 0, True): "221100",
    (4, 0, True): "22211100",
    (8, 0, True): "5554443332221110",
    (2, 0.5, False): "2110",
    (3, 0.5, False): "432210",
    (4, 0.5, False): "65433210",
    (8, 0.5, False): "EDCBA98776543210",
    (2, 0, False): "2100",
    (3, 0, False): "321100",
    (4, 0, False): "44322100",
}


def delays(
    method: str,
    stages: int,
    microbatches: int,
    *,
    vertical_sync: bool = False,
    fresh: bool = False,
    warmup: int = 1,
    chunks: int = 2,
    slack: float = 0.5,
    split: bool = True,
) -> Delay:
    """How many updates late each forward reads, by the formula of its method."""
    if method == "weave":
        late = [int(digit, 16) for digit in LATE_IN_WEAVE[stages, slack, split]]
        return lambda k, j: max(0, math.ceil((late[k] - j) / microbatches))
    if method in ("pipedream", "paci") and not vertical_sync:
        return lambda k, j: max(0, math.ceil((stages - 1 - k - j) / microbatches))
    turn = max(n * stages for n in range(1, warmup + 1) if microbatches % (n * stages) == 0) if fresh else microbatches
    return lambda k, j: {"pipedream": stages - 1, "2bw": 1, "wpipe": int(k < stages and j < turn)}.get(method, 0)


def skipped_together(
    method: str, stages: int, *, norm: str = "group", slack: float = 0.5, split: bool = True, **_: object
) -> Grouping:
    """Which parameters share a norm: they skip a mini-batch together, if the gradient of one of them is not finite."""
    if norm == "global":
        return lambda chunks: None
    if method == "wpipe":
        return lambda chunks: min(chunks) >= stages
    if method == "weave":
        late = LATE_IN_WEAVE[stages, slack, split]
        return lambda chunks: chunks if len(chunks) > 1 and stages > 1 else late[chunks[0]]
    return lambda chunks: chunks if method in ("pipedream", "paci", "xpipe") else None


def clip(parts: Iterable[list[nn.Parameter]], limit: float) -> None:
    """Scale the gradients of some parts of a model by their common norm, whose squares are added by part in float64."""
    gradients = [[param.grad for param in part if param.grad is not None] for part in parts]
    squares = [torch.stack([torch.linalg.vector_norm(grad) for grad in part]) for part in gradients]
    total = math.sqrt(sum(torch.linalg.vector_norm(norms).item() ** 2 for norms in squares))
    for grad in (grad for part in gradients for grad in part):
        grad.mul_(min(1.0, limit / (total + 1e-6)))


def is_finite(grads: Iterable[Tensor | None]) -> bool:
    return all(bool(torch.isfinite(grad).all()) for grad in grads if grad is not None)


def make_optimizer(make: MakeOptimizer, model: nn.Module, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimizer of some parameters of a model, with their names if it asks for them."""
    if "named_parameters" not in inspect.signature(make).parameters:
        return make(list(params))
    names = {param: name for name, param in model.named_parameters()}
    return make([(names[param], param) for param in params])


class Rounding:
    """Low-precision compute: weights and inputs rounded once to a dtype, losses in fp32; None rounds nothing.

    The layers of the models that it runs pass on the dtype that they are given.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype

    def leaf(self, weight: Tensor) -> Tensor:
        return weight.clone().to(self.dtype or weight.dtype).requires_grad_()

    def leaf_of(self, model: nn.Module, param: nn.Parameter, weight: Tensor) -> Tensor:
        """BatchNorm keeps its weights beside its statistics, in fp32."""
        norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
        wide = any(param is other for norm in norms for other in norm.parameters())
        return weight.clone().requires_grad_() if wide else self.leaf(weight)

    def output(self, model: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Tensor:
        given = x.to(self.dtype) if self.dtype is not None and x.is_floating_point() else x
        found: Tensor = functional_call(model, weights, (given,), tie_weights=False)
        return found.to(torch.float32) if self.dtype is not None else found

    def gradient(self, gradient: Tensor) -> Tensor:
        """In the dtype of the sum over micro-batches."""
        return gradient.to(torch.float32) if self.dtype is not None else gradient


class Oracle:
    """Trains a copy of `model`. `forgetful` runs every backward at the newest weights: a bug, not the law.

    With `newest_backward` it is the law, but not for tied parameters: both passes read the version of the forward.

    With `skips`, the groups of a mini-batch with a gradient that is not finite make no update. Groups are clipped by
    norms of their own.
    """

    def __init__(
        self,
        model: nn.Sequential,
        *,
        loss_fn: Callable[[Tensor, Tensor], Tensor],
        optimizer: MakeOptimizer,
        microbatches: int,
        balance: list[int],
        delay: Delay,
        clip_norm: float | None = None,
        lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        forgetful: bool = False,
        newest_backward: bool = False,
        groups: Grouping = lambda chunks: None,
        skips: bool = False,
        rounding: Rounding | None = None,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.holders: dict[nn.Parameter, dict[int, list[str]]] = {param: {} for param in self.model.parameters()}
        for k, end in enumerate(accumulate(balance)):
            for name, param in self.model[end - balance[k] : end].named_parameters(remove_duplicate=False):
                self.holders[param].setdefault(k, []).append(name)  # several chunks: tied
        self.loss_fn, self.microbatches, self.delay, self.forgetful = loss_fn, microbatches, delay, forgetful
        self.rounding, self.newest_backward = rounding or Rounding(None), newest_backward
        self.clip_norm, self.skips = clip_norm, skips
        self.groups: dict[Hashable, list[nn.Parameter]] = {}
        for param, chunks in self.holders.items():
            self.groups.setdefault(groups(tuple(chunks)), []).append(param)
        self.optimizers = {
            group: make_optimizer(optimizer, self.model, params) for group, params in self.groups.items()
        }
        self.norms: list[float] = []  # of each mini-batch's gradient, before clipping
        self.schedulers = [lr_scheduler(made) if lr_scheduler else None for made in self.optimizers.values()]
        self.flush()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        (only,) = self.optimizers.values()
        return only

    def parts(self, params: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
        """Parameters by the chunks that hold them: those of a chunk alone before tied ones."""
        found: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for param in params:
            found.setdefault(tuple(self.holders[param]), []).append(param)
        return [found[chunks] for chunks in sorted(found, key=lambda chunks: (chunks[0], len(chunks)))]

    def flush(self) -> None:  # no version from before it is read after it
        self.versions = [[param.detach().clone() for param in self.holders]]

    def step(self, inputs: Tensor, targets: Tensor) -> float:
        """One update. Gradients are added by micro-batch in each chunk, then over the chunks of a tied parameter."""
        t, m, total = len(self.versions) - 1, self.microbatches, 0.0
        sums = dict[tuple[nn.Parameter, int], Tensor]()
        for j, (x, y) in enumerate(zip(inputs.chunk(m), targets.chunk(m), strict=True)):
            leaves, weights = dict[tuple[nn.Parameter, int], Tensor](), dict[str, Tensor]()
            for i, (param, chunks) in enumerate(self.holders.items()):
                late = max(self.delay(k, j) for k in chunks)  # tied: the oldest version that one of its chunks reads
                for k, names in chunks.items():
                    leaves[param, k] = self.rounding.leaf_of(self.model, param, self.versions[max(0, t - late)][i])
                    weights |= dict.fromkeys(names, leaves[param, k])
            loss = self.loss_fn(self.rounding.output(self.model, weights, x), y) / m
            for (param, _), leaf in leaves.items():
                if self.forgetful or (self.newest_backward and len(self.holders[param]) == 1):
                    leaf.data.copy_(param.data)  # behind autograd's back
            for key, grad in zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                wide = self.rounding.gradient(grad)
                sums[key] = sums[key] + wide if key in sums else wide
            total += loss.item()
        for param, chunks in self.holders.items():
            param.grad = sum((sums[param, k] for k in chunks), torch.zeros(())).to(param.dtype)
        found = [param.grad.reshape(-1) for param in self.holders if param.grad is not None]
        self.norms.append(torch.cat(found).norm().item())
        for (group, params), scheduler in zip(self.groups.items(), self.schedulers, strict=True):
            if self.skips and not is_finite(param.grad for param in params):
                continue
            if self.clip_norm is not None:
                clip(self.parts(params), self.clip_norm)
            self.optimizers[group].step()
            if scheduler is not None:
                scheduler.step()
        self.versions.append([param.detach().clone() for param in self.holders])
        return total
