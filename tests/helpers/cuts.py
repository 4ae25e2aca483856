"""Models to cut, and a comparison of their layers with the model in one piece."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from weft.runtime.partition.cut import cut

WIDTH = 8


def rows(batch: int, *, seed: int = 0) -> Tensor:
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(seed))


def tensors(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    for value in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ():
        yield from tensors(value)


def call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def loss_of(output: Any) -> Tensor:
    return torch.stack([tensor.double().sin().sum() for tensor in tensors(output) if tensor.requires_grad]).sum()


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
    for tensor, other in zip(tensors(given), tensors(inputs), strict=True):
        assert torch.equal(tensor, other)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-6)
    held = {name: tensor for layer in layers for name, tensor in layer.state_dict().items()}
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
    """Two inputs, values for layers that are not neighbours, a size that crosses cuts, a tree as output."""

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
