"""A backward at other weights than its forward, compared with overwriting the weights in between.

The weights that plain autograd saves are views of the parameters. Overwriting those behind its check
(`leaf.data.copy_`) makes its backward read other weights: the same computation by other means.
"""

import copy
import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter, functional
from torch.utils.checkpoint import checkpoint

import weft
from weft.runtime.engine.weight_substitution import WeightSubstitution

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(7))  # batch, length or channels, width
PICTURES = X.reshape(4, 2, 3, 8)
WORDS = torch.arange(12).reshape(3, 4) % 5


class Written(nn.Module):
    """A layer made of a function of parameters and an input."""

    def __init__(self, run: Callable[..., Tensor], *weights: Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList([Parameter(weight) for weight in weights])
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(*self.weights, x)


class Attention(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mixed: Tensor = super().forward(x, x, x)[0]
        return mixed


class First(nn.Module):
    """The first output of a recurrent layer."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)[0]
        return out


class Tied(nn.Module):
    """Embedding and output share a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(5, 8), nn.Linear(8, 8), nn.Linear(8, 5, bias=False)
        self.out.weight = self.table.weight

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.out(self.mix(self.table(words)).tanh())
        return out


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype)


def with_complex(weight: Tensor, x: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(weight) * torch.fft.rfft(x)[..., :3]).square()


LAYERS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: nn.Linear(8, 5), X),
    "linears": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.ReLU(inplace=True)), X),
    "conv": (lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.Conv2d(3, 2, 2)), PICTURES),
    "conv-transpose": (lambda: nn.ConvTranspose1d(6, 4, 3, stride=2), X),
    "layer-norm": (lambda: nn.LayerNorm(8), X),
    "rms-norm": (lambda: nn.RMSNorm(8), X),
    "group-norm": (lambda: nn.GroupNorm(2, 6), X),
    "batch-norm": (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(6), nn.PReLU()), X),
    "batch-norm-eval": (lambda: nn.BatchNorm1d(6).eval(), X),
    "embedding": (lambda: nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 8)), WORDS),
    "embedding-bag": (lambda: nn.Sequential(nn.EmbeddingBag(5, 8, mode="max"), nn.Linear(8, 8)), WORDS),
    "attention": (lambda: Attention(8, 2, batch_first=True), X),
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), X),
    "lstm": (lambda: First(nn.LSTM(8, 5, num_layers=2, bidirectional=True)), X),
    "gru": (lambda: First(nn.GRU(8, 5, batch_first=True)), X),
    "bilinear": (lambda: Written(lambda w, x: functional.bilinear(x, x.tanh(), w), rand(3, 8, 8)), X),
    "tied": (Tied, WORDS),
    "twice": (lambda: Written(lambda w, x: torch.tanh(x @ w) @ w, rand(8, 8)), X),
    "transposed": (lambda: Written(lambda w, x: torch.tanh(x @ w.t()) @ w, rand(8, 3).t()), X),
    "parts": (lambda: Written(lambda w, x: torch.tanh(x * w[1]) @ w[2:].t() * w[0, 2:5], rand(5, 8)), X),
    "a-part-of-more": (lambda: Written(lambda w, x: x * w[1] @ w.t(), rand(9, 8)[4:7]), X),
    "complex": (lambda: Written(with_complex, rand(3, 2)), X),
    "conjugate": (lambda: Written(lambda w, x: (x * w.conj()).abs(), rand(8, dtype=torch.complex64)), X),
    "no-elements": (lambda: Written(lambda none, w, x: x * w + none.sum(), rand(0), rand(8)), X),
}


def case(name: str) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
    """A layer, other weights for it, and the inputs of two micro-batches."""
    torch.manual_seed(11)
    make, x = LAYERS[name]
    layer = make()
    others = [torch.randn_like(parameter) for parameter in layer.parameters()]
    more = torch.roll(x, 1, 0) if x.is_floating_point() else x.flip(0)
    inputs = [tensor.clone().requires_grad_() if tensor.is_floating_point() else tensor for tensor in (x, more)]
    return layer, others, inputs


def gradients(inputs: list[Tensor], leaves: list[Parameter]) -> list[Tensor | None]:
    given = [tensor for tensor in inputs if tensor.requires_grad]
    found = [tensor.grad for tensor in (*leaves, *given)]
    for tensor in (*leaves, *given):
        tensor.grad = None
    return found


def plain(name: str) -> list[Tensor | None]:
    """Two forwards, then their backwards after the weights were overwritten."""
    layer, others, inputs = case(name)
    outputs = [layer(batch) for batch in inputs]
    leaves = list(layer.parameters())
    for leaf, other in zip(leaves, others, strict=True):
        leaf.data.copy_(other)
    for output in outputs:
        output.square().sum().backward()
    return gradients(inputs, leaves)


def swapped(name: str) -> list[Tensor | None]:
    """The same with `WeightSubstitution`; the weights of the forward become NaN, which must not matter."""
    layer, others, inputs = case(name)
    leaves, substitution, outputs = list(layer.parameters()), WeightSubstitution(), []
    for batch in inputs:
        substitution.forward_reads([leaves])
        with substitution.hooks():
            outputs.append(layer(batch))
    reading = [Parameter(torch.empty_like(leaf)) for leaf in leaves]
    for leaf, home, other in zip(leaves, reading, others, strict=True):
        home.data.copy_(other)
        leaf.data.fill_(torch.nan)
    substitution.backward_reads([reading])
    for output in outputs:
        output.square().sum().backward()
    return gradients(inputs, leaves)


