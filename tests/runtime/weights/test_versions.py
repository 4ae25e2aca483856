"""Weight versions: copied only when something still reads them, never one too many, and invisible to autograd.

DESIGN section 4 names the traps: an update between a micro-batch's forward and its backward must change nothing
about the gradient. The same done the easy way (`param.data = …`) is tried too, and gives wrong gradients silently.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter

import weft
from weft.errors import WeftError
from weft.runtime.partition.layers import named_tensors
from weft.runtime.weights.parameter_set import ParameterSet
from weft.runtime.weights.versions import Versions
from weft.schedule import Op, lower

SIZE = 4 * 6  # bytes of the one parameter below


# Versions alone


def versions(*, stashes: bool = True) -> Versions:
    return Versions([Parameter(torch.zeros(2, 3))], stashes=stashes)


def advance(one: Versions) -> None:
    """Make the next version: all values one larger, so that version v is filled with v."""

    def step() -> None:
        one.live[0].data += 1

    one.update(step)


def values(one: Versions, version: int) -> set[float]:
    return set(one.read(version)[0].detach().flatten().tolist())


def test_a_version_that_is_still_read_is_left_alone() -> None:
    one = versions()
    leaf = one.read(0)[0]
    advance(one)
    assert (values(one, 0), values(one, 1)) == ({0}, {1})
    assert one.read(0)[0] is leaf
    assert leaf._version == 0  # autograd sees no write
    assert one.extra_bytes == SIZE


def test_a_version_that_is_dead_is_written_over() -> None:
    one = versions()
    address = one.live[0].data_ptr()
    for version in range(5):
        assert one.extra_bytes == 0
        one.release(version)
        advance(one)
        assert values(one, version + 1) == {version + 1}
        assert one.live[0].data_ptr() == one.read(version + 1)[0].data_ptr() == address
    with pytest.raises(KeyError):
        one.read(4)


def test_two_buffers_take_turns_under_2bw() -> None:
    """Version v is read until mini-batch v + 1 is done, so it dies after version v + 1 was made."""
    one = versions()
    addresses = []
    for version in range(20):
        advance(one)
        assert (values(one, version), values(one, version + 1)) == ({version}, {version + 1})
        assert one.extra_bytes == SIZE
        one.release(version)
        addresses.append(one.live[0].data_ptr())
    assert len(set(addresses)) == 2
    assert addresses[:2] * 10 == addresses


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_as_many_buffers_as_versions_are_read_at_once(depth: int) -> None:
    one = versions()
    for version in range(30):
        advance(one)
        if version >= depth - 1:
            one.release(version - depth + 1)
        assert one.extra_bytes == min(version + 1, depth) * SIZE
        for kept in range(max(0, version - depth + 2), version + 2):
            assert values(one, kept) == {kept}


def test_versions_may_die_in_any_order() -> None:
    one = versions()
    for _ in range(4):
        advance(one)
    for version in (2, 0, 3):
        one.release(version)
    assert (values(one, 1), values(one, 4)) == ({1}, {4})
    buffers = one.extra_bytes
    for _ in range(3):
        advance(one)
    assert one.extra_bytes == buffers == 4 * SIZE  # the three dead ones have served again
    assert [values(one, version) for version in (1, 4, 5, 6, 7)] == [{1}, {4}, {5}, {6}, {7}]


def test_a_version_may_be_released_before_it_is_made() -> None:
    """An update that waits for other ranks is due, and the next one too, before it is made."""
    one = versions()
    one.release(0)
    one.release(1)
    assert values(one, 0) == {0}
    advance(one)
    advance(one)
    assert values(one, 2) == {2}
    assert one.extra_bytes == 0


def test_after_a_flush_the_newest_version_is_version_0() -> None:
    one = versions()
    for _ in range(3):
        advance(one)
    one.release(3)  # of the run before the flush: it must not let anything be overwritten after it
    held = one.extra_bytes
    one.restart()
    assert values(one, 0) == {3}
    assert one.newest == 0
    with pytest.raises(KeyError):
        one.read(1)
    for _ in range(3):
        advance(one)
    assert one.extra_bytes == held  # the buffers of before
    advance(one)
    assert [values(one, version) for version in range(5)] == [{3}, {4}, {5}, {6}, {7}]


def test_without_stashes_passes_read_the_live_parameters() -> None:
    """A synchronous schedule trains as ordinary code does, without a second parameter over the same memory."""
    live = [Parameter(torch.zeros(2, 3))]
    one = Versions(live, stashes=False)
    assert one.read(0)[0] is live[0]
    one.release(0)
    advance(one)
    assert one.read(1)[0] is live[0]
    assert one.extra_bytes == 0


def test_the_optimizer_keeps_its_parameters_for_good() -> None:
    live = [Parameter(torch.zeros(2, 3))]
    one = Versions(live, stashes=True)
    for version in range(6):
        advance(one)
        if version % 2:
            one.release(version)
    assert one.live[0] is live[0]
    assert values(one, 6) == set(live[0].detach().flatten().tolist())


def test_leaves_are_laid_out_as_the_parameters_are() -> None:
    """A copy in another order of memory would be slower, and may be added up in another order."""
    live = [Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)), Parameter(torch.randn(4, 6).T)]
    one = Versions(live, stashes=True)
    before = [leaf.detach().clone() for leaf in one.read(0)]
    one.update(lambda: None)
    for old, new, live_one in zip(before, one.read(1), live, strict=True):
        assert new.stride() == live_one.stride() == old.stride()
        assert torch.equal(old, new)


# As many as the program says


def most_alive(name: str, stages: int, microbatches: int, chunk: int, minibatches: int = 12) -> int:
    """Versions beside the newest one that a chunk needs at once, counted from reads alone: a version lives from its
    update to its last read."""
    program = lower(weft.schedule(name, stages=stages, microbatches=microbatches))
    rank = program.schedule.placement[chunk]
    steps = [s for s in program.steps(rank, minibatches=minibatches) if s.action.chunk == chunk]
    last = {step.version: place for place, step in enumerate(steps) if step.action.op != Op.U}
    alive, most = {0}, 1
    for place, step in enumerate(steps):
        if step.action.op == Op.U:
            alive = {version for version in alive if last.get(version, -1) > place} | {step.version}
            most = max(most, len(alive))
    return most - 1


@pytest.mark.parametrize(
    ("name", "stages", "microbatches"),
    [("1f1b", 4, 4), ("zb-h1", 4, 4), ("2bw", 4, 4), ("wpipe", 2, 4), ("pipedream", 4, 1), ("pipedream", 4, 4)],
)
def test_a_chunk_holds_what_its_program_needs_and_no_more(name: str, stages: int, microbatches: int) -> None:
    """Versions driven by the lowered schedule, as the engine does it: every read finds its version."""
    program = lower(weft.schedule(name, stages=stages, microbatches=microbatches))
    found = []
    for chunk, rank in enumerate(program.schedule.placement):
        one = versions(stashes=most_alive(name, stages, microbatches, chunk) > 0)
        most = 0
        for step in program.steps(rank, minibatches=12):
            if step.action.chunk != chunk:
                continue
            if step.action.op == Op.U:
                if step.dies:
                    one.release(step.version - 1)
                advance(one)
                most = max(most, one.extra_bytes)
            else:
                assert values(one, step.version) == {step.version}
                if step.dies:
                    one.release(step.version)
        found.append(most // SIZE)
    assert found == [most_alive(name, stages, microbatches, chunk) for chunk in range(program.schedule.chunks)]
    assert (
        found
        == {
            ("1f1b", 4): [0] * 4,
            ("zb-h1", 4): [0] * 4,
            ("2bw", 4): [1] * 4,
            ("wpipe", 4): [1, 1, 0, 0],
            ("pipedream", 1): [3, 2, 1, 0],
            ("pipedream", 4): [1, 1, 1, 0],
        }[name, microbatches]
    )


# The traps: forward, update, backward


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.heads(x, x, x, need_weights=False)[0]
        return mixed


class Tied(nn.Module):
    """One parameter as embedding and as output layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 8)
        self.output = nn.Linear(8, 8, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.output(torch.tanh(self.embedding(x)))
        return logits


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.cells = kind(8, 8, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.cells(x)[0]
        return hidden


def normed(layer: nn.Module) -> nn.Module:
    changed: nn.Module = nn.utils.parametrizations.weight_norm(layer)
    return changed


def words() -> Tensor:
    return torch.randint(8, (3, 5))


def rows() -> Tensor:
    return torch.randn(3, 5, 8, requires_grad=True)


def images() -> Tensor:
    return torch.randn(3, 4, 6, 6, requires_grad=True)


TRAPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "Linear": (lambda: nn.Linear(8, 8), rows),
    "two Linears": (lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)), rows),
    "Conv2d": (lambda: nn.Conv2d(4, 4, 3), images),
    "LayerNorm": (lambda: nn.LayerNorm(8), rows),
    "BatchNorm": (lambda: nn.BatchNorm2d(4), images),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(8, 8), nn.Tanh(), nn.Linear(8, 8)), words),
    "MultiheadAttention": (Attention, rows),
    "TransformerEncoderLayer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), rows),
    "tied": (Tied, words),
    "LSTM": (lambda: Recurrent(nn.LSTM), rows),
    "GRU": (lambda: Recurrent(nn.GRU), rows),
    "weight_norm": (lambda: normed(nn.Linear(8, 8)), rows),
    "PReLU": (lambda: nn.PReLU(4), images),
    "Bilinear": (lambda: nn.Sequential(Twice(), nn.Linear(8, 8)), rows),
}


