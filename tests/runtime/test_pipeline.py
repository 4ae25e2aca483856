"""What `weft.Pipeline` promises beside the law: any nest, any shape, dropout, precision, evaluation, results.

The measure is plain PyTorch: a loop over micro-batches that adds gradients and steps. Synchronous schedules have to
equal it to the bit, unless a test says why not; asynchronous ones equal the law's oracle.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.models import ASYNCHRONOUS, SYNCHRONOUS
from tests.runtime.oracle import Oracle, delays
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import weft
from weft.errors import WeftError
from weft.runtime.cut import cut_layers

WIDTH = 16  # rows of 16 floats fill a cache line, so kernels add a slice as they add a copy
ROWS = 16
Batch = tuple[Any, Any]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.5)


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def still(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Changes nothing, so that a loss depends on its mini-batch alone."""
    return torch.optim.SGD(params, lr=0.0)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def batches(count: int, *, rows: int = ROWS) -> list[Batch]:
    return [(numbers(rows, WIDTH, seed=2 * t), numbers(rows, WIDTH, seed=2 * t + 1)) for t in range(count)]


def linear(layers: int = 8, *, seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers)))


def seeded(*layers: Callable[[], nn.Module], seed: int = 1) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(*(make() for make in layers))


def pipeline(model: Any, *, schedule: str | weft.Schedule = "1f1b", stages: int = 2, **options: Any) -> weft.Pipeline:
    """All with the same defaults, which `plain` has too."""
    chosen: dict[str, Any] = {"loss_fn": functional.mse_loss, "optimizer": sgd, "microbatches": 4} | options
    return weft.Pipeline(copy.deepcopy(model), schedule=schedule, stages=stages, **chosen)


def train(pipe: weft.Pipeline, data: Iterable[Batch]) -> dict[str, Tensor]:
    for inputs, targets in data:
        pipe.step(inputs, targets)
    return pipe.state_dict()


def plain(
    model: nn.Module,
    data: Iterable[Batch],
    *,
    microbatches: int = 4,
    loss_fn: Callable[[Any, Any], Tensor] = functional.mse_loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = sgd,
    forward: Callable[[Any, Any], Any] = lambda model, inputs: model(inputs),
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    clip_norm: float = math.inf,
    lr_scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
) -> tuple[dict[str, Tensor], list[float], list[float]]:
    """Training as everybody writes it; the state, the loss of each mini-batch and the norm of its gradients."""
    model = copy.deepcopy(model)
    trained = [one for one in model.parameters() if one.requires_grad]
    steps = optimizer(trained)
    scheduler = lr_scheduler(steps) if lr_scheduler else None
    losses, norms = [], []
    for inputs, targets in data:
        steps.zero_grad()
        total = 0.0
        for x, y in zip(cut(inputs, microbatches), cut(targets, microbatches), strict=True):
            with context():
                loss = loss_fn(forward(model, x), y)
            (loss / microbatches).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / microbatches
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(trained, clip_norm).item())
        steps.step()
        if scheduler is not None:
            scheduler.step()
    return dict(model.state_dict()), losses, norms


def cut(nest: Any, parts: int) -> list[Any]:
    """A batch in micro-batches."""
    if isinstance(nest, Tensor):
        return list(nest.chunk(parts)) if nest.dim() else [nest] * parts
    if isinstance(nest, dict):
        return [dict(zip(nest, one, strict=True)) for one in cut(tuple(nest.values()), parts)]
    if isinstance(nest, tuple | list):
        return [type(nest)(one) for one in zip(*(cut(part, parts) for part in nest), strict=True)]
    return [nest] * parts


def differing(one: dict[str, Tensor], other: dict[str, Tensor], *, within: float = 0.0) -> list[str]:
    """Names of tensors that are not equal to the bit, or, with `within`, that far apart for their size."""
    assert list(one) == list(other)
    return [
        name
        for name, tensor in one.items()
        if not torch.equal(tensor, other[name])
        and not (tensor.double() - other[name].double()).abs().max() <= within * tensor.double().abs().max()
    ]


def law(model: nn.Sequential, data: Iterable[Batch], pipe: weft.Pipeline, **options: Any) -> dict[str, Tensor]:
    """The oracle's state for what an asynchronous pipeline was trained with."""
    schedule = pipe.schedule
    oracle = Oracle(
        model,
        **({"loss_fn": functional.mse_loss, "optimizer": sgd} | options),
        microbatches=schedule.microbatches,
        balance=list(pipe.balance),
        delay=delays(schedule.name, schedule.stages, schedule.microbatches),
    )
    for inputs, targets in data:
        oracle.step(inputs, targets)
    return dict(oracle.model.state_dict())


# Plain training


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_one_stage_is_a_plain_training_loop(name: str, optimizer: Any) -> None:
    """With gradients added over micro-batches, and with the loss that such a loop would log."""
    model, data = linear(), batches(4)
    pipe = pipeline(model, schedule=name, stages=1, optimizer=optimizer)
    losses = [pipe.step(*batch).loss for batch in data]
    state, expected, _ = plain(model, data, optimizer=optimizer)
    assert differing(pipe.state_dict(), state) == []
    assert losses == pytest.approx(expected, rel=1e-12)


# Nests


class Fork(nn.Module):
    """One tensor in, all kinds of values out: with and without a gradient, of all dtypes, nested."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.linear(x)
        return {
            "h": h,
            "mask": h > 0,
            "places": torch.arange(x.shape[0] * WIDTH).reshape(x.shape) % WIDTH,
            "exact": h.double() / 3,
            "short": (h * 2).bfloat16(),
            "rest": [None, 3, 0.5, True, "text", (h.detach(), [], {7: torch.tensor(2.0)})],
        }


class Carry(nn.Module):
    """Takes all of it, insists on what it is, and hands on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        assert list(given) == ["h", "mask", "places", "exact", "short", "rest"]
        kinds = [given[name].dtype for name in ("mask", "places", "exact", "short")]
        assert kinds == [torch.bool, torch.int64, torch.float64, torch.bfloat16]
        nothing, three, half, true, text, (fixed, empty, by_number) = given["rest"]
        assert nothing is None
        assert (three, half, text, empty) == (3, 0.5, "text", [])
        assert (type(three), type(half), true) == (int, float, True)
        assert by_number[7].shape == ()
        assert not fixed.requires_grad
        h = self.linear(given["h"]) * given["mask"] + fixed.gather(1, given["places"]) * half
        h = h + given["exact"].float() / three + given["short"].float() * by_number[7]
        return {**given, "h": torch.tanh(h), "exact": given["exact"] + h.double()}


