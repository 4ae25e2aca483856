"""A model that was cut computes what it computed in one piece: outputs, gradients and buffers, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from weft.errors import WeftError
from weft.runtime.partition.cut import cut, cut_layers

WIDTH = 8


def rows(batch: int, *, seed: int = 0) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed))


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for one in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from tensors(one)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def loss_of(output: Any) -> Tensor:
    return torch.stack([one.double().sin().sum() for one in tensors(output) if one.requires_grad]).sum()


def run(layers: list[nn.Module], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def train(layers: list[nn.Module], inputs: Any) -> Any:
    """Forward and backward as a pipeline runs them: each layer starts from leaves of its own, dense copies."""
    sent: list[tuple[Tensor, Tensor]] = []

    def receive(value: Any) -> Any:
        if not isinstance(value, Tensor):
            assert type(value) is int
            return value
        leaf = value.detach().clone(memory_format=torch.contiguous_format)
        if value.requires_grad:
            sent.append((value, leaf.requires_grad_()))
        return leaf

    ends: list[int] = []
    for layer in layers:
        inputs = layer(inputs)
        if layer is not layers[-1]:
            assert type(inputs) is tuple
            inputs = tuple(receive(value) for value in inputs)
            ends.append(len(sent))
    loss_of(inputs).backward()  # type: ignore[no-untyped-call]
    for start, end in reversed(list(zip([0, *ends], ends, strict=False))):
        used = [(value, leaf.grad) for value, leaf in sent[start:end] if leaf.grad is not None]
        torch.autograd.backward([value for value, _ in used], [gradient for _, gradient in used])
    return inputs


def expect_same(model: nn.Module, layers: list[nn.Module], inputs: Any, *, training: bool = True) -> None:
    """Outputs, gradients and buffers of the layers, which hold the model's tensors, against those of a copy."""
    plain = copy.deepcopy(model).train(training)
    plain.zero_grad()
    model.zero_grad()
    for layer in layers:
        layer.train(training)
    given = copy.deepcopy(inputs)
    torch.manual_seed(1)
    expected = call(plain, copy.deepcopy(inputs))
    loss_of(expected).backward()  # type: ignore[no-untyped-call]
    torch.manual_seed(1)
    found = train(layers, given)
    assert type(found) is type(expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for one, other in zip(tensors(given), tensors(inputs), strict=True):
        assert torch.equal(one, other)
    gradients = {name: one.grad for name, one in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-6)
    held = {name: one for layer in layers for name, one in layer.state_dict().items()}
    for name, buffer in plain.named_buffers():
        if name in held:
            assert torch.equal(held[name], buffer), name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Any:
        return x + self.dropout(self.linear(x).relu())


class Skips(nn.Module):
    """Two inputs, values for layers that are not neighbours, a size that crosses cuts, a nest as output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Block(), Block(), Block()

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Any]:
        samples = x.shape[0]
        h = self.first(x)
        cut()
        k = cut(self.second(h))
        out, _ = cut(self.third(k) * scale + h, k)
        return {"out": out * samples, "rest": (h, None, [k]), "samples": samples}


class Stack(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Function(nn.Module):
    """A linear layer, and a forward that a test writes as a function of it and the inputs."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.function = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.linear, *args, **kwargs)


Cut: TypeAlias = "tuple[nn.Module, list[nn.Module]]"  # a model and its layers


@pytest.fixture(scope="module")
def skips() -> Cut:
    model = Skips()
    return model, cut_layers(model, at=["second", "third"], example=[rows(4), rows(4)])


@pytest.fixture(scope="module")
def stack() -> Cut:
    model = Stack(Block(), Block())
    return model, cut_layers(model, at="blocks.1", example=rows(4))


# Cuts, carries and forms of inputs


def test_a_mark_returns_what_it_is_given() -> None:
    x = torch.ones(1)
    assert cut() is None
    assert cut(x) is x
    assert cut(x, 2) == (x, 2)


def expect_skips(model: nn.Module, layers: list[nn.Module]) -> None:
    for training in (True, False):
        for batch in (4, 3, 1):
            expect_same(model, layers, (rows(batch), rows(batch, seed=1)), training=training)


def test_skips_ride_along(skips: Cut) -> None:
    model, layers = skips
    assert [str(layer).splitlines()[0] for layer in layers] == ["CutLayer("] * 3
    assert [layer.extra_repr() for layer in layers] == ["", "from second", "from third"]
    expect_skips(model, layers)


def test_skips_ride_along_from_mark_to_mark() -> None:
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
    def forward(linear: nn.Module, x: Tensor, *more: Tensor, flag: bool, nest: Any = None, **rest: Any) -> Any:
        h = linear(x) if flag else x
        cut()
        return h + sum(more) + nest["deep"][0] + rest["other"]

    model = Function(forward)
    example = {"x": rows(4), "flag": True, "nest": {"deep": [rows(4), None]}, "other": rows(4)}
    layers = cut_layers(model, at=None, example=example)
    smaller = {"x": rows(2), "flag": True, "nest": {"deep": [rows(2), None]}, "other": rows(2)}
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
    """Buffers that change in every way there is."""

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
def test_operations_in_place_leave_other_layers_alone(at: list[str]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), Residual(), Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    layers = cut_layers(model, at=at, example=torch.randn(4, 1, 9, 9))
    for shape in ((4, 1, 9, 9), (2, 1, 12, 10)):
        for training in (True, False):
            expect_same(model, layers, torch.randn(shape), training=training)


def test_no_cut_between_a_view_and_its_change() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        view = h[:, 1:]
        cut()
        h.mul_(2)
        return h, view + 1

    with pytest.raises(WeftError, match="between a view and an operation in place on the same memory"):
        cut_layers(Function(forward), at=None, example=rows(4))


def test_reparametrised_weights() -> None:
    norm = nn.utils.parametrizations.spectral_norm  # its buffers change in training
    model = Stack(*(norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2)))
    layers = cut_layers(model, at=["blocks.1"], example=rows(4))
    for training in (True, False):
        expect_same(model, layers, rows(3), training=training)


