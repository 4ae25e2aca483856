"""A cut model is bit-identical to the model in one piece: outputs, gradients and buffers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.helpers.cuts import WIDTH, Block, Cut, Function, Skips, Stack, expect_same, rows, run, tensors
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import WeftError
from weft.runtime.partition.cut import cut, cut_layers


@pytest.fixture(scope="module")
def skips() -> Cut:
    model = Skips()
    return model, cut_layers(model, at=["second", "third"], example=[rows(4), rows(4)])


@pytest.fixture(scope="module")
def stack() -> Cut:
    model = Stack(Block(), Block())
    return model, cut_layers(model, at="blocks.1", example=rows(4))


# Cuts, carries and forms of inputs


def test_a_mark_returns_its_argument() -> None:
    x = torch.ones(1)
    assert cut() is None
    assert cut(x) is x
    assert cut(x, 2) == (x, 2)


def expect_skips(model: nn.Module, layers: list[nn.Module]) -> None:
    for training in (True, False):
        for batch in (4, 3, 1):
            expect_same(model, layers, (rows(batch), rows(batch, seed=1)), training=training)


def test_skip_connections_cross_layers(skips: Cut) -> None:
    model, layers = skips
    assert [str(layer).splitlines()[0] for layer in layers] == ["CutLayer("] * 3
    assert [layer.extra_repr() for layer in layers] == ["", "from second", "from third"]
    expect_skips(model, layers)


def test_skip_connections_cross_marks() -> None:
    model = Skips()
    layers = cut_layers(model, at=None, example=(rows(4), rows(4)))
    assert len(layers) == 4
    expect_skips(model, layers)


def test_inputs_come_in_the_form_of_the_example(skips: Cut) -> None:
    (model, by_place), x, scale = skips, rows(4), rows(4, seed=1)
    by_name = cut_layers(model, at=["second"], example={"x": x, "scale": scale})
    torch.manual_seed(0)
    expected = model.train()(x, scale)
    for layers, form in (
        (by_place, (x, scale)),
        (by_place, [x, scale]),
        (by_name, {"x": x, "scale": scale}),
        (by_name, {"scale": scale, "x": x}),
    ):
        torch.manual_seed(0)
        assert torch.equal(run([layer.train() for layer in layers], form)["out"], expected["out"])


def test_arguments_of_any_kind() -> None:
    def forward(linear: nn.Module, x: Tensor, *more: Tensor, flag: bool, tree: Any = None, **rest: Any) -> Any:
        h = linear(x) if flag else x
        cut()
        return h + sum(more) + tree["deep"][0] + rest["other"]

    model = Function(forward)
    example = {"x": rows(4), "flag": True, "tree": {"deep": [rows(4), None]}, "other": rows(4)}
    layers = cut_layers(model, at=None, example=example)
    smaller = {"x": rows(2), "flag": True, "tree": {"deep": [rows(2), None]}, "other": rows(2)}
    expect_same(model, layers, smaller)


def test_a_cut_with_nothing_before_it_makes_no_layer() -> None:
    model = Stack(Block(), nn.Identity(), Block(), nn.Identity())
    layers = cut_layers(model, at=["blocks.0", "blocks.1", "blocks.2", "blocks.3"], example=rows(3))
    assert len(layers) == 2
    assert [name for name, _ in layers[0].named_parameters()] == ["blocks.0.linear.weight", "blocks.0.linear.bias"]
    expect_same(model, layers, rows(3))


def test_parts_of_a_tuple_cross_a_cut() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        left, right = linear(x).chunk(2, -1)
        top = linear(x).topk(2)
        cut()
        return left * right + top.values.sum() + top.indices.sum()

    model = Function(forward)
    expect_same(model, cut_layers(model, at=None, example=rows(4)), rows(3))


def test_marks_of_torch_pipelining() -> None:
    from torch.distributed.pipelining import pipe_split

    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        pipe_split()  # type: ignore[no-untyped-call]
        return linear(h) + x

    model = Function(forward)
    layers = cut_layers(model, at=None, example=rows(4))
    assert len(layers) == 2
    expect_same(model, layers, rows(3))


# Parameters and buffers


def test_layers_hold_the_model_s_own_tensors() -> None:
    model = Stack(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(3)))
    state = model.state_dict(keep_vars=True)
    layers = cut_layers(model, at=["blocks.1", "blocks.2"], example=rows(4))
    for number, layer in enumerate(layers):
        held = layer.state_dict(keep_vars=True)
        assert held.keys() == {name for name in state if name.startswith(f"blocks.{number}.")}
        assert all(tensor is state[name] for name, tensor in held.items())
        assert all(type(module) is nn.Module for module in list(layer.modules())[1:])
    for training in (True, True, False):
        expect_same(model, layers, rows(5), training=training)
    assert model.blocks[2][1].num_batches_tracked == 2  # type: ignore[index]


def test_a_parameter_can_be_replaced(stack: Cut) -> None:
    layer = copy.deepcopy(stack[1][1])
    for training in (True, False):
        layer.train(training)
        owner = layer.get_submodule("blocks.1.linear")
        owner.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 2.0))
        owner.bias = nn.Parameter(torch.zeros(WIDTH))
        x = rows(4).requires_grad_()
        torch.manual_seed(0)
        (found,) = tensors(layer((x,)))
        torch.manual_seed(0)
        hidden = functional.dropout(functional.linear(x, owner.weight, owner.bias).relu(), 0.3, training)
        assert torch.equal(found, x + hidden)
        found.sum().backward()  # type: ignore[no-untyped-call]
        assert owner.weight.grad is not None
    swapped = torch.func.functional_call(layer, {"blocks.1.linear.weight": torch.zeros(WIDTH, WIDTH)}, ((rows(4),),))
    assert torch.equal(swapped, rows(4))


def test_a_tied_parameter_is_one_object() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.middle, self.head = nn.Embedding(11, WIDTH), Block(), nn.Linear(WIDTH, 11, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Any:
            return self.head(self.middle(self.table(x)))

    model, tokens = Tied(), torch.arange(12).reshape(3, 4) % 11
    layers = cut_layers(model, at=["middle", "head"], example=tokens)
    assert [list(layer.state_dict()) for layer in layers] == [
        ["table.weight"],
        ["middle.linear.weight", "middle.linear.bias"],
        ["table.weight"],
    ]
    assert layers[0].get_parameter("table.weight") is layers[2].get_parameter("table.weight") is model.table.weight
    expect_same(model, layers, tokens)
    (whole,) = cut_layers(model, at=["table"], example=tokens)
    assert len(list(whole.named_parameters(remove_duplicate=False))) == 3
    expect_same(model, [whole], tokens)


class Counting(nn.Module):
    """Buffers that change in every possible way."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.constant = torch.arange(float(WIDTH))
        for name in ("assigned", "in_place", "averaged"):
            self.register_buffer(name, torch.zeros(WIDTH))
        self.register_buffer("passing", torch.ones(WIDTH), persistent=False)
        self.assigned: Tensor
        self.averaged: Tensor
        self.in_place: Tensor
        self.passing: Tensor

    def forward(self, x: Tensor) -> Any:
        if self.training:
            before = self.assigned
            self.assigned = self.assigned + x.mean(0)
            self.in_place += 1
            with torch.no_grad():
                self.averaged.mul_(0.9).add_(0.1 * x.mean(0))
            x = x + before
        return (
            self.linear(x) * torch.tensor(2.0 if self.training else 3.0) + self.averaged + self.constant * self.passing
        )