class Meet(nn.Module):
    def forward(self, given: dict[str, Tensor]) -> Tensor:
        return (given["h"] + given["exact"].float() + given["short"].float()) / 8


def nested() -> nn.Sequential:
    return seeded(Fork, *[Carry] * 6, Meet)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_chunks_hand_over_any_nest(name: str, stages: int, recompute: bool) -> None:
    """To 1e-6: a value that several chunks read gets its gradient in parts, which are added in another order."""
    model, data = nested(), batches(3)
    state = train(pipeline(model, schedule=name, stages=stages, recompute=recompute), data)
    assert differing(state, plain(model, data)[0], within=1e-6) == []


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_chunks_hand_over_any_nest(name: str) -> None:
    model, data = nested(), batches(4)
    pipe = pipeline(model, schedule=name)
    assert differing(train(pipe, data), law(model, data, pipe), within=1e-6) == []


class Flagged(nn.Module):
    """What it hands over, and whether that wants a gradient, goes by a plain value, not by a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> dict[str, Any]:
        h = self.linear(given["x"])
        if given["mode"] == "still":
            return {"x": h.detach()}
        return {"x": h} if given["mode"] == "one" else {"x": h, "more": h * 2}


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Any) -> Tensor:
        return torch.as_tensor(self.linear(torch.stack(list(given.values())).sum(0)))


@pytest.mark.parametrize("modes", [["one", "two", "one"], ["still", "one", "two"], ["two", "still", "two"]], ids=str)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_nests_may_change_while_shapes_do_not(name: str, recompute: bool, modes: list[str]) -> None:
    """Other numbers of outputs, and outputs that want a gradient now and did not before."""
    model = seeded(Flagged, Sum)
    data = [({"x": x, "mode": mode}, y) for (x, y), mode in zip(batches(3), modes, strict=True)]
    state = train(pipeline(model, schedule=name, recompute=recompute), data)
    assert differing(state, plain(model, data)[0]) == []


class Aside(nn.Module):
    """Hands over a value of its own parameters that nobody ever reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unread = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h = torch.tanh(self.linear(given[0]))
        return h, self.unread(h)


class First(nn.Module):
    """Reads the first of several values."""

    def forward(self, given: tuple[Tensor, ...]) -> Tensor:
        return given[0]


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"clip_norm": 1e9}], ids=["", "recompute", "clip"])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_gradients_that_never_come(name: str, options: dict[str, Any]) -> None:
    """No gradient is no zero: AdamW lets decay what has a gradient, and only that."""
    model = seeded(Pair, Aside, Aside, First)
    data = batches(3)
    state = train(pipeline(model, schedule=name, optimizer=adamw, **options), data)
    expected = plain(model, data, optimizer=adamw)[0]
    assert torch.equal(expected["1.unread.weight"], model.state_dict()["1.unread.weight"])
    assert differing(state, expected, within=1e-6 if "clip_norm" in options else 0.0) == []


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x * 2


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_chunk_that_no_gradient_reaches(name: str) -> None:
    """Its parameters stay, as in plain training; the chunks behind it train."""
    model = nn.Sequential(*linear(3), Detached(), *linear(4, seed=3))
    data = batches(3)
    state = train(pipeline(model, schedule=name, stages=2, optimizer=adamw), data)
    assert torch.equal(state["0.0.weight"], model.state_dict()["0.0.weight"])
    assert differing(state, plain(model, data, optimizer=adamw)[0]) == []


# What the first chunk is given


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) * scale)


class Whole(Two):
    """One argument, and so it is given the tuple as it is."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        assert type(both) is tuple
        return Two.forward(self, *both)


class ByKey(Two):
    """One argument that bears no key of the dict, and so it is given the dict as it is."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        assert type(batch) is dict
        return super().forward(**batch)


class Optional(Two):
    def forward(self, x: Tensor, scale: Tensor | None = None, *, bias: float = 0.0) -> Tensor:
        assert scale is not None
        return super().forward(x, scale) + bias


class Many(Two):
    def forward(self, *both: Tensor) -> Tensor:
        return super().forward(*both)


@pytest.mark.parametrize(
    ("first", "form", "forward"),
    [
        (Two, tuple, lambda model, given: model[1:](model[0](*given))),
        (Many, tuple, lambda model, given: model[1:](model[0](*given))),
        (Two, dict, lambda model, given: model[1:](model[0](**given))),
        (Optional, dict, lambda model, given: model[1:](model[0](**given))),
        (Whole, tuple, lambda model, given: model(given)),
        (ByKey, dict, lambda model, given: model(given)),
    ],
    ids=["a tuple for two", "a tuple for many", "a dict by names", "a dict for options", "a tuple", "a dict"],
)
def test_several_inputs(first: type[nn.Module], form: type, forward: Any) -> None:
    model = nn.Sequential(*seeded(first), *linear(3))
    given = [
        ((x, x[:, :1].contiguous()) if form is tuple else {"scale": x[:, :1].contiguous(), "x": x}, y)
        for x, y in batches(3)
    ]
    state = train(pipeline(model, schedule="1f1b"), given)
    assert differing(state, plain(model, given, forward=forward)[0]) == []


def test_targets_of_several_parts() -> None:
    """Without samples too: a number for all micro-batches alike."""

    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        errors: Tensor = functional.mse_loss(output, target["y"], reduction="none").mean(1) * target["w"]
        return errors.mean() * float(target["k"])

    data = [(x, {"y": y, "w": x[:, 0].exp(), "k": 0.5}) for x, y in batches(3)]
    state = train(pipeline(linear(), schedule="zb-h1", loss_fn=loss_fn), data)
    assert differing(state, plain(linear(), data, loss_fn=loss_fn)[0]) == []


