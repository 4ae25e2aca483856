"""What ranks compare besides settings and model: equal for what trains alike, different for what does not."""

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from tests.helpers.faults import Trial
from tests.helpers.plain import linear
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft import faults
from weft.errors import WeftError
from weft.runtime.assembly.consistency import check, check_same
from weft.runtime.assembly.description import describe_loss, describe_updates, versions

SOURCE = """
def loss(output, target):
    kinds = {"mean", "sum", "none", "other"}
    return (output - target).square().mean() if "mean" in kinds else max(0.1, *[x for x in output])
"""


def compiled(source: str, file: str = "here.py", function: str = "loss") -> Callable[..., Any]:
    names: dict[str, Any] = {"__name__": "user"}
    exec(compile(source, file, "exec"), names)
    found = names[function]
    assert isinstance(found, FunctionType)
    return found


class Scaled:
    """A callable that is no function."""

    def __init__(self, scale: float, secret: object = None) -> None:
        self.scale, self.secret = scale, secret or object()

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * functional.mse_loss(output, target)

    def method(self, output: Tensor, target: Tensor) -> Tensor:
        return functional.mse_loss(output, target)


def smoothed(amount: float, weight: float = 1.0) -> nn.Module:
    return nn.Sequential(nn.CrossEntropyLoss(torch.tensor([1.0, weight]), label_smoothing=amount))


ALIKE: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (functional.mse_loss, functional.mse_loss),
    (torch.sub, torch.sub),
    (compiled(SOURCE), compiled("\n\n# moved\n" + SOURCE, "there.py")),
    (nn.MSELoss(), nn.MSELoss()),
    (smoothed(0.1), smoothed(0.1)),
    (Scaled(math.nan), Scaled(math.nan)),  # with other objects at other addresses
    (Scaled(1).method, Scaled(1).method),
    (functools.partial(functional.cross_entropy, label_smoothing=0.1),) * 2,
]
OTHER: list[tuple[Callable[..., Any], Callable[..., Any], str]] = [
    (functional.mse_loss, functional.l1_loss, "loss_fn (rank 0: torch.nn.functional.mse_loss, rank 1: torch.nn.func"),
    (compiled(SOURCE), compiled(SOURCE.replace("0.1", "0.2")), "code of loss_fn (rank 0: "),  # a constant
    (compiled(SOURCE), compiled(SOURCE.replace("square", "abs")), "code of loss_fn"),  # a name
    (compiled(SOURCE), compiled(SOURCE.replace("output - target", "target * output")), "code of loss_fn"),
    (compiled(SOURCE), compiled(SOURCE.replace("[x for", "[-x for")), "code of loss_fn"),  # in code inside it
    (nn.MSELoss(), nn.L1Loss(), "loss_fn (rank 0: torch.nn.modules.loss.MSELoss, rank 1: torch.nn.modules.loss.L1Loss"),
    (smoothed(0.1), smoothed(0.2), "loss_fn.0.label_smoothing (rank 0: 0.1, rank 1: 0.2)"),
    (smoothed(0.1), smoothed(0.1, weight=2.0), "loss_fn.0.weight (rank 0: "),
    (Scaled(1.0), Scaled(2.0), "loss_fn.scale (rank 0: 1.0, rank 1: 2.0)"),
    (
        functools.partial(functional.cross_entropy, label_smoothing=0.1),
        functools.partial(functional.cross_entropy, label_smoothing=0.2),
        "loss_fn.label_smoothing (rank 0: 0.1, rank 1: 0.2)",
    ),
    (functional.mse_loss, functools.partial(functional.mse_loss, reduction="sum"), "loss_fn.reduction (rank 0: None"),
]


def as_sent(description: Any) -> Any:
    return json.loads(json.dumps(description))


