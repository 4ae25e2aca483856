"""Cuts and inputs that are refused: the error names the rule, the place and the remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.helpers.cuts import WIDTH, Block, Function, Stack, expect_same, rows, run
from torch import Tensor, nn

from weft.errors import WeftError
from weft.runtime.partition.cut import cut, cut_layers


def test_no_cut_between_a_view_and_its_change() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        view = h[:, 1:]
        cut()
        h.mul_(2)
        return h, view + 1

    with pytest.raises(WeftError, match="between a view and an operation in place on the same memory"):
        cut_layers(Function(forward), at=None, example=rows(4))


def test_layers_in_different_modes_are_refused_where_it_matters() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        more = [x * 2] if model.training else []
        cut()
        return h + sum(more)

    model = Function(forward)
    layers = cut_layers(model, at=None, example=rows(4))
    layers[0].eval()
    with pytest.raises(WeftError, match=r"in the same mode \(values: 1, expected: 2\); call train\(\) or eval\(\)"):
        run(layers, rows(4))


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
        (inputs(3, 5, WIDTH, mask=torch.ones(3)), r"fixed mask to None \(got a tensor of \[3\]\); pass an example"),
        (torch.randn(3, 5, WIDTH), "inputs must have the structure of the example"),
        ({"x": torch.randn(3, 5, WIDTH)}, "inputs must have the structure of the example"),
    ):
        with pytest.raises(WeftError, match=message):
            run(layers, given)


def test_sizes_are_fixed_where_they_cannot_be_free() -> None:
    def forward(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        cut()
        return h * {4: 2.0}[x.shape[0]]  # a dynamic size can't be looked up

    model = Function(forward)
    layers = cut_layers(model, at=None, example=rows(4))
    expect_same(model, layers, rows(4))
    with pytest.raises(WeftError, match=r"to a tensor of \[4, 8\] \(got a tensor of \[3, 8\]\)"):
        run(layers, rows(3))


# Errors


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (["block.1"], "Stack has no submodule 'block.1' to cut at, did you mean 'blocks.1'?"),
        (["1"], "Stack has no submodule '1' to cut at, did you mean 'blocks.1'?"),
        ([""], "Stack has no submodule '' to cut at; its first submodule is 'blocks'"),
        ([], r"a model is cut at submodules \(names: none"),
        (["blocks.1", "blocks.1"], r"cut once before a submodule \(given 2 times: blocks.1\); drop one"),
        (["blocks.2", "blocks.1"], r"\(given: blocks.2, blocks.1\); this is blocks.1, blocks.2"),
        (["blocks"], r"forward calls \(blocks isn't called\); name another one such as blocks.0"),
        (None, r"the forward of Stack has no mark to cut it at; name submodules \(cut=\[...\]\), or call weft.cut"),
    ],
)
def test_impossible_cuts_are_refused(at: list[str] | None, message: str) -> None:
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