# Skip connections


class Down(nn.Module):
    """Puts what it computes on a pile, for a chunk that is not its neighbour."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h = torch.tanh(self.linear(given[0]))
        return h, *given[1:], h


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        h, *pile, skipped = given
        return torch.tanh(self.linear(h) + skipped), *pile


class Start(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)


def unet() -> nn.Sequential:
    return seeded(Start, Down, Down, Down, Up, Up, Up, First)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_skip_connections(name: str, stages: int, recompute: bool) -> None:
    """To the bit: a skipped value has two readers, and the sum of two does not depend on their order."""
    model, data = unet(), batches(3)
    state = train(pipeline(model, schedule=name, stages=stages, recompute=recompute), data)
    assert differing(state, plain(model, data)[0]) == []


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_skip_connections(name: str) -> None:
    model, data = unet(), batches(5)
    pipe = pipeline(model, schedule=name)
    assert differing(train(pipe, data), law(model, data, pipe)) == []


# Shapes that change


class Trim(nn.Module):
    """Cuts words to the longest text of the micro-batch: its neighbours get other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, padding_idx=0)

    def forward(self, words: Tensor) -> Tensor:
        longest = max(1, int((words != 0).sum(1).max()))
        return torch.as_tensor(self.embedding(words[:, :longest]))


class Pool(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.mean(1)


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        return torch.tanh(self.linear(h)) + h


def texts() -> nn.Sequential:
    return seeded(Trim, *[Shift] * 6, Pool)


def lengths(sizes: Sequence[int]) -> list[Batch]:
    """Each mini-batch of texts of up to so many words, shorter from micro-batch to micro-batch."""
    made = []
    for t, longest in enumerate(sizes):
        words = torch.randint(1, 50, (ROWS, longest), generator=torch.Generator().manual_seed(t))
        ends = torch.arange(ROWS).flip(0)[:, None] * longest // ROWS + 1
        made.append((words * (torch.arange(longest) < ends), numbers(ROWS, WIDTH, seed=t)))
    return made


GROW_SHRINK_ALTERNATE = [3, 5, 40, 300, 300, 20, 2, 300, 2, 300, 600, 1, 600]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_shapes_change_from_micro_batch_to_micro_batch(name: str, recompute: bool) -> None:
    model, data = texts(), lengths([3, 16, 7, 1, 16])
    assert len({x.sign().sum(1).max().item() for x in cut(data[1][0], 4)}) == 4
    state = train(pipeline(model, schedule=name, recompute=recompute), data)
    assert differing(state, plain(model, data)[0]) == []


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_shorter_last_batch(name: str) -> None:
    """As the end of an epoch brings it, and then the next epoch; one sample a micro-batch is the least."""
    model = linear()
    data = [*batches(2), *batches(1, rows=8), *batches(2), *batches(1, rows=4)]
    state = train(pipeline(model, schedule=name), data)
    assert differing(state, plain(model, data)[0]) == []


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_shapes_that_change(name: str) -> None:
    """Micro-batches of different shapes are in flight together."""
    model, data = texts(), lengths([3, 16, 7, 1, 16])
    pipe = pipeline(model, schedule=name)
    assert differing(train(pipe, data), law(model, data, pipe)) == []


class Numbered(nn.Module):
    """Hands over a plain number that is another one every time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x, next(self.calls)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, int]) -> Tensor:
        return torch.as_tensor(self.linear(given[0])) / (1 + given[1] % 7)


class Kinds(nn.Module):
    """Hands over values that Python holds equal, and that are of different kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = itertools.count()

    def forward(self, x: Tensor) -> tuple[Tensor, bool | int | float]:
        return x, (1, True, 1.0, False, 0, 0.0)[next(self.calls) % 6]


class ByKind(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, bool | int | float]) -> Tensor:
        return torch.as_tensor(self.linear(given[0])) * {int: 1, bool: 2, float: 3}[type(given[1])]