@pytest.mark.parametrize("pair", ALIKE)
def test_losses_that_compute_alike_are_equal(pair: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    left, right = (as_sent(describe_loss(loss)) for loss in pair)
    assert left == right
    check_same([left, right])


@pytest.mark.parametrize(("left", "right", "words"), OTHER)
def test_losses_that_differ_are_told_apart(left: Callable[..., Any], right: Callable[..., Any], words: str) -> None:
    with pytest.raises(WeftError) as caught:
        check_same([as_sent(describe_loss(loss)) for loss in (left, right)])
    assert str(caught.value).startswith(f"all ranks need the same {words}")


def test_the_order_of_a_constant_set_does_not_count() -> None:
    """It depends on the hash seed of a process, or, here, on the order of insertion."""
    orders = [frozenset([0, 8]), frozenset([8, 0])]
    assert len(set(map(repr, orders))) == 2
    losses = []
    for order in orders:
        loss = compiled("def loss(output, target): return output if target in {0, 8} else target")
        constants = tuple(order if isinstance(value, frozenset) else value for value in loss.__code__.co_consts)
        assert order in constants
        loss.__code__ = loss.__code__.replace(co_consts=constants)
        losses.append(describe_loss(loss))
    assert losses[0] == losses[1]


def described(optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], **options: Any) -> Any:
    pipe = weft.Pipeline(
        linear(2), loss_fn=functional.mse_loss, optimizer=optimizer, schedule="1f1b", microbatches=1, **options
    )
    return as_sent(describe_updates(next(iter(pipe._assembly.chunks.values())).chunk.sets))


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.SGD,
        functools.partial(torch.optim.SGD, lr=0.001),
        lambda params: torch.optim.SGD(params, lr=1e-3),
        lambda params: torch.optim.SGD([{"params": [param], "lr": 0.5 / n} for n, param in enumerate(params, 1)]),
    ],
)
def test_it_does_not_matter_how_an_optimizer_is_built(optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    """Nor do options of single layers, which differ between chunks."""
    check_same([described(torch.optim.SGD), described(optimizer)])


@pytest.mark.parametrize(
    ("optimizer", "options", "words"),
    [
        (functools.partial(torch.optim.AdamW, lr=0.2), {}, "optimizer.lr (rank 0: 0.001, rank 1: 0.2)"),
        (
            lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.5)),
            {},
            "optimizer.lr (rank 0: 0.001, rank 1: 0.5)",
        ),
        (
            functools.partial(torch.optim.AdamW, betas=(0.5, 0.9)),
            {},
            "optimizer.betas (rank 0: [0.9, 0.999], rank 1: [",
        ),
        (torch.optim.Adam, {}, "optimizer (rank 0: torch.optim.adamw.AdamW, rank 1: torch.optim.adam.Adam)"),
        (
            torch.optim.AdamW,
            {"lr_scheduler": torch.optim.lr_scheduler.ConstantLR},
            "lr_scheduler (rank 0: None, rank 1: torch.optim.lr_scheduler.ConstantLR)",
        ),
    ],
)
def test_optimizers_that_differ_are_told_apart(
    optimizer: Callable[..., torch.optim.Optimizer], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(WeftError) as caught:
        check_same([described(torch.optim.AdamW), described(optimizer, **options)])
    assert str(caught.value).startswith(f"all ranks need the same {words}")


def test_ranks_without_parameters_have_no_optimizer_to_compare() -> None:
    assert describe_updates([]) is None
    check_same([None, {"optimizer": "SGD"}, None, {"optimizer": "SGD"}])
    check_same([None, None])
    with pytest.raises(WeftError, match=r"optimizer \(rank 1: SGD, rank 3: Adam\)"):
        check_same([None, {"optimizer": "SGD"}, None, {"optimizer": "Adam"}])


def test_a_fault_can_hit_the_agreement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(tmp_path, "agreement:1:parent:raise")
    for name, value in trial.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("RANK", raising=False)
    try:
        faults.arm()
        with pytest.raises(RuntimeError, match="a fault was requested"):
            described(torch.optim.SGD)
    finally:
        monkeypatch.undo()
        faults.arm()
    trial.check()


def test_versions_are_compared() -> None:
    assert list(versions()) == ["weft", "torch", "numpy", "python"]
    old: dict[str, Any] = {"settings": {}, "model": []}  # of a weft that does not compare versions
    with pytest.raises(WeftError, match=r"the same version of weft \(rank 0: .*, rank 1: None\); install the same one"):
        check([old | {"versions": versions()}, old])
