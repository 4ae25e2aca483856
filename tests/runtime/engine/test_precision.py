"""What layers, losses and optimizers see with `precision="bf16"`, and models that it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.helpers.plain import WIDTH, batches, differing, linear, numbers, pipeline, plain, sgd, train
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import weft
from weft.errors import RunError, WeftError

BF16: dict[str, Any] = {"precision": "bf16"}


def rounding(
    model: nn.Sequential, data: list[Any], *, optimizer: Any = sgd, late: int = 0, microbatches: int = 4
) -> dict[str, Tensor]:
    """Plain training of fp32 masters, of which a bf16 copy of the model computes gradients.

    The first `late` layers of the copy are one update behind.
    """
    masters, before = copy.deepcopy(model), copy.deepcopy(model)
    trained = {name: master for name, master in masters.named_parameters() if master.requires_grad}
    steps = optimizer(trained.values())
    for inputs, targets in data:
        now = copy.deepcopy(masters)
        narrow = nn.Sequential(*list(before)[:late], *list(now)[late:]).bfloat16()
        before = copy.deepcopy(masters)
        sums = {name: torch.zeros_like(master) for name, master in trained.items()}
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            output = narrow(x.bfloat16() if x.is_floating_point() else x).float()
            parameters = {name: parameter for name, parameter in narrow.named_parameters() if name in trained}
            loss = functional.mse_loss(output, y) / microbatches
            narrow.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            for name, parameter in parameters.items():
                assert parameter.grad is not None
                sums[name] += parameter.grad.float().to_dense()
        for name, master in trained.items():
            master.grad = sums[name]
        steps.step()
    return dict(masters.state_dict())


class Probe(nn.Module):
    """Notes the dtypes that it is given, and returns what a function makes of them."""

    def __init__(self, seen: list[list[torch.dtype]], make: Callable[..., Any] = lambda x: x) -> None:
        super().__init__()
        self.seen, self.make = seen, make

    def __deepcopy__(self, memo: dict[int, Any]) -> Probe:
        return self

    def forward(self, *given: Tensor) -> Any:
        self.seen.append([tensor.dtype for tensor in given])
        return self.make(*given)


def test_layers_are_given_bf16_and_losses_fp32() -> None:
    """Whatever the layer before returned; whole numbers are left as they are, on both sides of a cut."""
    seen: list[list[torch.dtype]] = []
    losses: list[torch.dtype] = []

    def loss_fn(output: Any, target: Tensor) -> Tensor:
        losses.append(output[0].dtype)
        return functional.mse_loss(output[0], target)

    layers = [
        Probe(seen, lambda x: (x.double(), torch.ones(len(x), dtype=torch.int64))),
        Probe(seen, lambda x, n: (x.float(), n)),
        Probe(seen, lambda x, n: x),
        nn.Linear(WIDTH, WIDTH),
        Probe(seen, lambda x: (x, torch.zeros(len(x), dtype=torch.bool))),
    ]
    pipe = pipeline(layers, loss_fn=loss_fn, balance=[2, 3], **BF16)
    inputs, targets = batches(1)[0]
    pipe.step(inputs, targets)
    pipe.flush()
    assert {tuple(dtypes) for dtypes in seen} == {(torch.bfloat16,), (torch.bfloat16, torch.int64)}
    assert len(seen) == 4 * 4  # micro-batches x probes
    assert set(losses) == {torch.float32}


def test_evaluations_and_predictions_read_bf16_weights() -> None:
    model, (inputs, targets) = linear(), batches(1)[0]
    metrics: list[torch.dtype] = []

    def metric(output: Tensor, target: Tensor) -> Tensor:
        metrics.append(output.dtype)
        return torch.zeros(())

    pipe = pipeline(model, schedule="wpipe", **BF16)
    output = copy.deepcopy(model).bfloat16()(inputs.bfloat16()).float()
    found = pipe.predict(inputs)
    assert (found.dtype, torch.equal(found, output)) == (torch.float32, True)
    assert not torch.equal(found, model(inputs))
    assert pipe.evaluate([(inputs, targets)], metrics={"none": metric})["loss"] == pytest.approx(
        functional.mse_loss(output, targets).item(), rel=1e-6
    )
    assert set(metrics) == {torch.float32}


def test_evaluation_after_training_reads_the_newest_weights() -> None:
    """Not those of older versions, nor those of the last forward."""
    model, data, inputs = linear(), batches(3), batches(4)[3][0]
    for name in ("wpipe", "xpipe"):
        pipe = pipeline(model, schedule=name, **BF16)
        trained = copy.deepcopy(model)
        trained.load_state_dict(train(pipe, data))
        assert torch.equal(pipe.predict(inputs), trained.bfloat16()(inputs.bfloat16()).float())


def test_frozen_parameters_keep_their_bits() -> None:
    """They are computed in bf16, too; those that are bf16 already stay so."""
    model = linear()
    model[2].requires_grad_(False)
    model[5].requires_grad_(False).bfloat16()
    data, before = batches(3), copy.deepcopy(model.state_dict())
    pipe = pipeline(model, schedule="wpipe", **BF16)
    state = train(pipe, data)
    assert differing(state, rounding(model, data, late=4)) == []
    assert all(torch.equal(state[name], before[name]) for name in before if name[0] in "25")
    whole = sum(parameter.nbytes for name, parameter in model.named_parameters() if name[0] != "5")
    assert sum(rank["bytes"]["masters"] for rank in pipe.report().ranks) == whole


class Checkpointed(nn.Module):
    """Runs a backward of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=True)
        return found