def on_two_ranks() -> dict[str, dict[str, Tensor]]:
    """All that links have to bear, each under a name: the states after training."""
    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"stages": 2 if not torch.distributed.is_initialized() else None}
    states: dict[str, dict[str, Tensor]] = {}
    for name in ("1f1b", "wpipe"):
        made = {
            "texts": (texts(), lengths(GROW_SHRINK_ALTERNATE)),
            "nests": (nested(), batches(4)),
            "skips": (unet(), batches(4)),
        }
        for kind, (model, data) in made.items():
            pipe = pipeline(model, schedule=name, **chosen)
            states[f"{kind}, {name}"] = train(pipe, data)
        held_out = [(numbers(rows, WIDTH, seed=rows), numbers(rows, WIDTH, seed=9)) for rows in (16, 7, 3, 1)]
        states[f"evaluation, {name}"] = {"": torch.tensor(pipe.evaluate(held_out))}
    numbered = seeded(Numbered, Scaled, lambda: nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(numbered, balance=[1, 2], **chosen)
    states["numbers"] = train(pipe, batches(150, rows=4))  # 600 descriptions: more than a link remembers
    states["kinds"] = train(pipeline(seeded(Kinds, ByKind), **chosen), batches(4))
    convolutions = seeded(lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.Conv2d(4, 4, 3, padding=1))
    for module in convolutions:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = [(numbers(8, 4, 6, 6, seed=t).to(memory_format=torch.channels_last),) * 2 for t in range(3)]
    states["channels last"] = train(pipeline(convolutions, **chosen), images)
    return states


def test_real_ranks_bear_what_virtual_ones_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages that grow, shrink and alternate, of all kinds and dtypes, laid out in any way: to the bit, on every
    rank. (What else real ranks do like virtual ones is in `test_real_ranks.py`.)"""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # ranks import this file from where we stand
    virtual = on_two_ranks()
    for real in weft.launch(on_two_ranks, ranks=2):
        assert {name: differing(real[name], state) for name, state in virtual.items()} == {name: [] for name in virtual}


# Randomness


def dropped() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(one, nn.Dropout(0.3)) for one in linear()))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_dropout_does_not_depend_on_how_it_is_run(name: str, stages: int, recompute: bool) -> None:
    data = batches(3)
    alone = train(pipeline(dropped(), schedule="gpipe", stages=1, seed=5), data)
    state = train(pipeline(dropped(), schedule=name, stages=stages, recompute=recompute, seed=5), data)
    assert differing(state, alone) == []


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_dropout_is_computed_again(name: str) -> None:
    """A recompute runs long after other micro-batches have drawn their numbers."""
    data = batches(5)
    states = [train(pipeline(dropped(), schedule=name, recompute=recompute), data) for recompute in (False, True)]
    assert differing(*states) == []


def test_dropout_is_the_same_on_replicas() -> None:
    """To 1e-6: each replica adds its own micro-batches first."""
    data = batches(3)
    one = train(pipeline(dropped(), microbatches=4), data)
    two = train(pipeline(dropped(), microbatches=2, replicas=2), data)
    assert differing(one, two, within=1e-6) == []


def test_another_seed_is_another_dropout() -> None:
    data = batches(2)
    one, other = (train(pipeline(dropped(), seed=seed), data) for seed in (1, 2))
    assert len(differing(one, other, within=1e-3)) == len(one)


class Masks(nn.Module):
    """Notes which of its inputs a dropout lets pass."""

    def __init__(self, seen: list[Tensor]) -> None:
        super().__init__()
        self.seen = seen
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Masks":
        return self

    def forward(self, x: Tensor) -> Tensor:
        mask = functional.dropout(torch.ones_like(x), 0.5)
        self.seen.append(mask.detach())
        return torch.as_tensor(self.linear(x * mask))


@pytest.mark.parametrize("name", ["1f1b", "2bw", "wpipe"])
def test_mini_batches_micro_batches_and_layers_draw_their_own_numbers(name: str) -> None:
    """Also behind a flush, where micro-batches count from 0 again."""
    seen: list[Tensor] = []
    pipe = pipeline([Masks(seen) for _ in range(4)], schedule=name, microbatches=2)
    for x, y in batches(4):
        pipe.step(x, y)
        pipe.step(x, y)
        pipe.flush()
    assert len(seen) == 8 * 2 * 4  # mini-batches, micro-batches, layers
    assert len({tuple(one.flatten().tolist()) for one in seen}) == len(seen)


@pytest.mark.parametrize("recompute", [False, True])
def test_the_users_own_random_numbers_stay_as_they_are(recompute: bool) -> None:
    """Whatever a pipeline draws, and even if a step fails, the user's generator goes on where it was."""
    torch.manual_seed(3)
    expected = torch.get_rng_state()
    pipe = pipeline(dropped(), schedule="wpipe", balance="time", example=batches(1)[0][0], recompute=recompute)
    for batch in batches(3):
        pipe.step(*batch)
    pipe.flush()
    pipe.evaluate(batches(1))
    pipe.state_dict()
    assert torch.equal(torch.get_rng_state(), expected)
    with pytest.raises(WeftError):
        train(pipe, [(batches(1)[0][0], torch.full((ROWS, WIDTH), math.nan))])
    assert torch.equal(torch.get_rng_state(), expected)


# Recompute, in-place layers, precision


class Counted(nn.Module):
    """Counts its forwards, and its backwards as negative ones."""

    def __init__(self, runs: list[int]) -> None:
        super().__init__()
        self.runs = runs
        self.linear = nn.Linear(WIDTH, WIDTH)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Counted":
        return self

    def forward(self, x: Tensor) -> Tensor:
        self.runs.append(1)
        h = torch.tanh(self.linear(x))
        if h.requires_grad:
            h.register_hook(lambda gradient: self.runs.append(-1))  # type: ignore[no-untyped-call]
        return h


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw"])
def test_recompute_is_a_choice_per_chunk(name: str) -> None:
    """Layers of chunks that are chosen run twice a micro-batch, others once."""
    runs: list[list[int]] = [[], [], [], []]
    layers = [Counted(one) for one in runs]
    start = copy.deepcopy(nn.Sequential(*(one.linear for one in layers)).state_dict())
    states = []
    for choice in ([False, True, False, True], False):
        nn.Sequential(*(one.linear for one in layers)).load_state_dict(start)
        for one in runs:
            one.clear()
        pipe = pipeline(layers, schedule=name, stages=4, recompute=choice)
        states.append(train(pipe, batches(3)))
        if choice:
            assert [one.count(1) for one in runs] == [12, 24, 12, 24]
    assert differing(*states) == []


class InPlace(nn.Module):
    """A block that begins in place, one layer deep."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.block(x))


@pytest.mark.parametrize(
    "start",
    [
        lambda: nn.ReLU(inplace=True),
        InPlace,
        lambda: nn.Sequential(nn.Identity(), nn.ReLU(inplace=True)),
        lambda: nn.Sequential(nn.Flatten(), nn.Dropout(0.0, inplace=True), nn.ReLU(inplace=True)),
    ],
    ids=["layer", "block", "behind an identity", "behind a view"],
)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_chunk_may_begin_in_place(name: str, recompute: bool, start: Callable[[], nn.Module]) -> None:
    """Its input belongs to another chunk, or to the user, who finds the batch as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(start(), nn.Linear(WIDTH, WIDTH), start(), nn.Linear(WIDTH, WIDTH))
    data = batches(3)
    given = copy.deepcopy(data)
    state = train(pipeline(model, schedule=name, recompute=recompute), given)
    assert all(torch.equal(mine[0], theirs[0]) for mine, theirs in zip(given, data, strict=True))
    assert differing(state, plain(model, copy.deepcopy(data))[0]) == []


@pytest.mark.parametrize("recompute", [False, True])
def test_layers_in_place_where_a_chunk_begins_with_several(recompute: bool) -> None:
    """The layers of the list, too: a chunk of [Identity, ReLU in place, Linear]."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        parts = [[nn.Identity(), nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)] for _ in range(2)]
    model = nn.Sequential(*itertools.chain(*parts))
    data = batches(3)
    state = train(pipeline(model, balance=[3, 3], recompute=recompute), copy.deepcopy(data))
    assert differing(state, plain(model, copy.deepcopy(data))[0]) == []


class Checkpointed(nn.Module):
    """Computes again by itself, at the weights that its module then has."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self.active, self.layers = active, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(checkpoint(self.layers, x, use_reentrant=False) if self.active else self.layers(x))


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_checkpoints_of_the_users_own(name: str) -> None:
    """Whoever computes a forward again in its backward has to find the forward's version of the weights."""
    data = batches(5)
    states = [
        train(pipeline(seeded(*[lambda active=active: Checkpointed(active)] * 4), schedule=name), data)
        for active in (False, True)
    ]
    assert differing(*states) == []


class Spectral(nn.Module):
    """Reads statistics that it changes with every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("name", ["1f1b", "wpipe"])
def test_a_recompute_reads_the_buffers_of_its_forward(name: str) -> None:
    states = [
        train(pipeline(seeded(*[Spectral] * 4), schedule=name, recompute=recompute), batches(3))
        for recompute in (False, True)
    ]
    assert differing(*states) == []


class Recurrent(nn.Module):
    """Keeps its parameters in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.lstm(x[:, None])[0][:, 0])


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_recurrent_layers_have_versions(name: str) -> None:
    model, data = seeded(*[Recurrent] * 4), batches(5)
    pipe = pipeline(model, schedule=name)
    assert differing(train(pipe, data), law(model, data, pipe)) == []


