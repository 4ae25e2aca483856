"""Models that were cut, with `precision="bf16"`: their graphs name the dtypes that the model has with bf16 weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tests.helpers.plain import WIDTH, batches, differing, numbers, pipeline, sgd, train
from torch import Tensor, nn
from torch.nn import functional

import weft
from weft.errors import WeftError


class RMSNorm(nn.Module):
    """In fp32, and back to the dtype of its input, as in Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Model(nn.Module):
    """Adds up in fp32 across its cuts; what is cast there is lost."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm, self.statistics = RMSNorm(), nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.3))

    def forward(self, x: Tensor) -> Tensor:
        total = self.first(x).float() * self.scale
        total = total + self.norm(self.second(torch.tanh(total).to(x.dtype))).float()
        found: Tensor = self.statistics(self.third(total.to(x.dtype)))
        return found


CUTS = ["second", "norm", "statistics"]


def model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        return Model()


def narrow(masters: nn.Module) -> nn.Module:
    """Parameters in bf16, but not those of BatchNorm; buffers as they are."""
    found = copy.deepcopy(masters)
    for module in found.modules():
        if not isinstance(module, nn.BatchNorm1d):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.bfloat16()
    return found


def trained(data: list[Any], *, microbatches: int = 4) -> dict[str, Tensor]:
    """The uncut model, by hand."""
    masters = model()
    steps = sgd(masters.parameters())
    for inputs, targets in data:
        computing = narrow(masters)
        sums = [torch.zeros_like(master) for master in masters.parameters()]
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            computing.zero_grad()
            loss = functional.mse_loss(computing(x.bfloat16()).float(), y) / microbatches
            loss.backward()  # type: ignore[no-untyped-call]
            for total, parameter in zip(sums, computing.parameters(), strict=True):
                assert parameter.grad is not None
                total += parameter.grad
        for master, total in zip(masters.parameters(), sums, strict=True):
            master.grad = total
        for name, buffer in computing.named_buffers():
            masters.get_buffer(name).copy_(buffer)
        steps.step()
    return dict(masters.state_dict())


@pytest.mark.parametrize(
    "options", [{}, {"schedule": "interleaved"}, {"recompute": True}, {"balance": "time"}], ids=str
)
def test_a_cut_changes_no_bit(options: dict[str, Any]) -> None:
    data = batches(3)
    pipe = pipeline(model(), cut=CUTS, example=data[0][0][:4], precision="bf16", **options)
    state = train(pipe, data)
    assert {tensor.dtype for tensor in state.values() if tensor.is_floating_point()} == {torch.float32}
    assert differing(state, trained(data)) == []
    fp32 = train(pipeline(model(), cut=CUTS, example=data[0][0][:4]), data)
    assert "first.weight" in differing(state, fp32)


def test_evaluation_has_the_other_graph() -> None:
    inputs = numbers(8, WIDTH)
    pipe = pipeline(model(), cut=CUTS, example=inputs[:4], precision="bf16")
    assert torch.equal(pipe.predict(inputs), narrow(model()).eval()(inputs.bfloat16()).float())


def test_a_model_on_the_meta_device(tmp_path: Path) -> None:
    data, file = batches(3), tmp_path / "model.safetensors"
    save_file(model().state_dict(), file)
    with weft.on_meta():
        empty = Model()
    pipe = pipeline(empty, weights=file, cut=CUTS, example=data[0][0][:4], precision="bf16")
    assert differing(train(pipe, data), trained(data)) == []


def test_exported_models_have_fixed_dtypes() -> None:
    program = torch.export.export(model(), (numbers(4, WIDTH),))
    with pytest.raises(WeftError, match=r'fixed dtypes.*bfloat16 \(got a ExportedProgram\).*"bf16-autocast"'):
        weft.Pipeline(program, loss_fn=functional.mse_loss, optimizer=sgd, microbatches=1, precision="bf16")