def test_buffers_change_in_their_layer() -> None:
    model = Stack(Counting(), Counting())
    layers = cut_layers(model, at=["blocks.1"], example=rows(4))
    names = ["linear.weight", "linear.bias", "assigned", "in_place", "averaged"]
    for number, layer in enumerate(layers):
        assert sorted(layer.state_dict()) == sorted(f"blocks.{number}.{name}" for name in names)
        assert [name for name, _ in layer.named_buffers()].count(f"blocks.{number}.passing") == 1
    for training in (True, True, False):
        expect_same(model, layers, rows(5), training=training)
    assert model.get_buffer("blocks.0.in_place")[0] == 2


def test_a_buffer_that_changes_belongs_to_one_layer() -> None:
    class Shared(Stack):
        def forward(self, x: Tensor) -> Tensor:
            counting = self.blocks[0]
            assert isinstance(counting, Counting)
            counting.in_place += 1
            return super().forward(x) + counting.in_place

    with pytest.raises(WeftError, match=r"used in one layer only \(buffer: .*blocks.0.in_place, layers: 0, 1\)"):
        cut_layers(Shared(Counting(), Block()), at=["blocks.1"], example=rows(4))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.conv(x))
        out += x
        return self.relu(out)  # type: ignore[no-any-return]


@pytest.mark.parametrize("at", [["2", "4"], ["1.relu", "2.relu", "4"]])
def test_in_place_operations_do_not_affect_other_layers(at: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layers = cut_layers(model, at=at, example=torch.randn(4, 1, 9, 9))
    for shape in ((4, 1, 9, 9), (2, 1, 12, 10)):
        for training in (True, False):
            expect_same(model, layers, torch.randn(shape), training=training)


def test_reparametrised_weights() -> None:
    norm = nn.utils.parametrizations.spectral_norm  # its buffers change in training
    model = Stack(*(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    layers = cut_layers(model, at=["blocks.1"], example=rows(4))
    for training in (True, False):
        expect_same(model, layers, rows(3), training=training)


# Modes, randomness, shapes, devices


def test_cutting_does_not_change_the_model() -> None:
    model = Stack(Block(), Counting())
    model.train().get_submodule("blocks.0").eval()
    modes = [module.training for module in model.modules()]
    state, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    cut_layers(model, at=["blocks.1"], example=rows(4))
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, state[name])
        assert type(tensor) in (Tensor, nn.Parameter)
    assert len(cut_layers(model, at=["blocks.1.linear"], example=rows(4))) == 2  # marks of the first cut would be found


def test_a_failed_cut_does_not_change_the_model() -> None:
    model = Stack(Counting(), Function(lambda linear, x: linear(x) if x.sum() > 0 else x))
    model.eval()
    buffers = dict(model.named_buffers())
    with pytest.raises(WeftError, match=r"torch.export can't export the forward of Stack") as failure:
        cut_layers(model, at=["blocks.1"], example=rows(4))
    assert "data-dependent" in str(failure.value)
    assert "test_cut.py:" in str(failure.value)
    assert "an nn.Sequential or a list of layers" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not model.training
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_dropout_draws_new_numbers(stack: Cut) -> None:
    layers = [layer.train() for layer in stack[1]]
    assert not torch.equal(run(layers, rows(4)), run(layers, rows(4)))
    layers = [layer.eval() for layer in layers]
    assert torch.equal(run(layers, rows(4)), run(layers, rows(4)))


def test_an_example_of_one_sample() -> None:
    model = Skips()
    layers = cut_layers(model, at=None, example=(rows(1), rows(1)))
    for batch in (1, 2, 5):
        expect_same(model, layers, (rows(batch), rows(batch)))


def test_layers_follow_their_inputs_to_another_device() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            h = linear(x) + torch.arange(WIDTH, device=x.device)
        cut()
        return h * torch.tensor([2.0] * WIDTH).to(x.device) + torch.ones(x.shape[0], 1, device=x.device)

    layers = cut_layers(Function(forward), at=None, example=rows(4))
    moved = [copy.deepcopy(layer).to("meta") for layer in layers]
    assert run(moved, rows(3).to("meta")).shape == (3, WIDTH)
    assert run(layers, rows(3)).device.type == "cpu"


def test_autocast() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        cut()
        return linear(h.to(x.dtype)).float()

    model = Function(forward)
    layers = cut_layers(model, at=None, example=rows(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run(layers, rows(4)), model(rows(4)))


@pytest.mark.parametrize("batch_first", [True, False])
def test_recurrent_models(batch_first: bool) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(11, WIDTH)
            self.cells = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.2, batch_first=batch_first)
            self.head = nn.Linear(WIDTH, 11)

        def forward(self, x: Tensor) -> Any:
            return self.head(self.cells(self.table(x))[0])

    model, tokens = Recurrent(), torch.arange(12).reshape(3, 4) % 11
    layers = cut_layers(model, at=["cells", "head"], example=tokens)
    for training in (True, False):
        expect_same(model, layers, tokens, training=training)