class Twice(nn.Module):
    """Reads its weights in two ways in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bilinear = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        twice: Tensor = self.bilinear(x, x.sigmoid()) * self.bilinear.weight.mean()
        return twice


OPTIMIZERS: dict[str, Callable[[list[Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.5),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.5, foreach=True),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.5, fused=True),
    "single": lambda params: torch.optim.Adam(params, lr=0.5, foreach=False),
}


def made(name: str) -> tuple[nn.Module, list[Tensor]]:
    """A module and three micro-batches."""
    torch.manual_seed(3)
    build, batch = TRAPS[name]
    module = build()
    return module, [batch() for _ in range(3)]


def parameter_set(module: nn.Module, optimizer: str = "sgd", *, stashes: bool = True, **options: Any) -> ParameterSet:
    """As a chunk has it: a parameter once, with all its places."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for owner, name, tensor in named_tensors(module):
        if isinstance(tensor, Parameter):
            found.setdefault(id(tensor), []).append((owner, name))
    return ParameterSet(
        names=[places[0][1] for places in found.values()],
        places=list(found.values()),
        stashes=stashes,
        optimizer=OPTIMIZERS[optimizer],
        lr_scheduler=options.get("lr_scheduler"),
    )


def weigh(output: Tensor) -> Tensor:
    """A loss that differs from element to element, so that no gradient vanishes by symmetry (as after BatchNorm)."""
    return (output.flatten() * torch.linspace(-1, 2, output.numel())).sum() + output.square().sum()