# Modes, randomness, shapes, devices


def test_the_model_is_left_as_it_was() -> None:
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


def test_a_failed_cut_leaves_the_model_as_it_was() -> None:
    model = Stack(Counting(), Function(lambda linear, x: linear(x) if x.sum() > 0 else x))
    model.eval()
    buffers = dict(model.named_buffers())
    with pytest.raises(WeftError, match=r"torch.export can't write down the forward of Stack") as failure:
        cut_layers(model, at=["blocks.1"], example=rows(4))
    assert "data-dependent" in str(failure.value)
    assert "test_cut.py:" in str(failure.value)
    assert "an nn.Sequential or a list of layers" in str(failure.value)
    assert "\n" not in str(failure.value)
    assert not model.training
    assert all(buffer is buffers[name] for name, buffer in model.named_buffers())


def test_dropout_draws_anew(stack: Cut) -> None:
    layers = [layer.train() for layer in stack[1]]
    assert not torch.equal(run(layers, rows(4)), run(layers, rows(4)))
    layers = [layer.eval() for layer in layers]
    assert torch.equal(run(layers, rows(4)), run(layers, rows(4)))


def test_layers_in_different_modes_are_refused_where_it_shows() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        more = [x * 2] if model.training else []
        cut()
        return h + sum(more)

    model = Function(forward)
    layers = cut_layers(model, at=None, example=rows(4))
    layers[0].eval()
    with pytest.raises(WeftError, match=r"in the same mode \(values: 1, wanted: 2\); call train\(\) or eval\(\)"):
        run(layers, rows(4))


def test_an_example_of_one_sample() -> None:
    model = Skips()
    layers = cut_layers(model, at=None, example=(rows(1), rows(1)))
    for batch in (1, 2, 5):
        expect_same(model, layers, (rows(batch), rows(batch)))


def test_inputs_that_torch_export_fixes() -> None:
    def forward(linear: nn.Module, x: Tensor, mask: Tensor | None = None) -> Any:
        h = linear(x) if x.shape[0] % 3 == 0 else x
        cut()
        for step in range(x.shape[1]):
            h = h + x[:, step : step + 1]
        return h

    def inputs(*shape: int, mask: Tensor | None = None) -> dict[str, Any]:
        return {"x": torch.randn(shape), "mask": mask}

    model = Function(forward)
    layers = cut_layers(model, at=None, example=inputs(3, 5, WIDTH))
    expect_same(model, layers, inputs(6, 5, WIDTH))
    for given, message in (
        (inputs(3, 6, WIDTH), r"torch.export fixed x to a tensor of \[any, 5, 8\] \(got a tensor of \[3, 6, 8\]\)"),
        (inputs(5, WIDTH), r"torch.export fixed x to a tensor of \[any, 5, 8\] \(got a tensor of \[5, 8\]\)"),
        (inputs(4, 5, WIDTH), r"fixed the inputs to .*% 3 == 0 \(got x: a tensor of \[4, 5, 8\]; mask: None\)"),
        (inputs(3, 5, WIDTH, mask=torch.ones(3)), r"fixed mask to None \(got a tensor of \[3\]\); give an example"),
        (torch.randn(3, 5, WIDTH), "inputs must have the form of the example"),
        ({"x": torch.randn(3, 5, WIDTH)}, "inputs must have the form of the example"),
    ):
        with pytest.raises(WeftError, match=message):
            run(layers, given)


