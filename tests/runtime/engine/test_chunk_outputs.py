"""Outputs of chunks, compared with plain training (`plain.py`): any tree, any shape, skip connections."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.helpers.models import ASYNCHRONOUS, SYNCHRONOUS
from tests.helpers.pairwise import parametrize_product
from tests.helpers.plain import (
    ROWS,
    WIDTH,
    Batch,
    Shift,
    adamw,
    batches,
    cut,
    differing,
    law,
    linear,
    numbers,
    pipeline,
    plain,
    results_of,
    seeded,
    sgd,
    train,
)
from torch import Tensor, nn
from torch.nn import functional

# Plain training


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_one_stage_is_a_plain_training_loop(name: str, optimizer: Any) -> None:
    """With gradients accumulated over micro-batches, and with the loss that such a loop would log."""
    model, data = linear(), batches(4)
    pipe = pipeline(model, schedule=name, stages=1, optimizer=optimizer)
    losses = [result.loss for result in results_of(pipe, data)]
    state, expected, _ = plain(model, data, optimizer=optimizer)
    assert differing(pipe.state_dict(), state) == []
    assert losses == pytest.approx(expected, rel=1e-12)


# Trees


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
            "places": torch.arange(x.shape[0] * WIDTH, device=x.device).reshape(x.shape) % WIDTH,
            "exact": h.double() / 3,
            "short": (h * 2).bfloat16(),
            "rest": [None, 3, 0.5, True, "text", (h.detach(), [], {7: torch.tensor(2.0)})],
        }


class Carry(nn.Module):
    """Takes all of these values, checks them, and passes them all on."""

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


@parametrize_product(name=SYNCHRONOUS, stages=[1, 2, 4], recompute=[False, True])
def test_chunks_may_return_any_tree(name: str, stages: int, recompute: bool) -> None:
    """To 1e-6: the gradient of a value that several chunks read is summed in another order."""
    model, data = nested(), batches(3)
    state = train(pipeline(model, schedule=name, stages=stages, recompute=recompute), data)
    assert differing(state, plain(model, data)[0], within=1e-6) == []


@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_chunks_may_return_any_tree(name: str) -> None:
    model, data = nested(), batches(4)
    pipe = pipeline(model, schedule=name)
    assert differing(train(pipe, data), law(model, data, pipe), within=1e-6) == []


class Flagged(nn.Module):
    """Its outputs, and whether they need a gradient, depend on a plain value, not on a shape."""

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
def test_trees_may_change_while_shapes_do_not(name: str, recompute: bool, modes: list[str]) -> None:
    """The number of outputs changes, and outputs that needed no gradient may need one later."""
    model = seeded(Flagged, Sum)
    data = [({"x": x, "mode": mode}, y) for (x, y), mode in zip(batches(3), modes, strict=True)]
    state = train(pipeline(model, schedule=name, recompute=recompute), data)
    assert differing(state, plain(model, data)[0]) == []


class Aside(nn.Module):
    """Returns a value of its own parameters that is never read."""

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
def test_outputs_without_a_gradient(name: str, options: dict[str, Any]) -> None:
    """A missing gradient is not zero: AdamW decays only parameters that have a gradient."""
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
    """Its parameters stay unchanged, as in plain training; the chunks after it train."""
    model = nn.Sequential(*linear(3), Detached(), *linear(4, seed=3))
    data = batches(3)
    state = train(pipeline(model, schedule=name, stages=2, optimizer=adamw), data)
    assert torch.equal(state["0.0.weight"], model.state_dict()["0.0.weight"])
    assert differing(state, plain(model, data, optimizer=adamw)[0]) == []


# Inputs of the first chunk


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) * scale)


class Whole(Two):
    """Takes one argument, so it gets the tuple itself."""

    def forward(self, both: tuple[Tensor, Tensor]) -> Tensor:  # type: ignore[override]
        assert type(both) is tuple
        return Two.forward(self, *both)


class ByKey(Two):
    """Takes one argument whose name is no key of the dict, so it gets the dict itself."""

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
    """Including a part without samples: a number that all micro-batches share."""

    def loss_fn(output: Tensor, target: dict[str, Any]) -> Tensor:
        errors: Tensor = functional.mse_loss(output, target["y"], reduction="none").mean(1) * target["w"]
        return errors.mean() * float(target["k"])

    data = [(x, {"y": y, "w": x[:, 0].exp(), "k": 0.5}) for x, y in batches(3)]
    state = train(pipeline(linear(), schedule="zb-h1", loss_fn=loss_fn), data)
    assert differing(state, plain(linear(), data, loss_fn=loss_fn)[0]) == []


# Skip connections


class Down(nn.Module):
    """Pushes its output on a stack, for a chunk that is not its neighbour."""

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
        h, *stack, skipped = given
        return torch.tanh(self.linear(h) + skipped), *stack


class Start(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x,)


def unet() -> nn.Sequential:
    return seeded(Start, Down, Down, Down, Up, Up, Up, First)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("stages", [2, 4])
@pytest.mark.parametrize("name", SYNCHRONOUS)
def test_skip_connections(name: str, stages: int, recompute: bool) -> None:
    """Bit-identical: a skipped value has two readers, and the sum of two gradients does not depend on their order."""
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
    """Trims words to the longest text of the micro-batch: other micro-batches have other lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, padding_idx=0)

    def forward(self, words: Tensor) -> Tensor:
        longest = max(1, int((words != 0).sum(1).max()))
        return torch.as_tensor(self.embedding(words[:, :longest]))