@pytest.mark.parametrize("name", LAYERS)
def test_the_backward_reads_the_other_weights(name: str) -> None:
    assert any(gradient is not None for gradient in plain(name))
    torch.testing.assert_close(swapped(name), plain(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_at_the_same_weights_the_backward_is_unchanged(name: str) -> None:
    found = []
    for swaps in (False, True):
        layer, _, inputs = case(name)
        leaves, substitution = list(layer.parameters()), WeightSubstitution()
        substitution.forward_reads([leaves])
        substitution.backward_reads([leaves])
        for batch in inputs:
            if swaps:
                with substitution.hooks():
                    layer(batch).square().sum().backward()
            else:
                layer(batch).square().sum().backward()
        found.append(gradients(inputs, leaves))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_values_computed_from_weights_are_those_of_the_forward() -> None:
    """The weight of a parametrization is an activation: the backward uses its value from the forward."""
    torch.manual_seed(1)
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    before = copy.deepcopy(layer)
    leaves, substitution, x = list(layer.parameters()), WeightSubstitution(), X.clone().requires_grad_()
    substitution.forward_reads([leaves])
    with substitution.hooks():
        output = layer(x)
    reading = [Parameter(2 * leaf.detach()) for leaf in leaves]
    for leaf in leaves:
        leaf.data.fill_(torch.nan)
    substitution.backward_reads([reading])
    output.sum().backward()
    torch.testing.assert_close(x.grad, torch.ones_like(output) @ before.weight.detach())
    bias, magnitude, _ = leaves
    assert bias.grad is not None
    assert magnitude.grad is not None
    assert magnitude.grad.isfinite().all()


def test_several_sets_of_parameters() -> None:
    first, second, substitution = nn.Linear(8, 8), nn.Linear(8, 8), WeightSubstitution()
    substitution.forward_reads([list(first.parameters()), list(second.parameters())])
    x = X.clone().requires_grad_()
    with substitution.hooks():
        output = second(first(x))
    others = [
        [Parameter(parameter * scale) for parameter in layer.parameters()] for scale, layer in ((2, first), (5, second))
    ]
    substitution.backward_reads(others)
    output.sum().backward()
    torch.testing.assert_close(x.grad, 10 * torch.ones_like(X) @ second.weight @ first.weight)


def test_saved_activations_are_counted_without_weights() -> None:
    layer, substitution = nn.Linear(8, 5, bias=False), WeightSubstitution()
    saved: list[Tensor] = []

    def held(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    substitution.forward_reads([list(layer.parameters())])
    x = X.clone().requires_grad_()
    with substitution.hooks(held):
        output = layer(x).exp()
    assert {tensor.data_ptr() for tensor in saved} == {x.data_ptr(), output.data_ptr()}


# Refusals


def test_a_saved_activation_that_is_changed_in_place_is_refused() -> None:
    layer, substitution = nn.Linear(8, 8), WeightSubstitution()
    substitution.forward_reads([list(layer.parameters())])
    substitution.backward_reads([list(layer.parameters())])
    with substitution.hooks():
        output = layer(X).exp()
    output.detach().add_(1)
    with pytest.raises(weft.WeftError, match=r"shape \(4, 6, 8\) was changed in place after the forward had saved it"):
        output.sum().backward()


def test_parameters_of_one_storage_are_refused() -> None:
    both = torch.randn(2, 8)
    with pytest.raises(weft.WeftError, match="two parameters share one storage"):
        WeightSubstitution().forward_reads([[Parameter(both[0]), Parameter(both[1])]])


def test_a_parameter_with_another_layout_is_refused() -> None:
    part, substitution = Parameter(torch.randn(8, 9)[:, :3]), WeightSubstitution()
    substitution.forward_reads([[part]])
    with substitution.hooks():
        output = (X.clone().requires_grad_() @ part).sum()
    substitution.backward_reads([[Parameter(torch.empty_like(part))]])
    with pytest.raises(weft.WeftError, match="is a slice of a larger tensor"):
        output.backward()  # type: ignore[no-untyped-call]


# Memory


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), Tensor) for found in gc.get_objects())


def test_nothing_is_held_after_the_backward() -> None:
    layer = nn.Sequential(case("encoder")[0], nn.Softmax(-1))  # softmax saves its output
    leaves, substitution = list(layer.parameters()), WeightSubstitution()
    substitution.backward_reads([leaves])

    def run(turns: int) -> list[weakref.ref[Tensor]]:
        outputs = []
        for _ in range(turns):
            substitution.forward_reads([leaves])
            x = X.clone().requires_grad_()
            with substitution.hooks():
                output = layer(x)
            output.sum().backward()
            outputs.append(weakref.ref(output))
        return outputs

    run(2)
    before = tensors()
    gc.disable()  # tensors must be freed without its help
    try:
        assert not any(output() is not None for output in run(200))
    finally:
        gc.enable()
    assert tensors() <= before
    substitution.forward_reads([leaves])
    with substitution.hooks():
        dropped = weakref.ref(layer(X.clone().requires_grad_()))
    assert dropped() is None  # a forward without a backward is freed too


class Again(nn.Module):
    """A layer that recomputes itself in its backward, at the weights installed then."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), reentrant

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=self.reentrant)
        return result


@pytest.mark.parametrize("versions", ["published", "exact"])
def test_both_kinds_of_checkpoint_train_alike(versions: str) -> None:
    states = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        pipe = weft.Pipeline(
            [nn.Linear(4, 4), Again(reentrant=reentrant), Again(reentrant=reentrant)],
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
            schedule="xpipe",
            microbatches=2,
            stages=3,
            predict={"versions": versions},
        )
        before = pipe.state_dict()
        generator = torch.Generator().manual_seed(1)
        for _ in range(6):
            pipe.step(torch.randn(8, 4, generator=generator), torch.randn(8, 4, generator=generator))
        states.append(pipe.state_dict())
        assert all(not torch.equal(before[name], value) for name, value in states[-1].items())
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
