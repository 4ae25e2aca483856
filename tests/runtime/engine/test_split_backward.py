"""The two halves of a backward are bit-identical to one backward, and do no work twice."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from weft.runtime.engine.split_backward import SplitBackward
from weft.train.data_spec import DataSpec
from weft.train.models.options import ResNet
from weft.train.models.resnet import build_resnet

ROWS, WIDTH = 3, 8


class Scale(torch.autograd.Function):
    """y = factor * weight * x; counts its backwards, each of which computes both gradients."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float, weight: Tensor) -> Tensor:
        ctx.factor = factor
        ctx.save_for_backward(x, weight)
        return factor * weight * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
        Scale.backwards += 1
        x, weight = ctx.saved_tensors
        return ctx.factor * weight * grad, None, (ctx.factor * x * grad).sum_to_size(weight.shape)


def scale(x: Tensor, factor: float, weight: Tensor) -> Tensor:
    result: Tensor = Scale.apply(x, factor, weight)  # type: ignore[no-untyped-call]
    return result


class Lambda(nn.Module):
    """A function of modules and inputs."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.part = nn.ModuleDict(modules)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self.part, *inputs)


class Weight(nn.Module):
    """A single weight."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def linear(**options: Any) -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, **options)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, WIDTH))


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def mlp() -> nn.Module:
    return nn.Sequential(linear(), nn.GELU(), linear(), nn.Tanh(), linear())


