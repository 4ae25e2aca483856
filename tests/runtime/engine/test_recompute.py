"""Recompute of whole chunks and layer by layer: bit-identical to none, whatever the layers pass to each other."""

import contextlib
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.helpers.devices import not_on_pretend, only_on_cpu
from tests.helpers.pairwise import parametrize_product
from tests.helpers.plain import (
    ROWS,
    WIDTH,
    Batch,
    Counted,
    batches,
    differing,
    linear,
    numbers,
    pipeline,
    seeded,
    sgd,
    train,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import weft
from weft.errors import WeftError
from weft.runtime.assembly.resolve import recompute_for
from weft.runtime.assembly.settings import Settings
from weft.runtime.engine import recompute as engine
from weft.runtime.engine.in_flight import KeptInputs
from weft.runtime.tree import unflatten
from weft.simulate import ChunkCost, Cost

Choice = bool | Literal["layer"]


class Layer(nn.Module):
    """A layer that is a function of its own linear layer and its inputs."""

    def __init__(self, function: Callable[..., Any], linear: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.linear: Any = linear or nn.Linear(WIDTH, WIDTH)

    def forward(self, *values: Any) -> Any:
        return self.function(self.linear, *values)


def layers(*functions: Callable[..., Any]) -> nn.Sequential:
    return seeded(*(lambda function=function: Layer(function) for function in functions))


def step(linear: nn.Module, x: Tensor) -> Tensor:
    return torch.tanh(linear(x))


# Models, each with something that a cut between layers could change


def encoder() -> nn.Sequential:
    return seeded(*[lambda: nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)] * 6)


def normed() -> nn.Sequential:
    """BatchNorm counts its batches, and the ReLUs write to the outputs of other layers."""
    return seeded(*[lambda: nn.Linear(WIDTH, WIDTH), lambda: nn.BatchNorm1d(WIDTH), lambda: nn.ReLU(inplace=True)] * 2)


def skipping() -> nn.Sequential:
    """The output of the first layer is used by every second one, twice; a number and a mask go all the way."""

    def start(linear: nn.Module, x: Tensor) -> Any:
        h = step(linear, x)
        return h, h, 0.5, x > 0

    def use(linear: nn.Module, h: Tensor, skip: Tensor, factor: float, mask: Tensor) -> Any:
        return torch.tanh(linear(h) * skip + factor * skip * mask), skip, factor, mask

    def leave(linear: nn.Module, h: Tensor, *rest: Any) -> Any:
        return (step(linear, h), *rest)

    def end(linear: nn.Module, h: Tensor, skip: Tensor, factor: float, mask: Tensor) -> Tensor:
        return step(linear, h) + skip

    return layers(start, use, leave, use, use, end)


def by_name() -> nn.Sequential:
    """Dicts, an output that nobody uses, and one without a gradient."""

    def start(linear: nn.Module, x: Tensor) -> Any:
        return {"h": step(linear, x), "unused": linear(x), "constant": linear(x).detach(), "none": None}

    def between(linear: nn.Module, values: Any) -> Any:
        return values | {"h": step(linear, values["h"]) + values["constant"]}

    return layers(start, between, between, between, between, lambda linear, values: linear(values["h"]))


def tied() -> nn.Sequential:
    """One weight in four layers, one of which uses it three times: its gradients are summed in autograd's order."""
    model = layers(step, lambda linear, x: step(linear, step(linear, step(linear, x))), step, step, step, step)
    for number in (1, 3, 4):
        model.get_submodule(f"{number}.linear").weight = model.get_parameter("0.linear.weight")
    return model


def repeated() -> nn.Sequential:
    """One module five times; its power iteration starts where it ended the last time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        norm = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return nn.Sequential(*[Layer(step, norm)] * 5, *linear(1))


def frozen() -> nn.Sequential:
    model = layers(step, step, step, step, step, step)
    for number in (0, 1, 3):
        model[number].requires_grad_(False)
    return model


def checkpointed(reentrant: bool) -> nn.Sequential:
    def again(linear: nn.Module, x: Tensor) -> Any:
        return checkpoint(lambda x: functional.dropout(step(linear, x), 0.2), x, use_reentrant=reentrant)

    return layers(step, *[again] * 5)


MODELS: dict[str, Callable[[], nn.Sequential]] = {
    "encoder": encoder,
    "normed": normed,
    "skipping": skipping,
    "by name": by_name,
    "tied": tied,
    "repeated": repeated,
    "frozen": frozen,
    "checkpoint": lambda: checkpointed(False),
    "reentrant checkpoint": lambda: checkpointed(True),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "clip": {"clip_norm": 0.01},
    "replicas": {"replicas": 2, "microbatches": 2},
    "skip": {"nan": "skip"},
    "one chunk": {"stages": 1, "balance": [6], "schedule": "1f1b"},
}
METHODS = ["1f1b", "gpipe", "2bw", "wpipe", "interleaved"]
CHUNKS = {"wpipe": [1, 2, 1, 2], "interleaved": [1, 2, 1, 2]}


def data_of(name: str, count: int = 3) -> list[Batch]:
    if name == "encoder":
        return [(numbers(ROWS, 3, WIDTH, seed=2 * t), numbers(ROWS, 3, WIDTH, seed=2 * t + 1)) for t in range(count)]
    return batches(count)


def trained(model: nn.Module, data: list[Batch], recompute: Choice | list[Choice], **options: Any) -> Any:
    pipe = pipeline(model, recompute=recompute, **options)
    losses = [pipe.step(*batch).loss for batch in data]
    return pipe.state_dict(), [*losses, pipe.flush().loss]


def differences(model: nn.Module, data: list[Batch], *choices: Choice | list[Choice], **options: Any) -> list[str]:
    """Of runs with these choices, from one without recompute."""
    state, losses = trained(model, data, False, **options)
    found = []
    for choice in choices:
        other = trained(model, data, choice, **options)
        found += differing(other[0], state) + ["loss"] * (other[1] != losses)
    return found


@parametrize_product(name=MODELS, method=METHODS, options=OPTIONS)
def test_none_whole_chunks_and_layers_are_equal(name: str, method: str, options: str) -> None:
    chosen = {"schedule": method, "balance": CHUNKS.get(method, [3, 3])} | OPTIONS[options]
    assert differences(MODELS[name](), data_of(name), True, "layer", **chosen) == []


KINDS: dict[str, Callable[[nn.Linear, Tensor, Tensor], Any]] = {
    "step": lambda linear, h, skip: (step(linear, h), skip),
    "dropout": lambda linear, h, skip: (functional.dropout(step(linear, h), 0.3), skip),
    "push": lambda linear, h, skip: (step(linear, h), h),
    "pop": lambda linear, h, skip: (step(linear, h * skip) + skip, skip),
    "swap": lambda linear, h, skip: (skip, step(linear, h)),
    "both": lambda linear, h, skip: (lambda new: (new, new))(step(linear, h + skip)),
    "cut off": lambda linear, h, skip: (step(linear, h), skip.detach()),
    "view": lambda linear, h, skip: (step(linear, h), h.view(2, -1)[0].expand(2, -1).reshape(h.shape)),
}


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kinds=st.lists(st.sampled_from(list(KINDS)), min_size=4, max_size=7),
    same=st.lists(st.integers(0, 3), max_size=3),
    off=st.sets(st.integers(0, 3), max_size=2),
    first=st.integers(1, 3),
    choices=st.tuples(*[st.sampled_from([False, True, "layer"])] * 2).filter(any),
)
def test_any_mixture_of_layers(
    kinds: list[str], same: list[int], off: set[int], first: int, choices: tuple[Choice, Choice]
) -> None:
    """Layers that share weights (`same`), frozen ones (`off`), cut after the first ones."""
    model = layers(*(KINDS[kind] for kind in kinds), lambda linear, h, skip: step(linear, h) + skip)
    for number in same:
        model.get_submodule(f"{number}.linear").weight = model.get_parameter(f"{len(kinds)}.linear.weight")
    for number in off:
        model[number].requires_grad_(False)
    data = [((x, x.flip(0)), y) for x, y in batches(2)]
    assert differences(model, data, list(choices), balance=[first, len(model) - first]) == []


def test_layers_run_twice_unless_no_gradient_needs_them() -> None:
    runs: list[list[int]] = [[] for _ in range(6)]
    model = nn.Sequential(*(Counted(calls) for calls in runs))
    model[0].requires_grad_(False)
    model[1].requires_grad_(False)
    train(pipeline(model, recompute=["layer", "layer"], balance=[3, 3]), batches(2))
    forwards = [calls.count(1) for calls in runs]
    assert forwards == [8, 8, 16, 16, 16, 16]
    assert [calls.count(-1) for calls in runs] == [0, 0, 8, 8, 8, 8]


def test_bf16_autocast_is_the_same() -> None:
    """Inputs of a layer are cast as they are without recompute: once for each use, so gradients are summed in fp32."""

    def mixed(linear: nn.Module, x: Tensor) -> Tensor:
        return functional.layer_norm(linear(x) + torch.tanh(linear(x)) * linear(x), (WIDTH,))

    assert differences(layers(*[mixed] * 6), batches(3), True, "layer", precision="bf16-autocast") == []


@pytest.mark.parametrize("name", [name for name in MODELS if name != "repeated"])  # spectral_norm has fp32 buffers
def test_bf16_is_the_same(name: str) -> None:
    """With fp32 masters, in whose dtype gradients of shared weights are summed."""
    options: dict[str, Any] = {"precision": "bf16", "schedule": "wpipe", "stages": 1, "balance": [5, 1]}
    assert differences(MODELS[name](), data_of(name), True, "layer", **options) == []


# Controls


def test_the_order_of_sums_is_noticed() -> None:
    """Of weights that several layers share."""
    with mock.patch.object(engine.Recompute, "_users", {}):
        assert differences(tied(), batches(3), True, stages=1) == []
        assert differences(tied(), batches(3), "layer", stages=1) != []


def test_the_layout_of_gradients_is_noticed() -> None:
    """A gradient that is summed in its order in memory, which a leaf of autograd would change."""

    def across(linear: nn.Module, x: Tensor) -> Tensor:
        return torch.tanh(linear(x.contiguous())).t()

    def enter(self: KeptInputs) -> Any:
        def take(_: Tensor) -> None:
            self.gradients = [tensor.grad for tensor in self.wanted]

        for tensor in self.wanted:
            tensor.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
        return unflatten(self.skeleton, self.tensors)

    model = seeded(*[lambda: Layer(across, nn.Linear(64, 64))] * 6)
    data = [(numbers(64, 64, seed=t), numbers(64, 64)) for t in range(3)]
    options: dict[str, Any] = {"microbatches": 1, "stages": 1}
    assert differences(model, data, "layer", **options) == []
    with mock.patch.object(KeptInputs, "enter", enter):
        assert differences(model, data, "layer", **options) != []


@pytest.mark.parametrize("name", ["normed", "repeated"])
def test_buffers_of_another_time_are_noticed(name: str) -> None:
    with mock.patch.object(engine, "_buffers_of", return_value=contextlib.nullcontext()):
        assert differences(MODELS[name](), batches(3), "layer", balance=[3, 3]) != []


def test_other_random_numbers_are_noticed() -> None:
    with mock.patch("weft.runtime.engine.chunk.mix", side_effect=itertools.count()):
        assert differences(encoder(), data_of("encoder"), "layer") != []


# Refusals


def test_a_layer_must_not_change_its_input() -> None:
    """weft copies the input where a module says `inplace`; a function that works in place does not say so."""
    model = layers(lambda linear, x: linear(x), lambda linear, x: linear(x.mul_(2)), step, step)
    assert differences(model, batches(1), True, stages=1) == []
    with pytest.raises(WeftError, match=r"input of layer 1 is changed in place.*give chunk 0 recompute=True"):
        trained(model, batches(1), "layer", stages=1)


def test_a_later_layer_must_not_change_it_either() -> None:
    """A value without a gradient that passes through."""
    model = layers(
        lambda linear, x: (linear(x), x + 1),
        lambda linear, h, mask: (linear(h) * mask, mask),
        lambda linear, h, mask: linear(h) + mask.mul_(2),
        step,
    )
    with pytest.raises(WeftError, match=r"input of layer \d is changed in place"):
        trained(model, batches(1), "layer", stages=1)


def test_a_layer_in_place_must_not_get_two_views_of_one_tensor() -> None:
    class InPlace(nn.Module):
        inplace = True

        def forward(self, h: Tensor, other: Tensor) -> Tensor:
            return h.mul_(2) + other

    def views(linear: nn.Module, x: Tensor) -> Any:
        h = linear(x)
        return h, h.view(-1).view(h.shape)

    model = nn.Sequential(*layers(step, views), InPlace(), *layers(step))
    assert differences(model, batches(1), True, stages=1) == []
    with pytest.raises(WeftError, match=r"input of layer 2 is changed in place"):
        trained(model, batches(1), "layer", stages=1)


class Late(nn.Module):
    """A layer whose output depends on a buffer that changes from its third forward on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.linear, self.calls = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            self.get_buffer("scale").add_(0.5)
        return self.linear(x) * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("choice", [True, "layer"])
def test_a_buffer_that_changes_later_is_refused(choice: Choice) -> None:
    """Nobody knows its value of before that forward any more."""
    model = seeded(Late, Late)
    trained(model, batches(1), False, stages=1)
    with pytest.raises(WeftError, match=r"Late.scale is a buffer that changes now.*give chunk 0 recompute=False"):
        trained(model, batches(1), choice, stages=1)


def test_layers_pass_on_what_chunks_pass_on() -> None:
    model = layers(step, lambda linear, x: {linear(x)}, lambda linear, values: linear(values.pop()), step)
    assert differences(model, batches(1), True, stages=1) == []
    with pytest.raises(WeftError, match=r"can't keep the output of layer 1.*got builtins.set.*recompute=True"):
        trained(model, batches(1), "layer", stages=1)


def test_a_layer_whose_outputs_differ_the_second_time() -> None:
    calls: list[int] = []

    def changing(linear: nn.Module, x: Tensor) -> Any:
        calls.append(1)
        return linear(x), linear(x) if len(calls) == 1 else linear(x).detach()

    model = layers(step, changing, lambda linear, x, y: linear(x) + y, step)
    with pytest.raises(WeftError, match=r"layer 1 is recomputed with 1 outputs that want a gradient, after 2"):
        trained(model, batches(1), "layer", stages=1, microbatches=1)


# Bytes


def encoders(dropout: float = 0.0) -> nn.Sequential:
    return seeded(*[lambda: nn.TransformerEncoderLayer(64, 4, 256, dropout=dropout, batch_first=True)] * 8)


def held_and_peak(model: nn.Module, recompute: Choice, inputs: Any, targets: Any, **options: Any) -> tuple[int, int]:
    """As the meters count them, of one micro-batch in flight."""
    pipe = pipeline(model, stages=1, microbatches=1, recompute=recompute, **options)
    pipe.step(inputs, targets)
    (chunk,) = pipe._driver.workers[0].chunks.values()
    (counted,) = chunk._known.values()
    assert pipe.report().ranks[0]["peak_bytes"]["activations"] == counted.held + counted.rebuilt
    return counted.held, counted.held + counted.rebuilt


def saved(function: Callable[[], Tensor], *apart: Tensor) -> int:
    """Bytes of all storages that autograd saves and of the output, apart from some tensors."""
    found: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        note(function())
    return sum(found.values()) - sum(found.get(tensor.untyped_storage().data_ptr(), 0) for tensor in apart)


@only_on_cpu("kernels of other devices save other tensors")
def test_layers_hold_their_inputs_and_one_graph() -> None:
    """A chunk of eight encoder layers: by layer it holds eight inputs, and the graph of one layer at the peak, which is
    that of the last layer and the loss."""
    model, x, y = encoders(), numbers(8, 32, 64), numbers(8, 32, 64, seed=1)
    part = x.nbytes
    whole = 2 * part + saved(lambda: functional.mse_loss(model(x), y), x, y, *model.parameters())
    last = numbers(8, 32, 64, seed=2).requires_grad_()
    one = saved(lambda: functional.mse_loss(model[-1](last), y), last, y, *model.parameters())
    assert held_and_peak(model, False, x, y) == (whole, whole)
    assert held_and_peak(model, True, x, y) == (2 * part, whole)
    assert held_and_peak(model, "layer", x, y) == (9 * part, 9 * part + one)
    assert 9 * part + one < whole / 4
    page = Path(__file__).parents[3] / "docs" / "training.md"
    figures = [held_and_peak(model, choice, x, y) for choice in (False, True, "layer")]
    rows = re.findall(r"^\| .*? \| ([\d,]+) KiB.*? \| ([\d,]+) KiB \|$", page.read_text("utf-8"), re.MULTILINE)
    assert rows == [tuple(f"{nbytes // 1024:,}" for nbytes in row) for row in figures]


def real_peak(model: nn.Module, recompute: Choice, batch: Batch) -> int:
    """The most bytes that PyTorch's allocator gave out in one step, beside those that were there before."""
    pipe = pipeline(model, stages=1, microbatches=1, schedule="gpipe", recompute=recompute)
    for _ in range(2):
        pipe.step(*batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        pipe.step(*batch)
    assert profiler.profiler is not None
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return int(max(itertools.accumulate(event.nbytes() for event in events)))


@only_on_cpu("the profiler sees its allocations")
def test_the_peak_of_a_step_is_that_of_one_layer() -> None:
    """Really allocated, with the gradients of all weights."""
    model, batch = encoders(0.1), (numbers(8, 32, 64), numbers(8, 32, 64, seed=1))
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    peaks = {choice: real_peak(model, choice, batch) for choice in (False, True, "layer")}
    counted = {choice: held_and_peak(model, choice, *batch)[1] for choice in (False, True, "layer")}
    assert peaks[False] >= counted[False]
    assert peaks[True] >= counted[True]
    assert peaks["layer"] <= counted["layer"] + gradients < counted[True] / 3


@only_on_cpu("kernels of other devices save other tensors")
def test_values_that_pass_through_are_held_once() -> None:
    model = layers(
        lambda linear, x: (linear(x), x),
        *[lambda linear, h, skip: (step(linear, h), skip)] * 3,
        lambda linear, h, skip: linear(h) + skip,
    )
    x, y = batches(1)[0]
    assert held_and_peak(model, "layer", x, y)[0] == 6 * x.nbytes  # x, the target and four values of h


@only_on_cpu("kernels of other devices save other tensors")
def test_inputs_of_frozen_layers_are_not_held() -> None:
    x, y = batches(1)[0]
    model = frozen()  # 0, 1 and 3
    assert held_and_peak(model, "layer", x, y)[0] == 5 * x.nbytes  # inputs of 2 to 5, and the target
    model.requires_grad_(False)
    model[5].requires_grad_(True)
    assert held_and_peak(model, "layer", x, y)[0] == 2 * x.nbytes


@pytest.mark.parametrize("method", ["gpipe", "1f1b", "interleaved", "pipedream", "2bw", "wpipe"])
def test_the_simulated_peak_is_the_measured_one(method: str) -> None:
    """Of activations alone: the simulator has no other bytes here."""
    choices: list[Choice] = ["layer", True] if method in ("gpipe", "1f1b", "pipedream", "2bw") else ["layer", True] * 2
    pipe = pipeline(linear(12), schedule=method, recompute=choices, balance=[12 // len(choices)] * len(choices))
    for batch in batches(5):
        pipe.step(*batch)
    chunks = {number: chunk for worker in pipe._driver.workers for number, chunk in worker.chunks.items()}
    costs = []
    for number, choice in enumerate(choices):
        (counted,) = chunks[number]._known.values()
        bytes_held = {"activation_bytes": 0.0, "kept_bytes": counted.held, "rebuilt_bytes": counted.rebuilt}
        costs.append(ChunkCost(**bytes_held, recompute=choice, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0))
    simulated = weft.simulate(pipe.schedule, Cost(chunks=tuple(costs))).memory
    measured = [rank["peak_bytes"]["activations"] for rank in pipe.report().ranks]
    assert measured == [memory.total for memory in simulated]


# transformers


def gpt2(reentrant: bool | None) -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=2, n_embd=WIDTH, n_head=2, vocab_size=29, n_positions=8, use_cache=False, tie_word_embeddings=False
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config).train()
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return model


class First(nn.Module):
    """The first output of a block, whatever the version of transformers returns."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, h: Tensor) -> Tensor:
        output = self.block(h)
        return output if isinstance(output, Tensor) else output[0]


@not_on_pretend("attention has another kernel there")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("method", ["1f1b", "wpipe"])
def test_layers_of_transformers_checkpoint_themselves(method: str, reentrant: bool) -> None:
    """In a list of layers it works in the layer itself, without recompute and with it."""
    data = data_of("encoder")

    def run(checkpoints: bool | None, recompute: Choice) -> dict[str, Tensor]:
        blocks = [First(block) for block in gpt2(checkpoints).transformer.h]
        model = nn.Sequential(*layers(step), *blocks, *layers(step))
        pipe = pipeline(model, schedule=method, recompute=recompute, microbatches=2)
        return train(pipe, data)

    expected = run(None, False)
    assert differing(run(reentrant, False), expected) == []
    assert differing(run(reentrant, "layer"), expected) == []


def token_loss(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def cut_gpt2(model: Any, **options: Any) -> weft.Pipeline:
    example = {"input_ids": torch.zeros(2, 6, dtype=torch.int64)}
    chosen: dict[str, Any] = {"microbatches": 2, "loss_fn": token_loss, "cut": ["transformer.h.1"], "example": example}
    return pipeline(model, **chosen | options)


def choices_of(pipe: weft.Pipeline) -> list[Choice]:
    return [chunk.recompute for worker in pipe._driver.workers for chunk in worker.chunks.values()]


def test_a_cut_model_with_checkpointing_is_recomputed_by_layer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exported graph has no checkpoints, and no gradients where they are reentrant; the model keeps its own."""
    monkeypatch.setattr("weft.runtime.assembly.devices._said", set())
    words = torch.randint(29, (4, 6), generator=torch.Generator().manual_seed(1))
    model = gpt2(True)
    pipes = [cut_gpt2(gpt2(None)), cut_gpt2(model)]
    assert [choices_of(pipe) for pipe in pipes] == [[False, False], ["layer", "layer"]]
    said = [line for line in capsys.readouterr().err.splitlines() if "checkpointing" in line]
    assert len(said) == 1
    assert "recompute='layer'; give recompute= to choose another" in said[0]
    assert model.is_gradient_checkpointing
    assert differing(*(train(pipe, [({"input_ids": words}, words)] * 2) for pipe in pipes)) == []


@pytest.mark.parametrize(
    ("method", "given", "expected"),
    [
        ("wpipe", None, "layer"),
        ("wpipe", True, True),
        ("wpipe", [False, True, "layer", False], [False, True, "layer", False]),
        ("zb-h1", None, True),
        ("xpipe", None, False),
    ],
)
def test_what_checkpointing_becomes(method: str, given: Any, expected: Any) -> None:
    chosen = Settings(loss_fn=functional.mse_loss, optimizer=sgd, recompute=given)
    schedule = weft.schedule(method, stages=2, microbatches=2)
    found = recompute_for(chosen, schedule, checkpointing=True)
    assert found == (expected if isinstance(expected, list) else [expected] * schedule.chunks)
    assert recompute_for(chosen, schedule, checkpointing=False) == (
        found if given is not None else [False] * len(found)
    )