class Behind(nn.Module):
    """Reaches its weight by a way that no module knows of."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hidden = [self.linear.weight] if hidden else []

    def forward(self, x: Tensor) -> Tensor:
        weight = self.hidden[0] if self.hidden else self.linear.weight
        return torch.tanh(functional.linear(x, weight, self.linear.bias))


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_weights_that_are_reached_in_another_way(name: str) -> None:
    """They train as others do, or are refused; a gradient that gets lost would be the worst."""
    expected = train(pipeline(seeded(*[lambda: Behind(False)] * 4), schedule=name), batches(3))
    with contextlib.suppress(WeftError):
        state = train(pipeline(seeded(*[lambda: Behind(True)] * 4), schedule=name), batches(3))
        assert differing(state, expected) == []


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "2bw"])
def test_sparse_gradients(name: str) -> None:
    """Some optimizers take no others. To 1e-6: sparse gradients are added up later."""
    states = []
    for sparse in (False, True):
        model = seeded(lambda sparse=sparse: nn.Embedding(50, WIDTH, sparse=sparse), *[Shift] * 3)  # type: ignore[misc]
        data = [(torch.arange(ROWS) + t, y) for t, (_, y) in enumerate(batches(3))]
        states.append(train(pipeline(model, schedule=name, optimizer=descent), data))
    assert differing(*states, within=1e-6) == []


def descent(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def bf16() -> contextlib.AbstractContextManager[Any]:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_bf16_is_plain_autocast(name: str, recompute: bool) -> None:
    """Weights stay in fp32 and so do their gradients; what crosses a cut is what autocast makes of it."""
    model, data = nn.Sequential(*linear(7), nn.LayerNorm(WIDTH)), batches(4)
    state = train(pipeline(model, schedule=name, precision="bf16", recompute=recompute), data)
    expected = plain(model, data, context=bf16)[0]
    assert {one.dtype for one in state.values()} == {torch.float32}
    assert differing(state, expected) == []
    assert len(differing(state, plain(model, data)[0])) == len(state)  # it is another computation


def test_a_model_of_another_dtype() -> None:
    model = linear().double()
    data = [(x.double(), y.double()) for x, y in batches(3)]
    assert differing(train(pipeline(model, schedule="zb-h1"), data), plain(model, data)[0]) == []


# Frozen parameters


FROZEN = {
    "front": ["0.", "1."],
    "middle": ["2.", "4."],
    "end": ["6.", "7."],
    "a chunk": ["4.", "5.", "6.", "7."],  # the second of two
    "biases": [f"{layer}.0.bias" for layer in range(8)],
}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("where", FROZEN)
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_frozen_parameters(name: str, where: str, recompute: bool) -> None:
    """They stay as they are and have no state; all others train as in plain PyTorch."""
    model, data = linear(), batches(3)
    for label, parameter in model.named_parameters():
        parameter.requires_grad_(not label.startswith(tuple(FROZEN[where])))
    pipe = pipeline(model, schedule=name, balance=[4, 4] if name != "interleaved" else [2] * 4, recompute=recompute)
    state = train(pipe, data)
    before = model.state_dict()
    for label in state:
        assert torch.equal(state[label], before[label]) == label.startswith(tuple(FROZEN[where]))
    assert differing(state, plain(model, data)[0]) == []


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"clip_norm": 0.01}], ids=["", "recompute", "clip"])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_chunks_without_parameters(name: str, options: dict[str, Any]) -> None:
    """First, in the middle and last; the losses are known all the same. With a norm to 1e-6, as it is added up by
    chunks; wpipe has two of them, and with its parameters all in one group they come to the same."""
    if name == "pipedream" and "clip_norm" in options:
        pytest.skip("pipedream has no norm over chunks of different delays")
    model = nn.Sequential(nn.Tanh(), *linear(1), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Tanh())
    data = batches(4)
    stages, balance = (2, [1, 1, 1, 5]) if name in ("interleaved", "wpipe") else (4, [1, 1, 1, 5])
    pipe = pipeline(model, schedule=name, stages=stages, balance=balance, **options)
    for batch in data:
        pipe.step(*batch)
    result = pipe.flush()
    options = {"clip_norm": options["clip_norm"]} if "clip_norm" in options else {}
    within = 1e-6 if options else 0.0
    if name in SYNCHRONOUS:
        state, losses, norms = plain(model, data, **options)
        assert differing(pipe.state_dict(), state, within=within) == []
        assert result.loss == pytest.approx(losses[-1], rel=1e-6)
        assert result.norm == (pytest.approx(norms[-1], rel=1e-6) if options else None)
    else:
        assert differing(pipe.state_dict(), law(model, data, pipe, **options), within=within) == []
    assert result.minibatch == 3


# Learning rates


def falling(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: 1 / (1 + update))


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_learning_rates_go_by_updates(name: str) -> None:
    model, data = linear(), batches(4)
    pipe = pipeline(model, schedule=name, lr_scheduler=falling)
    state = train(pipe, data)
    if name in SYNCHRONOUS:
        expected = plain(model, data, lr_scheduler=falling)[0]
    else:
        expected = law(model, data, pipe, lr_scheduler=falling)
    assert differing(state, expected) == []
    for built in pipe._built.values():
        for one in built.chunk.sets:
            assert one.optimizer is not None
            assert one.optimizer.param_groups[0]["lr"] == pytest.approx(0.1 / 5)


# Evaluation


def mean_loss(model: nn.Module, data: Iterable[Batch]) -> float:
    """Over samples, in one piece each."""
    model = copy.deepcopy(model).eval()
    with torch.no_grad():
        parts = [(functional.mse_loss(model(x), y).item() * len(x), len(x)) for x, y in data]
    return sum(total for total, _ in parts) / sum(samples for _, samples in parts)


class Noisy(nn.Module):
    """Dropout, and statistics that an evaluation must read and not write."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.dropout(self.norm(self.linear(x))))