class Pool(nn.Module):
    def forward(self, h: Tensor) -> Tensor:
        return h.mean(1)


def texts() -> nn.Sequential:
    return seeded(Trim, *[Shift] * 6, Pool)


def lengths(sizes: Sequence[int]) -> list[Batch]:
    """A mini-batch of texts of up to each number of words, shorter from micro-batch to micro-batch."""
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
    """As at the end of an epoch, followed by the next epoch; one sample per micro-batch is the minimum."""
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
    """Returns a plain number that differs in every call."""

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
    """Returns values of different types that compare equal in Python."""

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
    """The states after training, by case: all that links have to carry."""
    torch.set_num_threads(1)
    chosen: dict[str, Any] = {"stages": 2 if not torch.distributed.is_initialized() else None}
    states: dict[str, dict[str, Tensor]] = {}
    for name in ("1f1b", "wpipe"):
        made = {
            "texts": (texts(), lengths(GROW_SHRINK_ALTERNATE)),
            "trees": (nested(), batches(4)),
            "skips": (unet(), batches(4)),
        }
        for kind, (model, data) in made.items():
            pipe = pipeline(model, schedule=name, **chosen)
            states[f"{kind}, {name}"] = train(pipe, data)
        held_out = [(numbers(rows, WIDTH, seed=rows), numbers(rows, WIDTH, seed=9)) for rows in (16, 7, 3, 1)]
        states[f"evaluation, {name}"] = {"": torch.tensor(pipe.evaluate(held_out))}
    numbered = seeded(Numbered, Scaled, lambda: nn.Linear(WIDTH, WIDTH))
    pipe = pipeline(numbered, balance=[1, 2], **chosen)
    states["numbers"] = train(pipe, batches(150, rows=4))  # 600 descriptions: more than a link caches
    states["kinds"] = train(pipeline(seeded(Kinds, ByKind), **chosen), batches(4))
    convolutions = seeded(lambda: nn.Conv2d(4, 4, 3, padding=1), lambda: nn.Conv2d(4, 4, 3, padding=1))
    for module in convolutions:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = [(numbers(8, 4, 6, 6, seed=t).to(memory_format=torch.channels_last),) * 2 for t in range(3)]
    states["channels last"] = train(pipeline(convolutions, **chosen), images)
    return states


def test_real_ranks_carry_the_same_messages_as_virtual_ones(launch: Callable[..., list[Any]]) -> None:
    """Messages that grow, shrink and alternate, of all kinds, dtypes and memory formats: bit-identical on every rank.
    (`test_process_transport.py` compares the rest of real and virtual ranks.)"""
    virtual = on_two_ranks()
    for real in launch(on_two_ranks, ranks=2):
        assert {name: differing(real[name], state) for name, state in virtual.items()} == {name: [] for name in virtual}
