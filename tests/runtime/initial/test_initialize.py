"""The initialization of meta models: the model's own rules, random numbers by name, nothing left out."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import weft
from weft.errors import WeftError
from weft.runtime.checkpoint import stored_weights
from weft.runtime.initial import make_tensors
from weft.runtime.partition import LayeredModel, named_tensors


class Gate(nn.Module):
    """A layer with all that constructors make: a computed buffer, a parameter with a value, layers."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.register_buffer("frequencies", 1.0 / 10 ** (torch.arange(width) / width), persistent=False)
        self.register_buffer("mask", torch.ones(width, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.scale * self.frequencies * self.mask  # type: ignore[no-any-return]


class Scaled(nn.Module):
    """A parent with a rule for its children."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.projection = nn.Linear(64, 64), nn.Linear(64, 64)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.projection.weight, std=1e-3)
        nn.init.zeros_(self.projection.bias)


def build() -> nn.Sequential:
    return nn.Sequential(nn.Embedding(5, 6, padding_idx=0), Gate(), nn.MultiheadAttention(6, 2), Scaled())


def on_meta(make: Callable[[], Any] = build) -> Any:
    with weft.on_meta():
        return make()


def test_computed_values_are_real_and_allocated_ones_are_not() -> None:
    gate = on_meta()[1]
    assert isinstance(gate, Gate)
    assert gate.linear.weight.is_meta
    assert torch.equal(gate.scale.detach(), torch.full((6,), 0.5))
    assert torch.equal(gate.get_buffer("frequencies"), Gate().get_buffer("frequencies"))
    assert not torch.empty(1).is_meta


def test_a_model_initializes_itself() -> None:
    """Zeros, ones and parents' rules are those of the constructors; the rest has their distribution."""
    made, real = weft.materialize(on_meta(), seed=1), build()
    assert made.state_dict().keys() == real.state_dict().keys()
    for name, tensor in made.state_dict().items():
        expected = real.state_dict()[name].float()
        if expected.unique().numel() == 1:
            assert torch.equal(tensor.float(), expected), name
    embedding, _, _, scaled = made
    assert embedding.weight[0].tolist() == [0.0] * 6
    assert embedding.weight[1:].std() > 0.5
    assert scaled.projection.weight.std().item() == pytest.approx(1e-3, rel=0.1)
    bound = 64**-0.5
    assert 0.9 * bound < scaled.inner.weight.abs().max() <= bound


def test_values_depend_on_seed_and_names_only() -> None:
    made = weft.materialize(on_meta(), seed=1)
    torch.manual_seed(7)
    again = weft.materialize(on_meta(), seed=1)
    other = weft.materialize(on_meta(), seed=2)
    longer = weft.materialize(on_meta(lambda: nn.Sequential(*build(), nn.Linear(6, 6))), seed=1)
    for name, tensor in made.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])
        assert torch.equal(tensor, longer.state_dict()[name])
    assert not torch.equal(made[0].weight, other[0].weight)
    assert not torch.equal(made[3].inner.weight, made[3].projection.weight)


@pytest.mark.parametrize("first", range(2))
def test_a_share_has_the_values_of_the_whole(first: int) -> None:
    """Every second tensor, so that a layer's weight and bias are made in different processes."""
    whole, model = weft.materialize(on_meta(), seed=1).state_dict(), on_meta()
    state = model.state_dict(keep_vars=True)
    share = [tensor for _, _, tensor in named_tensors(model)][first::2]
    layered = LayeredModel(layers=[model], root=model, state=state)
    make_tensors(layered, share, own=share, weights=None, open_weights=stored_weights, seed=1)
    held = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta}
    assert len(held) < len(whole)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in held.items())


class Drawn(nn.Sequential):
    """A parent whose rule fills its children in both ways: in place, and with numbers drawn beside them."""

    def reset_parameters(self) -> None:
        for layer in self:
            nn.init.normal_(layer.get_parameter("weight"))
            with torch.no_grad():
                layer.get_parameter("bias").copy_(torch.randn(3))


@pytest.mark.parametrize("layer", range(3))
def test_draws_of_a_parent_do_not_depend_on_the_children_that_a_process_holds(layer: int) -> None:
    def make() -> Drawn:
        return Drawn(*(nn.Linear(3, 3) for _ in range(3)))

    whole, model = weft.materialize(on_meta(make), seed=1)[layer].state_dict(), on_meta(make)
    layered = LayeredModel(layers=list(model), root=model, state=model.state_dict(keep_vars=True))
    share = list(model[layer].parameters())
    make_tensors(layered, share, own=share, weights=None, open_weights=stored_weights, seed=1)
    assert all(torch.equal(tensor, whole[name]) for name, tensor in model[layer].state_dict().items())


def test_equal_layers_get_different_values() -> None:
    first, second = weft.materialize(on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))))
    assert not torch.equal(first.weight, second.weight)