class Twice(nn.Module):
    """Uses a weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.linear(torch.tanh(self.linear(x)))
        return found


def test_a_layer_that_runs_its_own_backward() -> None:
    model = nn.Sequential(*(Checkpointed(layer) if n % 2 else layer for n, layer in enumerate(linear())))
    state = train(pipeline(model, **BF16), batches(3))
    assert differing(state, rounding(model, batches(3))) == []


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_weight_that_is_used_twice(name: str) -> None:
    """Both gradients are added up in fp32, as far as autograd does not add them up before."""
    model = nn.Sequential(*(Twice() for _ in range(4)))
    state = train(pipeline(model, schedule=name, **BF16), batches(3))
    assert differing(state, rounding(model, batches(3)), within=1e-2) == []


def test_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH, sparse=True), nn.Linear(WIDTH, WIDTH))
    data = [(torch.arange(16) % (3 + t), numbers(16, WIDTH, seed=t)) for t in range(3)]

    def descent(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    state = train(pipeline(model, optimizer=descent, **BF16), data)
    assert differing(state, rounding(model, data, optimizer=descent), within=1e-3) == []  # rows are added one by one


@pytest.mark.parametrize("name", ["2bw", "xpipe"])
def test_rounding_makes_no_gap(name: str) -> None:
    """A run whose masters change too little for another bf16 number has no stale weights: GapAware does nothing."""

    def slow(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=1e-9)

    state, damped = (
        train(pipeline(linear(), schedule=name, optimizer=slow, cure=cure, **BF16), batches(4))
        for cure in (None, weft.cures.GapAware())
    )
    assert differing(state, damped) == []


def test_distances_are_those_of_rounded_weights() -> None:
    """Without a delay, passes read what the update meets."""
    pipe = pipeline(linear(), telemetry=1, **BF16)
    train(pipe, batches(3))
    samples = [s for rank in pipe.report().ranks for chunk in rank["chunks"] for s in chunk["samples"]]
    assert samples
    assert {(sample["predicted"], sample["stale"]) for sample in samples} == {(0.0, 0.0)}


class Positions(nn.Module):
    """Adds a table of fp32 numbers."""

    def __init__(self, *, casts: bool) -> None:
        super().__init__()
        self.linear, self.casts = nn.Linear(WIDTH, WIDTH), casts
        self.register_buffer("table", numbers(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        table = self.get_buffer("table")
        found: Tensor = self.linear(x + (table.to(x.dtype) if self.casts else table))
        return found


def test_a_layer_that_mixes_dtypes_is_told_how_not_to() -> None:
    inputs, targets = batches(1)[0]
    pipe = pipeline([*linear(3), Positions(casts=False)], **BF16)
    with pytest.raises(WeftError, match=r"layer 3 mixes dtypes.*self\.table\.to\(x\.dtype\).*bf16-autocast"):
        pipe.step(inputs, targets)
    for casts, precision in ((True, "bf16"), (False, "bf16-autocast")):
        assert pipeline([*linear(3), Positions(casts=casts)], precision=precision).step(inputs, targets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_low_precision_is_told_of_fp32_inputs(dtype: torch.dtype) -> None:
    inputs, targets = batches(1)[0]
    name = str(dtype)[6:]
    with pytest.raises(RunError, match=rf"parameters of {name}.*model\.float\(\).*or give it inputs of {name}"):
        pipeline(linear().to(dtype)).step(inputs, targets)
    pipe = pipeline(linear().to(dtype))
    pipe.step(inputs.to(dtype), targets.to(dtype))
    pipe.flush()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_errors_are_not_taken_for_mixed_dtypes(dtype: torch.dtype) -> None:
    inputs, targets = batches(1)[0]
    inputs = inputs[:, 1:].to(dtype) if dtype == torch.bfloat16 else inputs.double()
    with pytest.raises(RunError, match="mat1 and mat2") as refused:
        pipeline(linear().to(dtype)).step(inputs, targets)
    assert "trained parameters" not in str(refused.value)


# Refusals


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_trained_parameters_are_fp32(dtype: torch.dtype) -> None:
    model = linear()
    model[3].to(dtype)
    message = rf'precision="bf16" trains fp32 parameters.*\(3\.0\.weight: {str(dtype)[6:]}\).*model\.float\(\)'
    with pytest.raises(WeftError, match=message):
        pipeline(model, **BF16)
    model[3].requires_grad_(False)
    assert pipeline(model, **BF16).state_dict()["3.0.weight"].dtype == dtype


def test_layers_that_write_to_their_weights() -> None:
    model = nn.Sequential(nn.Embedding(8, WIDTH, max_norm=1.0), nn.Linear(WIDTH, WIDTH))
    with pytest.raises(WeftError, match=r'Embedding with max_norm changes its weights.*precision="bf16-autocast"'):
        pipeline(model, **BF16)


def test_plain_training_in_fp32_differs() -> None:
    """The control of the tests above."""
    model, data = linear(), batches(3)
    state = train(pipeline(model, **BF16), data)
    assert differing(state, rounding(model, data)) == []
    assert len(differing(state, plain(model, data)[0])) == len(state)