def noisy() -> nn.Sequential:
    model = seeded(*[Noisy] * 8)
    model.get_submodule("3.norm").eval()  # a user's own choice, which has to survive
    return model


def check_evaluation(pipe: weft.Pipeline, model: nn.Module) -> None:
    """It is that of the model whose state_dict a user would save, and leaves no trace."""
    for batch in batches(3):
        pipe.step(*batch)
    held_out = [(numbers(rows, WIDTH, seed=rows), numbers(rows, WIDTH, seed=9)) for rows in (16, 7, 3, 1, 5)]
    loss = pipe.evaluate(iter(held_out))
    model.load_state_dict(pipe.state_dict())
    assert loss == pytest.approx(mean_loss(model, held_out), rel=1e-5)
    assert loss == pipe.evaluate(held_out)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_evaluation_is_the_mean_over_samples(name: str, recompute: bool) -> None:
    """Batches that micro-batches don't divide, and with fewer samples than micro-batches, weigh by their samples."""
    check_evaluation(pipeline(noisy(), schedule=name, recompute=recompute), noisy())


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_replicas_evaluate_together(name: str) -> None:
    check_evaluation(pipeline(dropped(), schedule=name, microbatches=2, replicas=2), dropped())


def test_replicas_evaluate_with_the_statistics_of_the_first() -> None:
    """For these are the model's, and the others are lost with the run."""
    check_evaluation(pipeline(noisy(), microbatches=2, replicas=2), noisy())


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_training_goes_on_after_an_evaluation_as_after_a_flush(name: str) -> None:
    def run(pause: Callable[[weft.Pipeline], object]) -> dict[str, Tensor]:
        pipe = pipeline(noisy(), schedule=name)
        for t, batch in enumerate(batches(6)):
            if t == 3:
                pause(pipe)
                layers = [layer for built in pipe._built.values() for layer in built.chunk.layers]
                assert [one.training for layer in layers for one in layer.modules()].count(False) == 1
            pipe.step(*batch)
        return pipe.state_dict()

    flushed = run(lambda pipe: pipe.flush())
    assert differing(run(lambda pipe: pipe.evaluate(batches(2, rows=5))), flushed) == []
    if name in SYNCHRONOUS:
        assert differing(run(lambda pipe: None), flushed) == []


def test_modes_are_put_back_when_an_evaluation_fails() -> None:
    pipe = pipeline(noisy())
    with pytest.raises(WeftError):
        pipe.evaluate([(torch.zeros(3, WIDTH), None)])
    assert all(one.training for built in pipe._built.values() for one in built.chunk.layers)


# Results


@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_a_result_has_the_loss_of_the_mini_batch_that_it_names(name: str, stages: int) -> None:
    """With weights that stay, a loss tells which mini-batch it is of."""
    data = batches(8)
    losses = plain(linear(), data, optimizer=still)[1]
    pipe = pipeline(linear(), schedule=name, stages=stages, optimizer=still)
    newest = -1
    for t, batch in enumerate(data):
        result = pipe.step(*batch)
        assert (result.loss is None) == (result.minibatch is None)
        if name in SYNCHRONOUS:
            assert result.minibatch == t
        if result.minibatch is not None:
            assert newest <= result.minibatch <= t
            newest = result.minibatch
            assert result.loss == pytest.approx(losses[newest], rel=1e-6)
        assert (result.skipped, result.norm) == (0, None)
    assert newest >= 8 - 1 - stages
    done = pipe.flush()
    assert done.minibatch == 7
    assert done.loss == pytest.approx(losses[7], rel=1e-6)
    pipe.step(*data[0])
    done = pipe.flush()  # mini-batches count on
    assert done.minibatch == 8
    assert done.loss == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_a_step_does_not_drain_an_asynchronous_pipeline(name: str) -> None:
    """Behind every step micro-batches are in flight, whose backward is still to come."""
    runs: list[list[int]] = [[] for _ in range(8)]
    pipe = pipeline([Counted(one) for one in runs], schedule=name, stages=4)
    for t, batch in enumerate(batches(5), start=1):
        result = pipe.step(*batch)
        assert result.minibatch is None or result.minibatch < t - 1
        assert runs[0].count(1) == 4 * t
        assert runs[0].count(-1) < 4 * t
        assert pipe._built[0, 0].chunk.flights
    pipe.flush()
    assert {(one.count(1), one.count(-1)) for one in runs} == {(20, 20)}
    assert not any(built.chunk.flights for built in pipe._built.values())


# Not a number


def spoilt(data: list[Batch], *, at: Sequence[int]) -> list[Batch]:
    """One sample of the last micro-batch of some mini-batches is not a number."""
    data = copy.deepcopy(data)
    for t in at:
        data[t][0][-1, 0] = math.nan
    return data


@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_nan_stops_unless_told_otherwise(name: str) -> None:
    pipe = pipeline(linear(), schedule=name)
    with pytest.raises(WeftError, match=r'mini-batch 2, micro-batch 3 .*: the loss is nan; .*nan="skip"'):
        train(pipe, spoilt(batches(4), at=[2]))