def test_generators_are_left_alone() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    weft.materialize(on_meta())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)["state"]["key"].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_a_function_initializes_after_the_model() -> None:
    """As `model.apply(function)` would; what it leaves alone keeps the model's own values."""

    def function(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.orthogonal_(module.weight)
            module.bias = nn.Parameter(torch.full_like(module.bias, 2.0))

    made, plain = weft.materialize(on_meta(), weights=function), weft.materialize(on_meta())
    inner = made[3].inner
    assert torch.allclose(inner.weight @ inner.weight.T, torch.eye(64), atol=1e-5)
    assert inner.bias.tolist() == [2.0] * 64
    assert torch.equal(made[0].weight, plain[0].weight)


def test_a_tied_weight_is_one_tensor() -> None:
    def tied() -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].weight = model[0].weight
        return model

    made = weft.materialize(on_meta(tied))
    assert made[0].weight is made[1].weight
    assert isinstance(made[0].weight, nn.Parameter)


class Bare(nn.Module):
    """Nothing initializes its parts again."""

    def __init__(self, part: str) -> None:
        super().__init__()
        value = torch.empty(3)
        if part == "parameter":
            self.part = nn.Parameter(value)
        elif part == "attribute":
            self.part = value  # type: ignore[assignment]
        else:
            self.register_buffer("part", value.bool() if part == "flags" else value)
        self.linear = nn.Linear(3, 3)


class Half(Bare):
    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.part[0] = 1.0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Bare("parameter"), r"nothing initializes the parameter 0\.part.*\(Bare has no.*weights= a file"),
        (lambda: Bare("buffer"), r"nothing initializes the buffer 0\.part.*with weft\.on_meta"),
        (lambda: Bare("flags"), r"nothing initializes the buffer 0\.part"),
        (lambda: Bare("attribute"), r"Bare\.part is a tensor on the meta device, and neither.*as a buffer"),
        (lambda: Half("parameter"), r"nothing initializes the parameter 0\.part"),
    ],
)
def test_what_nothing_initializes_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    model = on_meta(lambda: nn.Sequential(make()))
    with pytest.raises(WeftError, match=words):
        weft.materialize(model)
    assert model[0].part.is_meta  # and no real tensor without values
    assert model[0].linear.weight.is_meta


def test_a_rule_that_fails_is_named() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if not self.weight.is_meta:
                raise LookupError("no rule")

    with pytest.raises(WeftError, match=r"1 \(Broken\) can't be initialized.*LookupError: no rule.*weights="):
        weft.materialize(on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Broken(2, 2))))


def test_a_function_for_a_real_model_is_refused() -> None:
    with pytest.raises(WeftError, match="this one is real; leave weights out"):
        weft.materialize(nn.Linear(2, 2), weights=lambda module: None)


# What constructors do themselves


class Tied(nn.Module):
    """As language models have it, in both directions."""

    def __init__(self, *, of_output: bool = False) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(40, 16), nn.Linear(16, 40, bias=False)
        if of_output:
            self.embedding.weight = self.output.weight
        else:
            self.output.weight = self.embedding.weight


@pytest.mark.parametrize("of_output", [False, True])
def test_a_tied_weight_is_that_of_the_module_that_made_it(of_output: bool) -> None:
    """An embedding starts with a deviation of 1, a linear layer with much less."""
    made = weft.materialize(on_meta(lambda: Tied(of_output=of_output)))
    real = Tied(of_output=of_output)
    assert made.output.weight.std().item() == pytest.approx(real.output.weight.std().item(), rel=0.1)
    with torch.device("meta"):
        unknown = Tied()
    assert weft.materialize(unknown).output.weight.std().item() == pytest.approx(1.0, rel=0.1)  # the first one's


class Scheme(nn.Module):
    """A rule for all modules, without transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(32, 32)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(std=0.02)
            module.bias.data.fill_(3.0)


def test_a_rule_for_all_modules_is_repeated() -> None:
    made = weft.materialize(on_meta(Scheme))
    assert made.inner.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert made.inner.bias.tolist() == [3.0] * 32


class Corrects(nn.Module):
    """Its constructor writes to its parts after their own initialization."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        if how == "init":
            nn.init.normal_(self.inner.weight, std=0.02)
        elif how == "data":
            self.inner.weight.data.mul_(2)
        elif how == "view":
            with torch.no_grad():
                self.inner.weight[0].zero_()
        else:
            self.inner.reset_parameters()


@pytest.mark.parametrize("how", ["init", "data", "view"])
def test_what_a_constructor_writes_itself_is_refused(how: str) -> None:
    """Nothing would repeat it on the rank that holds the tensor."""
    model = on_meta(lambda: Corrects(how))
    words = r"test_initialize\.py, line \d+ writes to inner\.weight, which is lost.*reset_parameters.*weights="
    with pytest.raises(WeftError, match=words):
        weft.materialize(model)
    assert model.inner.weight.is_meta
    weft.materialize(model, weights=lambda module: None)  # the user takes care of it


def test_a_constructor_may_call_the_rules_of_its_parts() -> None:
    assert not weft.materialize(on_meta(lambda: Corrects("reset"))).inner.weight.is_meta