def convolutions() -> nn.Module:
    block = (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    return nn.Sequential(*block, nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True)


def decoder() -> nn.Module:
    return nn.TransformerDecoderLayer(WIDTH, 2, 16, dropout=0.5, batch_first=True)


def skip() -> nn.Module:
    def run(part: Any, x: Tensor) -> Any:
        x = x + part["a"](x)
        return x + part["c"](functional.gelu(part["b"](x)) * x)

    return Lambda(run, a=linear(), b=linear(), c=linear())


def several() -> nn.Module:
    """Three inputs, one of integers; one output is an input, one needs no gradient, one depends only on weights."""

    def run(part: Any, x: Tensor, y: Tensor, numbers: Tensor) -> Any:
        z = part["a"](x) * y + part["lookup"](numbers)
        return x, part["b"](z), z.detach(), part["lookup"].weight.sum(0), numbers, z

    return Lambda(run, a=linear(), b=linear(), lookup=nn.Embedding(5, WIDTH))


def twins() -> nn.Module:
    """One layer for two inputs."""
    return Lambda(lambda part, x, y: part["b"](part["a"](x) * part["a"](y)), a=linear(), b=linear())


def triplets() -> nn.Module:
    return Lambda(lambda part, x, y, z: part["a"](x) * part["a"](y) * part["a"](z), a=linear())


def again(**options: Any) -> nn.Module:
    """One layer used twice in sequence."""
    return Lambda(lambda part, x: part["a"](part["b"](part["a"](x)).tanh()), a=linear(**options), b=linear())


def custom() -> nn.Module:
    def run(part: Any, x: Tensor) -> Any:
        weight = part["b"].weight
        return part["c"](scale(part["a"](x), 2.0, weight * weight))

    return Lambda(run, a=linear(), b=Weight(WIDTH), c=linear())


def owned_by_python() -> nn.Module:
    """Custom Functions both as joint and as side, and at the output."""

    def run(part: Any, x: Tensor) -> Any:
        weight = scale(part["a"].weight, 3.0, part["b"].weight)
        return scale(x * 2, 2.0, weight)

    return Lambda(run, a=Weight(ROWS, WIDTH), b=Weight(WIDTH))


def weight_and_its_row() -> nn.Module:
    """A side that leads to another side of the same joint, from two joints."""

    def run(part: Any, x: Tensor, y: Tensor) -> Tensor:
        weight = part["a"].weight
        return functional.linear(x, weight, weight[0]) * functional.linear(y, weight, weight[1])

    return Lambda(run, a=linear(bias=False))


def checkpointed(*, reentrant: bool) -> nn.Module:
    return Lambda(
        lambda part, x: part["b"](checkpoint(part["a"], x, use_reentrant=reentrant)),
        a=nn.Sequential(linear(), nn.Dropout(0.5), linear(), nn.Tanh()),
        b=linear(),
    )


def compiled() -> nn.Module:
    inner = linear()
    fast = torch.compile(lambda x: inner(x).tanh(), backend="aot_eager")
    return Lambda(lambda part, x: part["b"](fast(x)), inner=inner, b=linear())


def autocast() -> nn.Module:
    def run(part: Any, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return part["a"](x)

    return Lambda(run, a=mlp())


def normed() -> nn.Module:
    return nn.Sequential(linear(), nn.utils.parametrizations.weight_norm(linear()), linear())


def bias_only() -> nn.Module:
    """Linear layers whose weights are frozen and whose biases are not."""
    model = mlp()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def half_frozen() -> nn.Module:
    return nn.Sequential(linear(), frozen(linear()), nn.LayerNorm(WIDTH), linear(bias=False))


def tied() -> nn.Module:
    """A weight as a table of rows, as two projections, and in a penalty."""

    def run(part: Any, x: Tensor, numbers: Tensor) -> Any:
        weight = part["lookup"].weight
        hidden = part["a"](x) + part["lookup"](numbers)
        return functional.linear(functional.linear(hidden, weight), weight.t()), weight.norm()

    return Lambda(run, a=linear(), lookup=nn.Embedding(5, WIDTH))


def penalty() -> nn.Module:
    """The norm of a weight is part of the output; a deferred product meets another gradient of the same weight."""
    return Lambda(lambda part, x: part["b"](part["a"](x)) * part["a"].weight.norm(), a=linear(), b=linear())


def experts() -> nn.Module:
    return Lambda(lambda part, x: torch.bmm(x, part["a"].weight).tanh(), a=Weight(ROWS, WIDTH, WIDTH))


def rows_of_a_matrix() -> nn.Module:
    """As in GPT-2, whose weights are transposed; the second product is scaled."""

    def run(part: Any, x: Tensor) -> Any:
        x = torch.addmm(part["b"].weight, x, part["a"].weight)
        return torch.addmm(x, x, part["a"].weight, alpha=0.5, beta=2)

    return Lambda(run, a=Weight(WIDTH, WIDTH), b=Weight(WIDTH))


def predicted_filter() -> nn.Module:
    """A convolution whose filter depends on the input."""

    def run(part: Any, x: Tensor) -> Any:
        filters = part["a"](x.mean((2, 3))).mean(0)
        return functional.conv2d(x, filters.view(4, 4, 1, 1), part["b"].weight)

    return Lambda(run, a=nn.Linear(4, 16), b=Weight(4))


def gradient_of_the_input() -> nn.Module:
    """Its forward runs a backward, whose graph is part of the output's."""

    def run(part: Any, x: Tensor) -> Any:
        inner = part["a"](x).tanh()
        (slope,) = torch.autograd.grad(inner.sum(), x, create_graph=True)
        return part["b"](inner) + slope

    return Lambda(run, a=linear(), b=linear())


def offloaded() -> nn.Module:
    def run(part: Any, x: Tensor) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return part["a"](x)

    return Lambda(run, a=mlp())


def hooked_product() -> nn.Module:
    """Hooks of a product's output, and of a transposed weight: each runs once."""

    def run(part: Any, x: Tensor) -> Any:
        transposed = part["a"].weight.t()
        transposed.register_hook(lambda gradient: gradient * 0.5)
        inner = x @ transposed
        inner.register_hook(lambda gradient: gradient * 0.25)
        return part["b"](inner)

    return Lambda(run, a=linear(bias=False), b=linear())


def norms() -> nn.Module:
    convolution = nn.Conv2d(4, 8, 3, groups=2, padding_mode="circular", padding=1)
    return nn.Sequential(nn.GroupNorm(2, 4), convolution, nn.BatchNorm2d(8), nn.ConvTranspose2d(8, 4, 2), nn.RMSNorm(7))


def channels_last() -> nn.Module:
    return convolutions().to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def rounded() -> nn.Module:
    """Weights of bf16 whose gradients are of fp32, as the engine has them."""
    model = nn.Sequential(linear(), nn.LayerNorm(WIDTH), linear(bias=False)).bfloat16()
    for parameter in model.parameters():
        parameter.grad_dtype = torch.float32
    return Lambda(lambda part, x: part["a"](x.bfloat16()).float(), a=model)


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = transformers.GPT2Config(n_embd=WIDTH, n_head=2, attn_implementation="sdpa")
    return Lambda(lambda part, x: _first(part["a"](x)), a=GPT2Block(config, layer_idx=0))  # type: ignore[no-untyped-call]


def llama() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    sizes = {"hidden_size": WIDTH, "intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, attn_implementation="sdpa")
    rotary = LlamaRotaryEmbedding(config)

    def run(part: Any, x: Tensor) -> Any:
        angles = rotary(x, torch.arange(x.shape[1])[None])
        return _first(part["a"](x, position_embeddings=angles))

    return Lambda(run, a=LlamaDecoderLayer(config, layer_idx=0))


def _first(output: Any) -> Tensor:
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


def resnext() -> nn.Module:
    options = ResNet(name="resnext50_32x4d", blocks=1, width=8, groups=2).resolved()
    spec = DataSpec(task="classification", form="images", channels=4, size=8, classes=3)
    return build_resnet(options, spec)


def image() -> Tensor:
    return torch.randn(ROWS, 4, 6, 6)


def sentence() -> Tensor:
    return torch.randn(ROWS, 5, WIDTH)


def numbers() -> Tensor:
    return torch.randint(5, (ROWS,))


Case = tuple[Callable[[], nn.Module], list[Callable[[], Tensor]]]

SPLIT: dict[str, Case] = {
    "linear": (linear, [rows]),
    "mlp": (mlp, [rows]),
    "convolutions": (convolutions, [image]),
    "encoder": (encoder, [sentence]),
    "decoder": (decoder, [sentence, sentence]),
    "layer norm": (lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)), [rows]),
    "skip": (skip, [rows]),
    "several": (several, [rows, rows, numbers]),
    "tied": (tied, [rows, numbers]),
    "penalty": (penalty, [rows]),
    "experts": (experts, [lambda: torch.randn(ROWS, 2, WIDTH)]),
    "rows of a matrix": (rows_of_a_matrix, [rows]),
    "predicted filter": (predicted_filter, [image]),
    "gradient of the input": (gradient_of_the_input, [rows]),
    "offloaded": (offloaded, [rows]),
    "hooked product": (hooked_product, [rows]),
    "norms": (norms, [image]),
    "channels last": (channels_last, [lambda: image().to(memory_format=torch.channels_last)]),
    "rounded": (rounded, [rows]),
    "gpt2": (gpt2, [sentence]),
    "llama": (llama, [sentence]),
    "resnext": (resnext, [lambda: torch.randn(ROWS, 4, 8, 8)]),
    "twins": (twins, [rows, rows]),
    "again": (again, [rows]),
    "triplets": (triplets, [rows, rows, rows]),
    "weight and its row": (weight_and_its_row, [rows, rows]),
    "recurrent": (lambda: Lambda(lambda part, x: part["a"](x)[0], a=nn.GRU(WIDTH, WIDTH)), [sentence]),
    "compiled": (compiled, [rows]),
    "again without bias": (lambda: again(bias=False), [rows]),
    "weight norm": (normed, [rows]),
    "custom": (custom, [rows]),
    "owned by python": (owned_by_python, [rows]),
    "half frozen": (half_frozen, [rows]),
    "bias only": (bias_only, [rows]),
    "autocast": (autocast, [rows]),
    "unused": (lambda: Lambda(lambda part, x, y: part["a"](x), a=linear(), b=linear()), [rows, rows]),
    "checkpointed": (lambda: checkpointed(reentrant=False), [rows]),
    "embedding first": (lambda: nn.Sequential(nn.Embedding(5, WIDTH), mlp()), [numbers]),
    "sparse embedding first": (lambda: nn.Sequential(nn.Embedding(5, WIDTH, sparse=True), mlp()), [numbers]),
}
AT_ONCE: dict[str, Case] = {"checkpointed, reentrant": (lambda: checkpointed(reentrant=True), [rows])}
WITHOUT_PARAMETERS: dict[str, Case] = {
    "no parameters": (lambda: nn.Sequential(nn.Tanh(), nn.GELU()), [rows]),
    "all frozen": (lambda: frozen(mlp()), [rows]),
    "passed through": (lambda: Lambda(lambda part, x, y: (x, y, x)), [rows, rows]),
    "nothing to do": (lambda: Lambda(lambda part, x: x + 1), [numbers]),
}
CASES = SPLIT | AT_ONCE | WITHOUT_PARAMETERS


class Run:
    """The forward of a model, ready for a backward; deterministic for a seed."""

    def __init__(self, model: nn.Module, given: list[Callable[[], Tensor]], seed: int) -> None:
        torch.manual_seed(seed)
        self.inputs = [make() for make in given]
        for tensor in self.inputs:
            tensor.requires_grad_(tensor.is_floating_point())
        outputs = model(*self.inputs)
        self.outputs: list[Tensor] = list(outputs) if isinstance(outputs, tuple) else [outputs]
        self.grads: list[Tensor | None] = [
            torch.randn_like(output) if output.is_floating_point() else None for output in self.outputs
        ]

    def split(self, model: nn.Module) -> SplitBackward:
        return SplitBackward(self.outputs, self.grads, self.inputs)

    def ordinary(self) -> list[Tensor | None]:
        pairs = [(o, g) for o, g in zip(self.outputs, self.grads, strict=True) if o.requires_grad and g is not None]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [tensor for _, tensor in pairs])
        return [tensor.grad for tensor in self.inputs]


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def equal(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    def dense(tensor: Tensor) -> Tensor:
        return tensor.to_dense() if tensor.is_sparse else tensor

    return len(found) == len(expected) and all(
        a is b if a is None or b is None else torch.equal(dense(a), dense(b)) and a.dtype == b.dtype
        for a, b in zip(found, expected, strict=True)
    )


def model_of(name: str) -> tuple[nn.Module, nn.Module, list[Callable[[], Tensor]]]:
    """A model, an identical copy, and the factories of its inputs."""
    build, given = CASES[name]
    torch.manual_seed(7)
    model = build()
    torch.manual_seed(7)
    return model, build(), given


@pytest.mark.parametrize("name", CASES)
def test_two_halves_equal_one_backward(name: str) -> None:
    model, other, given = model_of(name)
    for seed in range(3):  # the gradients of several micro-batches add up
        expected = Run(other, given, seed).ordinary()
        run = Run(model, given, seed)
        split = run.split(model)
        assert equal(split.input_gradients(), expected)
        assert all(tensor.grad is None for tensor in run.inputs)
        split.weight_gradients()
        assert equal(gradients(model), gradients(other))
    assert name in WITHOUT_PARAMETERS or any(gradient is not None for gradient in gradients(model))


@pytest.mark.parametrize("name", [*SPLIT, *AT_ONCE])
def test_weights_get_their_gradients_in_the_second_half(name: str) -> None:
    """Where a graph can't be split, all of them in the first half."""
    model, other, given = model_of(name)
    Run(other, given, 0).ordinary()
    split = Run(model, given, 0).split(model)
    split.input_gradients()
    early = gradients(model)
    assert equal(early, gradients(other)) if name in AT_ONCE else all(gradient is None for gradient in early)


def test_second_halves_may_run_late_and_in_any_order() -> None:
    model, other, given = model_of("encoder")
    wholes = [Run(other, given, seed) for seed in range(3)]
    halves = [Run(model, given, seed).split(model) for seed in range(3)]
    inputs = [half.input_gradients() for half in halves]
    assert all(gradient is None for gradient in gradients(model))
    for number in (1, 0, 2):
        assert equal(inputs[number], wholes[number].ordinary())
        halves[number].weight_gradients()
        assert equal(gradients(model), gradients(other))


def flops(function: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        function()
    return int(counter.get_total_flops())


@pytest.mark.parametrize(
    "name",
    [
        *("linear", "mlp", "convolutions", "encoder", "decoder", "skip", "twins", "again without bias", "weight norm"),
        *("triplets", "experts", "autocast", "channels last", "gpt2", "llama", "resnext", "rounded"),
    ],
)
def test_no_work_is_done_twice(name: str) -> None:
    model, other, given = model_of(name)
    whole = Run(other, given, 0)
    alone = Run(copy.deepcopy(other).requires_grad_(False), given, 0)
    split = Run(model, given, 0).split(model)
    first, second = flops(split.input_gradients), flops(split.weight_gradients)
    assert first == flops(alone.ordinary)  # as if the weights were frozen
    assert second > 0
    assert first + second == flops(whole.ordinary)


@pytest.mark.parametrize(("name", "runs"), [("custom", 1), ("owned by python", 2)])
def test_a_custom_function_runs_once(name: str, runs: int) -> None:
    model, _, given = model_of(name)
    Scale.backwards = 0
    split = Run(model, given, 0).split(model)
    split.input_gradients()
    split.weight_gradients()
    assert Scale.backwards == runs


def test_the_first_chunk_does_all_work_in_the_second_half() -> None:
    model, other, given = model_of("embedding first")
    split = Run(model, given, 0).split(model)
    assert flops(split.input_gradients) == 0
    assert flops(split.weight_gradients) == flops(Run(other, given, 0).ordinary)


@pytest.mark.parametrize("layer", [linear, lambda: nn.LayerNorm(WIDTH)])
def test_hooks_run(layer: Callable[[], nn.Module]) -> None:
    """Hooks of an inner value and of a weight, and post-accumulate hooks of a weight; all run once."""
    calls: list[Tensor] = []

    def scaled(gradient: Tensor) -> Tensor:
        calls.append(gradient)
        return gradient * 3

    def run(part: Any, x: Tensor) -> Any:
        inner = part["a"](x)
        inner.register_hook(scaled)
        return part["b"](inner)

    torch.manual_seed(0)
    model = Lambda(run, a=linear(), b=layer())
    other = copy.deepcopy(model)
    ready: list[Tensor] = []
    for trained in (model, other):
        for parameter in trained.parameters():
            parameter.register_hook(scaled)  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(ready.append)  # type: ignore[no-untyped-call]
    expected = Run(other, [rows], 0).ordinary()
    split = Run(model, [rows], 0).split(model)
    assert equal(split.input_gradients(), expected)
    split.weight_gradients()
    assert equal(gradients(model), gradients(other))
    assert {id(parameter) for parameter in ready} == {id(parameter) for parameter in model.parameters()}
    assert len(ready) == 4
    assert len(calls) == 10


def test_an_output_without_a_gradient_gets_none() -> None:
    model = twins()
    x, y = rows().requires_grad_(), rows().requires_grad_()
    split = SplitBackward([model(x, y), model(y, x)], [None, None], [x, y])
    assert split.input_gradients() == [None, None]
    split.weight_gradients()
    assert gradients(model) == [None] * 4


def test_parameters_may_be_leaves_outside_the_model() -> None:
    """As weight versions are: the gradient goes to the version that was read."""
    model = mlp()
    version = {name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()}
    x = rows().requires_grad_()
    output = torch.func.functional_call(model, version, (x,))
    split = SplitBackward([output], [torch.ones_like(output)], [x])
    split.input_gradients()
    split.weight_gradients()
    assert all(weight.grad is not None for weight in version.values())
    assert gradients(model) == [None] * 6


class Box:
    """Holds a tensor that a graph saves."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@contextmanager
def watching() -> Iterator[list[weakref.ref[Box]]]:
    """Boxes around all saved tensors, with the garbage collector off: nothing may need it to be freed."""
    boxes: list[weakref.ref[Box]] = []

    def pack(tensor: Tensor) -> Box:
        box = Box(tensor)
        boxes.append(weakref.ref(box))
        return box

    def unpack(box: Box) -> Tensor:
        return box.tensor

    unpack.__module__ = "weft"  # whose hooks may unpack several times
    gc.collect()
    gc.disable()
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield boxes
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("compiled", "offloaded", "passed through", "nothing to do")]
)
def test_no_graph_stays_alive(name: str) -> None:
    model, _, given = model_of(name)
    with watching() as boxes:
        run = Run(model, given, 0)
        split = run.split(model)
        split.input_gradients()
        split.weight_gradients()
        assert boxes
        del run
        assert not any(box() for box in boxes)


@pytest.mark.parametrize("name", [*SPLIT, *AT_ONCE])
def test_the_outputs_may_be_freed_before_the_second_half(name: str) -> None:
    model, other, given = model_of(name)
    Run(other, given, 0).ordinary()
    split = Run(model, given, 0).split(model)
    split.input_gradients()
    gc.collect()
    split.weight_gradients()
    assert equal(gradients(model), gradients(other))


@pytest.mark.parametrize("name", ["no parameters", "all frozen", "checkpointed, reentrant"])
def test_without_a_second_half_the_first_frees_everything(name: str) -> None:
    model, _, given = model_of(name)
    with watching() as boxes:
        run = Run(model, given, 0)
        run.split(model).input_gradients()
        assert run.outputs
        assert not any(box() for box in boxes)


def test_the_first_half_frees_all_but_what_products_need() -> None:
    """Of two layers their inputs and the gradients of their outputs; nothing of the functions between and after."""
    model = nn.Sequential(linear(), nn.GELU(), nn.LayerNorm(WIDTH), linear(bias=False))
    x = rows().requires_grad_()
    with watching() as boxes:
        output = model(x)
        loss = functional.cross_entropy(output, torch.tensor([1, 2, 3]))
        split = SplitBackward([loss], [torch.ones(())], [x])
        del output, loss
        assert all(box() for box in boxes)
        split.input_gradients()
        assert not any(box() for box in boxes)
    norm = [parameter.shape for parameter in model[2].parameters()]
    assert sorted(tensor.shape for tensor in split.kept()) == sorted([*[x.shape] * 4, *norm])
    split.weight_gradients()
    assert not split.kept()


def test_hooks_that_unpack_once_are_not_called_twice() -> None:
    """As activation offloading may do; the gradients of weights are computed in the first half then."""
    model, x = linear(), rows().requires_grad_()
    packed: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> int:
        packed[len(packed)] = tensor
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.pop):
        output = model(x)
    split = SplitBackward([output], [torch.ones_like(output)], [x])
    split.input_gradients()
    split.weight_gradients()
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    assert equal(gradients(model), list(expected))


def test_halves_come_in_order_and_inputs_are_leaves() -> None:
    model = linear()
    x = rows().requires_grad_()
    output = model(x)
    split = SplitBackward([output], [output.detach()], [x])
    with pytest.raises(AssertionError, match="before the second"):
        split.weight_gradients()
    split.input_gradients()
    with pytest.raises(AssertionError, match="runs once"):
        split.input_gradients()
    with pytest.raises(AssertionError, match="leaves"):
        SplitBackward([output], [output.detach()], [x * 2])


# Hypothesis draws the kind of step, two older values and a weight for every new value.
STEPS = st.lists(st.tuples(st.integers(0, 6), *[st.integers(0, 99)] * 3), min_size=1, max_size=10)


def step(kind: int, a: Tensor, b: Tensor, weight: Tensor, number: int) -> Tensor:
    if kind == 0:
        return functional.linear(a, weight, weight[number % 4])
    if kind == 1:
        return a @ weight
    if kind == 2:
        return a * b
    if kind == 3:
        return a + b.tanh()
    if kind == 4:
        return a + weight
    if kind == 5:
        return scale(a, 0.5, b)
    return torch.stack([a, weight]).unbind()[number % 2] * b


def random_graph(steps: list[tuple[int, ...]], values: list[Tensor], weights: list[Tensor]) -> list[Tensor]:
    """Values and weights in any combination: weights used twice, alone, in sequence, in parallel."""
    for kind, first, second, third in steps:
        a, b, weight = values[first % len(values)], values[second % len(values)], weights[third % len(weights)]
        value = step(kind, a, b, weight, first + second)
        values = [*values, value / (1 + value.detach().abs().max())]
    return values


@settings(max_examples=300)
@given(STEPS, st.integers(0, 2), st.integers(0, 1), st.lists(st.integers(0, 99), min_size=1, max_size=3))
def test_random_graphs(steps: list[tuple[int, ...]], leaves: int, spare: int, chosen: list[int]) -> None:
    def run() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        inputs = [torch.randn(4, 4, requires_grad=number < leaves) for number in range(2)]
        weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3 + spare)]
        values = random_graph(steps, [*inputs, *weights[:1]], weights[1:])
        return [values[-1 - index % len(values)] for index in chosen], inputs, weights

    outputs, inputs, weights = run()
    grads = [torch.randn(4, 4) for _ in outputs]
    split = SplitBackward(outputs, [*grads], inputs)
    found = split.input_gradients()
    split.weight_gradients()
    outputs, inputs, reference = run()
    if pairs := [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]:
        torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
    assert equal(found, [tensor.grad for tensor in inputs])
    assert equal([tensor.grad for tensor in weights], [tensor.grad for tensor in reference])