@pytest.mark.parametrize("options", [{}, {"clip_norm": 1e9}, {"recompute": True}], ids=["", "clip", "recompute"])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, *ASYNCHRONOUS])
def test_nan_skips_the_update_of_its_mini_batch(name: str, options: dict[str, Any]) -> None:
    """The version after it is the one before it; the learning rate does not fall for it. With a norm to 1e-6."""
    if name == "pipedream" and "clip_norm" in options:
        pytest.skip("pipedream has no norm over chunks of different delays")
    model, data = linear(), spoilt(batches(6), at=[1, 4])
    pipe = pipeline(model, schedule=name, nan="skip", lr_scheduler=falling, **options)
    results = [pipe.step(*batch) for batch in data] + [pipe.flush()]
    assert [result.skipped for result in results][-1] == 2
    assert sorted(result.skipped for result in results) == [result.skipped for result in results]
    if name in SYNCHRONOUS:
        assert [result.skipped for result in results] == [0, 1, 1, 1, 2, 2, 2]
        assert [math.isnan(result.loss or 0.0) for result in results] == [False, True, False, False, True, False, False]
    oracle = Oracle(
        model,
        loss_fn=functional.mse_loss,
        optimizer=sgd,
        microbatches=4,
        balance=list(pipe.balance),
        delay=delays(name, 2, 4),
    )
    scheduler = falling(oracle.optimizer)
    for t, batch in enumerate(data):
        with pytest.MonkeyPatch.context() as patch:
            if t in (1, 4):
                patch.setattr(oracle.optimizer, "step", lambda: None)
            oracle.step(*batch)
        if t not in (1, 4):
            scheduler.step()
    within = 1e-6 if "clip_norm" in options else 0.0
    assert differing(pipe.state_dict(), dict(oracle.model.state_dict()), within=within) == []


@pytest.mark.parametrize("front", [False, True])
def test_nan_in_one_replica_skips_on_all(front: bool) -> None:
    """Also where the first chunk has nothing to update, but still counts."""
    model = nn.Sequential(nn.Tanh(), *linear(3)) if front else linear(4)
    data = spoilt(batches(3), at=[1])  # in the second replica
    pipe = pipeline(model, nan="skip", microbatches=2, replicas=2, balance=[1, 3])
    results = [pipe.step(*batch) for batch in data]
    assert [result.skipped for result in results] == [0, 1, 1]
    state = plain(model, [data[0], data[2]])[0]
    assert differing(pipe.state_dict(), state, within=1e-6) == []


# Norms