def test_sizes_are_fixed_where_they_cannot_be_free() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        cut()
        return h * {4: 2.0}[x.shape[0]]  # a size that is free can't be looked up

    model = Function(forward)
    layers = cut_layers(model, at=None, example=rows(4))
    expect_same(model, layers, rows(4))
    with pytest.raises(WeftError, match=r"to a tensor of \[4, 8\] \(got a tensor of \[3, 8\]\)"):
        run(layers, rows(3))


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


# Errors


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (["block.1"], "Stack has no submodule 'block.1' to cut at; did you mean 'blocks.1'?"),
        ([""], "Stack has no submodule '' to cut at; did you mean 'blocks'?"),
        ([], "there is nothing to cut at"),
        (["blocks.1", "blocks.1"], r"cut once before a submodule \(given 2 times: blocks.1\); drop one"),
        (["blocks.2", "blocks.1"], r"\(given: blocks.2, blocks.1\); this is blocks.1, blocks.2"),
        (["blocks"], r"forward calls \(blocks isn't called\); name another one such as blocks.0"),
        (None, r"the forward of Stack has no mark to cut it at; name submodules \(cut=\[...\]\), or call weft.cut"),
    ],
)
def test_cuts_that_cannot_be(at: list[str] | None, message: str) -> None:
    with pytest.raises(WeftError, match=message):
        cut_layers(Stack(Block(), Block(), Block()), at=at, example=rows(4))


def test_a_submodule_that_is_called_twice() -> None:
    block = Block()
    with pytest.raises(WeftError, match=r"calls once \(blocks.0 is called 2 times\); name another one, or set marks"):
        cut_layers(Stack(block, Block(), block), at=["blocks.0"], example=rows(4))
    model = Stack(block, Block(), block)
    expect_same(model, cut_layers(model, at=["blocks.1"], example=rows(4)), rows(4))


def test_no_cut_without_an_example() -> None:
    with pytest.raises(WeftError, match=r"an example of its inputs \(model: Stack, example: None\)"):
        cut_layers(Stack(Block(), Block()), at=["blocks.1"], example=None)


def test_only_modules_are_cut() -> None:
    with pytest.raises(WeftError, match=r"only an nn.Module can be cut into layers \(got function\)"):
        cut_layers(lambda x: x, at=["a"], example=rows(4))


def test_no_cut_inside_a_region_of_its_own() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            h = linear(x)
            cut()
            h = h * 2
        return linear(h)

    with pytest.raises(WeftError, match=r"can't be cut inside torch.no_grad\(\).*\(cut: a mark\)"):
        cut_layers(Function(forward), at=None, example=rows(4))


def test_marks_are_the_same_in_both_modes() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        if model.training:
            cut()
        return linear(h)

    model = Function(forward)
    with pytest.raises(WeftError, match=r"the same marks in training and in evaluation \(marks: 1 and 0\)"):
        cut_layers(model, at=None, example=rows(4))


# Models that are exported already


def piped(model: nn.Module, *inputs: Tensor) -> Any:
    from torch.distributed.pipelining import pipeline

    return pipeline(model, inputs)