def gradients_at_old_weights(module: nn.Module, given: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """What plain PyTorch computes when nothing comes between forward and backward."""
    module = copy.deepcopy(module)
    given = given.detach().clone().requires_grad_(given.requires_grad)
    torch.autograd.backward(weigh(module(given)))
    return [one.grad.clone() for one in module.parameters() if one.grad is not None], given.grad


def push(module: nn.Module) -> list[Tensor]:
    """Gradients that move every weight far."""
    torch.manual_seed(4)
    return [torch.randn_like(one) for one in module.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", TRAPS)
def test_an_update_between_forward_and_backward_changes_nothing(name: str, optimizer: str) -> None:
    """Two updates in fact: the second one writes over no version that is read either. Then a micro-batch at the
    newest weights, which has to see them."""
    module, (given, other, _) = made(name)
    expected = gradients_at_old_weights(module, given)
    moves = push(module)
    one = parameter_set(module, optimizer)
    one.install(one.versions.read(0))
    loss = weigh(module(given))
    for _ in range(2):
        one.update([move.clone() for move in moves])
    one.collect(one.versions.read(0))
    torch.autograd.backward(loss)
    found = [gradient for gradient in one.take_gradients() if gradient is not None]
    assert len(found) == len(expected[0]) == len(moves)
    for gradient, right in zip(found, expected[0], strict=True):
        assert torch.equal(gradient, right)
    if expected[1] is not None and given.grad is not None:
        assert torch.equal(given.grad, expected[1])
    # and afterwards
    one.install(one.versions.read(2))
    now = gradients_at_old_weights(module, other)
    one.collect(one.versions.read(2))
    torch.autograd.backward(weigh(module(other)))
    for newer, right in zip(one.take_gradients(), now[0], strict=True):
        assert newer is not None
        assert torch.equal(newer, right)
    assert not all(torch.equal(a, b) for a, b in zip(now[0], gradients_at_old_weights(module, given)[0], strict=True))


def swap_data(module: nn.Module) -> None:
    for one, move in zip(module.parameters(), push(module), strict=True):
        one.data = one.data - 0.5 * move


def write_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        for one, move in zip(module.parameters(), push(module), strict=True):
            one.sub_(0.5 * move)


def write_data(module: nn.Module) -> None:
    for one, move in zip(module.parameters(), push(module), strict=True):
        one.data.sub_(0.5 * move)


SWAPS = {"Conv2d", "LayerNorm", "BatchNorm", "TransformerEncoderLayer"}  # that read the new weights in the backward


@pytest.mark.parametrize("name", TRAPS)
def test_the_easy_ways_are_wrong(name: str) -> None:
    """The control: writing through `.data` is never noticed by autograd and gives wrong gradients for every one of
    these modules; swapping `.data` does so for some; writing in place is refused. So the test above can fail."""
    module, (given, _, _) = made(name)
    right = gradients_at_old_weights(module, given)

    def found(change: Callable[[nn.Module], None]) -> tuple[list[Tensor], Tensor | None]:
        mine = copy.deepcopy(module)
        own = given.detach().clone().requires_grad_(given.requires_grad)
        loss = weigh(mine(own))
        change(mine)
        torch.autograd.backward(loss)
        return [one.grad for one in mine.parameters() if one.grad is not None], own.grad

    def differs(wrong: tuple[list[Tensor], Tensor | None]) -> bool:
        both = [*zip(wrong[0], right[0], strict=True)]
        if wrong[1] is not None and right[1] is not None:
            both.append((wrong[1], right[1]))
        return any(not torch.allclose(a, b, rtol=1e-3) for a, b in both)

    assert not differs(found(lambda module: None))
    assert differs(found(write_data))
    if name in SWAPS:  # others may see the old ones, which depends on what each operation saves
        assert differs(found(swap_data))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found(write_in_place)


# Parameter sets


@pytest.mark.parametrize("name", ["two Linears", "tied", "LSTM", "weight_norm"])
def test_gradients_of_several_versions_are_summed(name: str) -> None:
    """Micro-batches of one mini-batch may read different versions (PipeDream): in order, added as autograd adds."""
    module, batches = made(name)
    one = parameter_set(module)
    losses, expected = [], []
    for version, given in enumerate(batches):
        one.install(one.versions.read(version))
        expected.append(gradients_at_old_weights(module, given)[0])
        losses.append(weigh(module(given)))
        one.update([*push(module)])
    for version, loss in enumerate(losses):
        one.collect(one.versions.read(version))
        torch.autograd.backward(loss)
    assert one.gradient_bytes == sum(tensor.nbytes for tensor in expected[0])
    found = one.take_gradients()
    for gradient, parts in zip(found, zip(*expected, strict=True), strict=True):
        assert gradient is not None
        assert torch.equal(gradient, parts[0] + parts[1] + parts[2])
    assert one.gradient_bytes == 0
    assert one.take_gradients() == [None] * len(found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stashes", [False, True])
def test_updates_are_the_optimizers_own(optimizer: str, stashes: bool) -> None:
    """With and without a copy in between: after five updates, the weights of plain training."""
    module, _ = made("two Linears")
    plain = copy.deepcopy(module)
    theirs = OPTIMIZERS[optimizer](list(plain.parameters()))
    one = parameter_set(module, optimizer, stashes=stashes)
    for number in range(5):
        moves = [(number + 1) * move for move in push(plain)]
        for parameter, move in zip(plain.parameters(), moves, strict=True):
            parameter.grad = move.clone()
        theirs.step()
        if not stashes or number == 3:
            one.versions.release(number)
        one.update([move.clone() for move in moves])
    one.install(one.versions.read(5))
    for mine, right in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, right)
    assert one.versions.extra_bytes == (4 if stashes else 0) * one.versions.nbytes
    state = sum(t.nbytes for s in theirs.state.values() for t in s.values() if isinstance(t, Tensor))
    assert one.optimizer_bytes == state
    assert (state > 0) == (optimizer != "sgd")


def test_install_reaches_every_place_of_a_parameter() -> None:
    """Tied inside a chunk, and cells that keep lists of their weights."""
    module, _ = made("tied")
    assert isinstance(module, Tied)
    one = parameter_set(module)
    one.update([*push(module)])
    assert len(one.versions.live) == 1
    for version in (1, 0, 1):
        one.install(one.versions.read(version))
        assert module.embedding.weight is module.output.weight is one.versions.read(version)[0]
    recurrent, _ = made("LSTM")
    assert isinstance(recurrent, Recurrent)
    two = parameter_set(recurrent)
    two.update([*push(recurrent)])
    two.install(two.versions.read(1))
    assert {id(weight) for weight in recurrent.cells._flat_weights} == {id(leaf) for leaf in two.versions.read(1)}


def test_a_skipped_update_is_a_version_like_the_last() -> None:
    module, _ = made("Linear")
    rates: list[torch.optim.lr_scheduler.LRScheduler] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        rates.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return rates[0]

    one = parameter_set(module, "foreach", lr_scheduler=scheduler)
    before = [leaf.detach().clone() for leaf in one.versions.read(0)]
    one.skip()
    assert one.versions.newest == 1
    assert all(torch.equal(a, b) for a, b in zip(before, one.versions.read(1), strict=True))
    assert rates[0].get_last_lr() == [0.5]
    assert one.optimizer is not None
    assert not one.optimizer.state
    one.update([*push(module)])
    assert rates[0].get_last_lr() == [0.25]
    assert not any(torch.equal(a, b) for a, b in zip(before, one.versions.read(2), strict=True))


def test_a_flush_leaves_the_newest_weights_in_the_modules() -> None:
    module, _ = made("two Linears")
    one = parameter_set(module)
    one.update([*push(module)])
    one.install(one.versions.read(0))
    one.restart()
    for mine, live in zip(module.parameters(), one.versions.live, strict=True):
        assert mine.data_ptr() == live.data_ptr()
    assert one.versions.newest == 0


def test_gradients_that_are_missing_stay_missing() -> None:
    """As in plain training, an optimizer leaves alone what no loss depends on."""
    module = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    one = parameter_set(module, "foreach")
    before = module["unused"].get_parameter("weight").detach().clone()
    one.collect(one.versions.read(0))
    torch.autograd.backward(weigh(module["used"](rows())))
    gradients = one.take_gradients()
    assert [gradient is None for gradient in gradients] == [False, False, True, True]
    one.update(gradients)
    one.install(one.versions.read(1))
    assert torch.equal(module["unused"].get_parameter("weight"), before)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda params: None, "got NoneType from it"),
        (lambda params: torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), "given: 2, held: 2"),
        (lambda params: torch.optim.SGD(params[:1], lr=0.1), "given: 2, held: 1"),
        (lambda params: torch.optim.LBFGS(params), "LBFGS computes the loss again"),
    ],
    ids=["none", "others", "some", "lbfgs"],
)
def test_optimizers_that_can_not_be_are_refused(make: Callable[[list[Parameter]], Any], words: str) -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(WeftError, match=words):
        ParameterSet(
            names=["weight", "bias"],
            places=[[(layer, "weight")], [(layer, "bias")]],
            stashes=True,
            optimizer=make,
            lr_scheduler=None,
        )