@pytest.mark.parametrize("options", [{}, {"microbatches": 2, "replicas": 2}], ids=["", "replicas"])
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize("name", [*SYNCHRONOUS, "2bw"])
def test_the_norm_is_over_all_chunks_and_counts_tied_weights_once(
    name: str, stages: int, options: dict[str, Any]
) -> None:
    """To 1e-6, as it is added up chunk by chunk. 2bw's gradients are plain ones where weights stay."""
    if stages > options.get("microbatches", 4) and name in ("2bw", "interleaved"):
        pytest.skip("has fewer micro-batches than stages")
    model, data = linear(), batches(4)
    model.get_submodule("7.0").weight = model.get_submodule("0.0").weight
    clipped: dict[str, Any] = {"clip_norm": 0.05, "optimizer": still if name == "2bw" else sgd}
    pipe = pipeline(model, schedule=name, stages=stages, **clipped, **options)
    state, _, norms = plain(model, data, **clipped)
    assert min(norms) > 0.1
    for batch in data:
        result = pipe.step(*batch)
        if name in SYNCHRONOUS:
            assert result.minibatch is not None
        if result.minibatch is not None:
            assert result.norm == pytest.approx(norms[result.minibatch], rel=1e-5)
    assert pipe.flush().norm == pytest.approx(norms[-1], rel=1e-5)
    assert differing(pipe.state_dict(), state, within=1e-6) == []


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_wpipe_has_a_norm_for_each_group(stages: int) -> None:
    """The first mini-batch of all is computed at the weights that it updates, so plain gradients tell."""
    model, (inputs, targets) = linear(), batches(1)[0]
    pipe = pipeline(model, schedule="wpipe", stages=stages, clip_norm=0.01, balance=[4 // stages] * 2 * stages)
    pipe.step(inputs, targets)
    result = pipe.flush()
    copied = copy.deepcopy(model)
    for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
        (functional.mse_loss(copied(x), y) / 4).backward()  # type: ignore[no-untyped-call]
    norms = [torch.nn.utils.clip_grad_norm_(group.parameters(), 0.01).item() for group in (copied[:4], copied[4:])]
    assert min(norms) > 0.02
    sgd(copied.parameters()).step()
    assert differing(pipe.state_dict(), dict(copied.state_dict()), within=1e-6) == []
    assert result.norm in [pytest.approx(one, rel=1e-5) for one in norms]


@pytest.mark.parametrize("stages", [2, 4])
def test_pipedream_has_no_norm(stages: int) -> None:
    with pytest.raises(WeftError, match=rf"one norm over all chunks.*pipedream.*{stages}.*delays.*use 2bw .*wpipe"):
        pipeline(linear(), schedule="pipedream", stages=stages, clip_norm=1.0)


# Replicas


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_replicas_are_a_larger_mini_batch(name: str, stages: int) -> None:
    """To 1e-6: each replica adds its own micro-batches first. With one stage it is plain data parallelism."""
    model, data = linear(), batches(3)
    pipe = pipeline(model, schedule=name, stages=stages, microbatches=2, replicas=2)
    losses = [pipe.step(*batch).loss for batch in data]
    state, expected, _ = plain(model, data)
    assert differing(pipe.state_dict(), state, within=1e-6) == []
    assert losses == pytest.approx(expected, rel=1e-6)
    for built in pipe._built.values():  # all copies are one
        for name in built.state:
            assert torch.equal(built.tensor(name), pipe.state_dict()[name])


def test_the_loss_is_that_of_all_replicas_where_the_first_chunk_has_nothing_to_update() -> None:
    model, data = nn.Sequential(nn.Tanh(), *linear(3)), batches(3)
    pipe = pipeline(model, microbatches=2, replicas=2, balance=[1, 3])
    losses = [pipe.step(*batch).loss for batch in data]
    assert losses == pytest.approx(plain(model, data)[1], rel=1e-6)


# Schedules of the user's own


def test_a_schedule_from_a_file_trains(tmp_path: Path) -> None:
    """A V of four chunks on two ranks, written as torch's compute-only CSV: no method of weft has it."""
    path = tmp_path / "v.csv"
    path.write_text("0F0,0F1,3F0,3B0,3F1,3B1,0B0,0B1\n1F0,2F0,1F1,2F1,2B0,1B0,2B1,1B1\n")
    schedule = weft.load_csv(path)
    assert schedule.placement == (0, 1, 1, 0)
    model, data = linear(), batches(3)
    state = train(pipeline(model, schedule=schedule, microbatches=2), data)
    assert differing(state, plain(model, data, microbatches=2)[0]) == []


@pytest.mark.parametrize("late", [1, 2])
def test_an_asynchronous_schedule_of_the_users_own_trains(late: int) -> None:
    """One stage that reads weights some updates old: nothing but data tells the engine."""
    schedule = weft.Schedule(
        name="late",
        stages=1,
        microbatches=2,
        streams=[" ".join(f"0F{j}" for j in range(2)) + f" 0B{-2 * late} 0B{1 - 2 * late}"],
        weights=weft.Weights(delay=late),
    )
    model, data = linear(), batches(6)
    state = train(pipeline(model, schedule=schedule, stages=1, microbatches=None), data)
    oracle = Oracle(
        model,
        loss_fn=functional.mse_loss,
        optimizer=sgd,
        microbatches=2,
        balance=[8],
        delay=lambda chunk, j: late,
    )
    for batch in data:
        oracle.step(*batch)
    assert differing(state, dict(oracle.model.state_dict())) == []


# Whole models


class Marked(nn.Module):
    """A forward of its own, with a skip connection over both marks."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH)
        self.first, self.second, self.head = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, words: Tensor, scale: Tensor) -> Tensor:
        start = self.embedding(words)
        h = torch.tanh(self.first(start))
        weft.cut()
        h = torch.tanh(self.second(h) * scale)
        weft.cut()
        return torch.as_tensor(self.head(h + start).mean(1))


@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_a_model_cut_at_marks(name: str) -> None:
    """Unless a schedule wants more chunks than the marks make."""
    if name == "interleaved":
        pytest.skip("wants four chunks of three layers")
    model = seeded(Marked)[0]
    data = [((torch.arange(ROWS * 5).reshape(ROWS, 5) % 50, x[:, None, :1].contiguous()), y) for x, y in batches(3)]
    example = tuple(one[:3] for one in data[0][0])
    state = train(pipeline(model, schedule=name, example=example), data)
    assert differing(state, plain(model, data, forward=lambda model, given: model(*given))[0]) == []


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        vocab_size=50,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForSequenceClassification(config)  # type: ignore[no-any-return]


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32,
        n_layer=2,
        n_head=2,
        vocab_size=50,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config)  # type: ignore[no-any-return]


HUGGING_FACE = {
    "bert": (bert, ["bert.encoder.layer.0", "bert.encoder.layer.1", "classifier"]),
    "gpt2": (gpt2, ["transformer.h.0", "transformer.h.1", "lm_head"]),
}


def words(name: str) -> list[Batch]:
    """Texts of other lengths in every mini-batch, some of them padded."""
    made = []
    for t, length in enumerate((6, 9, 4)):
        tokens = torch.randint(50, (8, length), generator=torch.Generator().manual_seed(t))
        mask = torch.ones(8, length, dtype=torch.long)
        mask[::3, -1] = 0
        made.append(({"input_ids": tokens, "attention_mask": mask}, tokens if name == "gpt2" else tokens[:, 0] % 2))
    return made


def token_loss(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, -2), target.flatten())


@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_models_train(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Synchronously to 1e-6 of plain training (GPT-2 adds the gradients of its tied embedding chunk by chunk),
    asynchronously as the law has it, told by the same layers."""
    make, at = HUGGING_FACE[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
    model.train()
    data = words(name)
    example = {key: tensor[:2] for key, tensor in data[0][0].items()}
    options: dict[str, Any] = {"cut": at, "example": example, "loss_fn": token_loss, "microbatches": 4}
    state = train(pipeline(model, schedule="1f1b", **options), data)
    expected = plain(model, data, loss_fn=token_loss, forward=lambda model, given: model(**given))[0]
    assert list(state) == list(model.state_dict())
    assert differing(state, expected, within=1e-6) == []

    layers: list[nn.Module] = []

    def keep(*args: Any, **kwargs: Any) -> list[nn.Module]:
        found = cut_layers(*args, **kwargs)
        layers.extend(copy.deepcopy(found))  # as they are before they are trained
        return found

    monkeypatch.setattr("weft.runtime.layers.cut_layers", keep)
    pipe = pipeline(model, schedule="wpipe", **options)
    state = train(pipe, data)
    oracle = Oracle(
        nn.Sequential(*layers),
        loss_fn=token_loss,
        optimizer=sgd,
        microbatches=4,
        balance=list(pipe.balance),
        delay=delays("wpipe", 2, 4),
    )
    for inputs, targets in data:
        oracle.step(Batched(inputs), targets)  # type: ignore[arg-type]
    told = {name.split(".", 1)[1]: tensor for name, tensor in oracle.model.state_dict().items()}
    if name == "gpt2":
        told["lm_head.weight"] = told["transformer.wte.weight"]
    assert differing(state, {name: told[name] for name in state}, within=1e-6) == []
    assert len(differing(state, expected, within=1e-6)) > len(state) / 2


class Batched(dict[str, Tensor]):
    """A dict that is cut as a tensor is, for the oracle."""

    def chunk(self, parts: int) -> list[dict[str, Tensor]]:
        return cut(dict(self), parts)