class Marked(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.third.weight = self.first.weight
        self.dropout = dropout

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        from torch.distributed.pipelining import pipe_split

        h = self.first(x)
        pipe_split()  # type: ignore[no-untyped-call]
        left, right = self.second(h).chunk(2, -1)
        pipe_split()  # type: ignore[no-untyped-call]
        out = self.third(torch.cat([left, right * 2], -1) * scale) + h
        return functional.dropout(out, self.dropout, self.training) if self.dropout else out


def test_a_pipe_of_torch_pipelining() -> None:
    model, inputs = Marked(), (rows(4), rows(4, seed=1))
    plain = copy.deepcopy(model)
    layers = cut_layers(piped(model, *inputs), at=None, example=None)
    assert [list(layer.state_dict()) for layer in layers] == [
        ["first.weight", "first.bias"],
        ["second.weight", "second.bias"],
        ["first.weight", "third.bias"],
    ]
    shared = layers[0].get_parameter("first.weight")
    assert shared is layers[2].get_parameter("first.weight")  # a Pipe had made two of it
    for training in (True, False):  # they are alike without dropout and its kin
        for form in (inputs, {"scale": inputs[1], "x": inputs[0]}):
            (found,) = run([layer.train(training) for layer in layers], form)
            assert torch.equal(found, plain(*inputs))
    with pytest.raises(WeftError, match=r"fixed x to a tensor of \[4, 8\] \(got a tensor of \[3, 8\]\)"):
        run(layers, (rows(3), rows(3)))
    train(layers, inputs)
    loss_of(plain(*inputs)).backward()  # type: ignore[no-untyped-call]
    found_gradients = {name: one.grad for layer in layers for name, one in layer.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(found_gradients[name], parameter.grad, rtol=0, atol=1e-6)
    with pytest.raises(WeftError, match="cut at its own marks, not at names"):
        cut_layers(piped(model, *inputs), at=["second"], example=None)


def test_a_pipe_knows_one_mode() -> None:
    inputs = (rows(4), rows(4, seed=1))
    layers = cut_layers(piped(Marked(dropout=0.5), *inputs), at=None, example=None)
    run(layers, inputs)
    with pytest.raises(WeftError, match="exported for training has no graph for evaluation; give weft the model"):
        run([layer.eval() for layer in layers], inputs)


def test_an_exported_program() -> None:
    model = Skips().eval()
    inputs = (rows(4), rows(4, seed=1))
    layers = cut_layers(torch.export.export(model, inputs), at=None, example=None)
    assert len(layers) == 4
    expect_same(model, layers, inputs, training=False)
    with pytest.raises(WeftError, match="exported for evaluation has no graph for training"):
        run([layer.train() for layer in layers], inputs)
    with pytest.raises(WeftError, match="has no mark to cut it at"):
        cut_layers(torch.export.export(Block(), (rows(4),)), at=None, example=None)


# Hugging Face


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=100
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=100, bos_token_id=0, eos_token_id=0)
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


HUGGING_FACE = {
    "bert": (bert, ["bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"]),
    "gpt2": (gpt2, ["transformer.h.0", "transformer.h.1", "lm_head"]),
}


def tokens_of(batch: int, length: int, *, padded: bool = True) -> dict[str, Tensor]:
    tokens = torch.randint(100, (batch, length), generator=torch.Generator().manual_seed(batch))
    mask = torch.ones(batch, length, dtype=torch.long)
    mask[0, length - 1 :] = 0 if padded else 1
    return {"input_ids": tokens, "attention_mask": mask}


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models(name: str) -> None:
    make, at = HUGGING_FACE[name]
    torch.manual_seed(0)
    model = make()
    as_dict = name == "gpt2"  # the other one takes its arguments by their places
    without = {"use_cache": False} if as_dict else {}  # a cache lays keys out otherwise: other roundings
    example = tokens_of(1, 7)
    layers = cut_layers(model, at=at, example=example if as_dict else tuple(example.values()))
    assert len(layers) == len(at) + 1
    assert {id(one) for layer in layers for one in layer.parameters()} == {id(one) for one in model.parameters()}
    plain = copy.deepcopy(model)
    for training in (True, False):
        plain.train(training)
        for layer in layers:
            layer.train(training)
        for batch, length, padded in ((4, 4, True), (3, 9, False), (1, 5, True)):
            inputs = tokens_of(batch, length, padded=padded)
            plain.zero_grad()
            model.zero_grad()
            torch.manual_seed(1)
            expected = plain(**inputs, **without)
            loss_of(expected).backward()  # type: ignore[no-untyped-call]
            torch.manual_seed(1)
            found = train(layers, inputs if as_dict else tuple(inputs.values()))
            assert type(found) is type(expected)
            assert torch.equal(found.logits, expected.logits)
            for one, other in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=1e-6)
    if name == "gpt2":
        assert getattr(model.config, "use_cache", None) is True
        assert layers[0].get_parameter("transformer.wte.weight") is layers[-1].get_parameter("transformer.wte.weight")
