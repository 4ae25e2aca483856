"""Weight versions: copied only while something still reads them, never more than needed, invisible to autograd.

The traps: an update between a micro-batch's forward and its backward must change nothing
about the gradient. The obvious alternatives (`param.data = …`) are tested too, and give wrong gradients silently.
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
from weft.runtime.partition import named_tensors
from weft.runtime.weights.parameter_set import ParameterSet
from weft.runtime.weights.versions import RoundedVersions, SharedVersions, Versions
from weft.schedule import Op, lower

SIZE = 4 * 6  # bytes of the parameter below


# Versions


def versions(*, stashes: bool = True) -> Versions:
    return SharedVersions([Parameter(torch.zeros(2, 3))], stashes=stashes)


def advance(weights: Versions) -> None:
    """Make the next version by adding 1 to all values, so that version v is filled with v."""

    def step() -> None:
        weights.live[0].data += 1

    weights.update(step)


def values(weights: Versions, version: int) -> set[float]:
    return set(weights.read(version)[0].detach().flatten().tolist())


def test_a_version_that_is_still_read_is_not_changed() -> None:
    weights = versions()
    leaf = weights.read(0)[0]
    advance(weights)
    assert (values(weights, 0), values(weights, 1)) == ({0}, {1})
    assert weights.read(0)[0] is leaf
    assert leaf._version == 0  # autograd saw no write
    assert weights.extra_bytes == SIZE


def test_a_dead_version_is_overwritten() -> None:
    weights = versions()
    address = weights.live[0].data_ptr()
    for version in range(5):
        assert weights.extra_bytes == 0
        weights.release(version)
        advance(weights)
        assert values(weights, version + 1) == {version + 1}
        assert weights.live[0].data_ptr() == weights.read(version + 1)[0].data_ptr() == address
    with pytest.raises(KeyError):
        weights.read(4)


def test_two_buffers_alternate_under_2bw() -> None:
    """Version v is read until mini-batch v + 1 is done, so it dies after version v + 1 was made."""
    weights = versions()
    addresses = []
    for version in range(20):
        advance(weights)
        assert (values(weights, version), values(weights, version + 1)) == ({version}, {version + 1})
        assert weights.extra_bytes == SIZE
        weights.release(version)
        addresses.append(weights.live[0].data_ptr())
    assert len(set(addresses)) == 2
    assert addresses[:2] * 10 == addresses


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_there_are_as_many_buffers_as_versions_in_use(depth: int) -> None:
    weights = versions()
    for version in range(30):
        advance(weights)
        if version >= depth - 1:
            weights.release(version - depth + 1)
        assert weights.extra_bytes == min(version + 1, depth) * SIZE
        for kept in range(max(0, version - depth + 2), version + 2):
            assert values(weights, kept) == {kept}


def test_versions_may_die_in_any_order() -> None:
    weights = versions()
    for _ in range(4):
        advance(weights)
    for version in (2, 0, 3):
        weights.release(version)
    assert (values(weights, 1), values(weights, 4)) == ({1}, {4})
    buffers = weights.extra_bytes
    for _ in range(3):
        advance(weights)
    assert weights.extra_bytes == buffers == 4 * SIZE  # the three dead buffers were reused
    assert [values(weights, version) for version in (1, 4, 5, 6, 7)] == [{1}, {4}, {5}, {6}, {7}]


def test_a_version_may_be_released_before_it_is_made() -> None:
    """While an update waits for other ranks, the next one may already be due."""
    weights = versions()
    weights.release(0)
    weights.release(1)
    assert values(weights, 0) == {0}
    advance(weights)
    advance(weights)
    assert values(weights, 2) == {2}
    assert weights.extra_bytes == 0


def test_after_a_flush_the_newest_version_is_version_0() -> None:
    weights = versions()
    for _ in range(3):
        advance(weights)
    weights.release(3)  # from before the flush: must not cause an overwrite after it
    buffers = weights.extra_bytes
    weights.restart()
    assert values(weights, 0) == {3}
    assert weights.newest == 0
    with pytest.raises(KeyError):
        weights.read(1)
    for _ in range(3):
        advance(weights)
    assert weights.extra_bytes == buffers  # the same buffers
    advance(weights)
    assert [values(weights, version) for version in range(5)] == [{3}, {4}, {5}, {6}, {7}]


def test_without_stashes_passes_read_the_live_parameters() -> None:
    """A synchronous schedule trains like ordinary code, without a second parameter over the same memory."""
    live = [Parameter(torch.zeros(2, 3))]
    weights = SharedVersions(live, stashes=False)
    assert weights.read(0)[0] is live[0]
    weights.release(0)
    advance(weights)
    assert weights.read(1)[0] is live[0]
    assert weights.extra_bytes == 0


def test_the_optimizer_keeps_its_parameters() -> None:
    live = [Parameter(torch.zeros(2, 3))]
    weights = SharedVersions(live, stashes=True)
    for version in range(6):
        advance(weights)
        if version % 2:
            weights.release(version)
    assert weights.live[0] is live[0]
    assert values(weights, 6) == set(live[0].detach().flatten().tolist())


def test_leaves_have_the_memory_format_of_the_parameters() -> None:
    """A copy in another memory format would be slower, and its elements may be summed in another order."""
    live = [Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)), Parameter(torch.randn(4, 6).T)]
    weights = SharedVersions(live, stashes=True)
    before = [leaf.detach().clone() for leaf in weights.read(0)]
    weights.update(lambda: None)
    for old, new, parameter in zip(before, weights.read(1), live, strict=True):
        assert new.stride() == parameter.stride() == old.stride()
        assert torch.equal(old, new)


# Rounded versions


def rounded_versions() -> RoundedVersions:
    return RoundedVersions([Parameter(torch.zeros(2, 3))], dtypes=[torch.bfloat16])


def test_compute_weights_are_rounded_from_masters_that_stay() -> None:
    weights = rounded_versions()
    master, address = weights.live[0], weights.live[0].data_ptr()
    for version in range(6):
        value = 1 + 0.3 * version

        def step(value: float = value) -> None:
            master.data.fill_(value)

        weights.update(step)
        newest = weights.read(version + 1)[0]
        assert torch.equal(newest.detach(), torch.full((2, 3), value).bfloat16())
        assert newest.dtype == torch.bfloat16
        if version % 2:
            weights.release(version)
    assert (weights.live[0] is master, master.dtype, master.data_ptr()) == (True, torch.float32, address)
    assert (weights.nbytes, weights.master_bytes) == (SIZE // 2, SIZE)


def test_rounded_versions_use_no_more_buffers_than_they_need() -> None:
    """2bw: two, of the size of the compute weights; 1f1b: one, which each update overwrites."""
    weights = rounded_versions()
    old = {id(weights.read(0)[0])}
    for version in range(5):
        advance(weights)
        old.add(id(weights.read(version + 1)[0]))
        weights.release(version)
        assert [values(weights, version + 1)] == [{version + 1}]
    assert (len(old), weights.extra_bytes) == (2, SIZE // 2)
    weights = rounded_versions()
    leaf = weights.read(0)[0]
    for version in range(5):
        weights.release(version)
        advance(weights)
        assert weights.read(version + 1)[0] is leaf
    assert (weights.extra_bytes, leaf._version) == (0, 0)  # autograd saw no write


def test_gradients_of_rounded_leaves_add_up_in_fp32() -> None:
    """In bf16, a small gradient would vanish beside a large one; also in leaves of other versions."""
    weights = rounded_versions()
    for leaves in (weights.read(0), weights.new_leaves()):
        for factor in (256.0, 1.0, 1.0):
            (leaves[0] * factor).sum().backward()  # type: ignore[no-untyped-call]
        assert leaves[0].grad is not None
        assert (leaves[0].grad.dtype, set(leaves[0].grad.flatten().tolist())) == (torch.float32, {258.0})


def test_changed_masters_are_rounded_again() -> None:
    weights = rounded_versions()
    advance(weights)
    weights.live[0].data.fill_(7)
    assert values(weights, 1) == {1}
    weights.refresh()
    assert (values(weights, 0), values(weights, 1)) == ({0}, {7})


def test_an_optimizer_that_replaces_its_tensors() -> None:
    weights = rounded_versions()

    def step() -> None:
        weights.live[0].data = weights.live[0].data + 1

    weights.update(step)
    assert (values(weights, 0), values(weights, 1), weights.live[0].dtype) == ({0}, {1}, torch.float32)


# The number of versions that a program needs


def most_alive(name: str, stages: int, microbatches: int, chunk: int, minibatches: int = 12) -> int:
    """The most versions, besides the newest, that a chunk needs at once, counted from reads alone: a version lives from
    its update to its last read."""
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
    """Versions driven by the lowered schedule, as in the engine: every read finds its version."""
    program = lower(weft.schedule(name, stages=stages, microbatches=microbatches))
    found = []
    for chunk, rank in enumerate(program.schedule.placement):
        weights = versions(stashes=most_alive(name, stages, microbatches, chunk) > 0)
        most = 0
        for step in program.steps(rank, minibatches=12):
            if step.action.chunk != chunk:
                continue
            if step.action.op == Op.U:
                if step.dies:
                    weights.release(step.version - 1)
                advance(weights)
                most = max(most, weights.extra_bytes)
            else:
                assert values(weights, step.version) == {step.version}
                if step.dies:
                    weights.release(step.version)
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
    """One parameter used as embedding and as output layer."""

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
    """Reads its weights twice in one forward."""

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
    """As in a chunk: each parameter once, with all its places."""
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
    """The gradients of plain PyTorch, with nothing between forward and backward."""
    module = copy.deepcopy(module)
    given = given.detach().clone().requires_grad_(given.requires_grad)
    torch.autograd.backward(weigh(module(given)))
    return [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None], given.grad


def push(module: nn.Module) -> list[Tensor]:
    """Gradients that change every weight by a lot."""
    torch.manual_seed(4)
    return [torch.randn_like(parameter) for parameter in module.parameters()]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", TRAPS)
def test_an_update_between_forward_and_backward_changes_nothing(name: str, optimizer: str) -> None:
    """Makes two updates: the second overwrites no version in use either. A later micro-batch at the newest weights
    then has to see them."""
    module, (given, other, _) = made(name)
    expected = gradients_at_old_weights(module, given)
    moves = push(module)
    parameters = parameter_set(module, optimizer)
    parameters.install(parameters.versions.read(0))
    loss = weigh(module(given))
    for _ in range(2):
        parameters.update([move.clone() for move in moves])
    parameters.collect(parameters.versions.read(0))
    torch.autograd.backward(loss)
    found = [gradient for gradient in parameters.take_gradients() if gradient is not None]
    assert len(found) == len(expected[0]) == len(moves)
    for gradient, right in zip(found, expected[0], strict=True):
        assert torch.equal(gradient, right)
    if expected[1] is not None and given.grad is not None:
        assert torch.equal(given.grad, expected[1])
    # a micro-batch at the newest weights
    parameters.install(parameters.versions.read(2))
    now = gradients_at_old_weights(module, other)
    parameters.collect(parameters.versions.read(2))
    torch.autograd.backward(weigh(module(other)))
    for newer, right in zip(parameters.take_gradients(), now[0], strict=True):
        assert newer is not None
        assert torch.equal(newer, right)
    assert not all(torch.equal(a, b) for a, b in zip(now[0], gradients_at_old_weights(module, given)[0], strict=True))


def swap_data(module: nn.Module) -> None:
    for parameter, move in zip(module.parameters(), push(module), strict=True):
        parameter.data = parameter.data - 0.5 * move


def write_in_place(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter, move in zip(module.parameters(), push(module), strict=True):
            parameter.sub_(0.5 * move)


def write_data(module: nn.Module) -> None:
    for parameter, move in zip(module.parameters(), push(module), strict=True):
        parameter.data.sub_(0.5 * move)


SWAPS = {"Conv2d", "LayerNorm", "BatchNorm", "TransformerEncoderLayer"}  # their backward reads the new weights


@pytest.mark.parametrize("name", TRAPS)
def test_writing_to_parameters_directly_is_wrong(name: str) -> None:
    """The control, which shows that the test above can fail: autograd never notices a write through `.data`, and all
    these modules get wrong gradients; swapping `.data` breaks some of them; PyTorch refuses writes in place."""
    module, (given, _, _) = made(name)
    right = gradients_at_old_weights(module, given)

    def found(change: Callable[[nn.Module], None]) -> tuple[list[Tensor], Tensor | None]:
        changed = copy.deepcopy(module)
        inputs = given.detach().clone().requires_grad_(given.requires_grad)
        loss = weigh(changed(inputs))
        change(changed)
        torch.autograd.backward(loss)
        return [parameter.grad for parameter in changed.parameters() if parameter.grad is not None], inputs.grad

    def differs(wrong: tuple[list[Tensor], Tensor | None]) -> bool:
        both = [*zip(wrong[0], right[0], strict=True)]
        if wrong[1] is not None and right[1] is not None:
            both.append((wrong[1], right[1]))
        return any(not torch.allclose(a, b, rtol=1e-3) for a, b in both)

    assert not differs(found(lambda module: None))
    assert differs(found(write_data))
    if name in SWAPS:  # others may see the old weights: that depends on what each operation saves
        assert differs(found(swap_data))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        found(write_in_place)


# Parameter sets


@pytest.mark.parametrize("name", ["two Linears", "tied", "LSTM", "weight_norm"])
def test_gradients_of_several_versions_are_summed(name: str) -> None:
    """Micro-batches of a mini-batch may read different versions (PipeDream): summed in order, as autograd does."""
    module, batches = made(name)
    parameters = parameter_set(module)
    losses, expected = [], []
    for version, given in enumerate(batches):
        parameters.install(parameters.versions.read(version))
        expected.append(gradients_at_old_weights(module, given)[0])
        losses.append(weigh(module(given)))
        parameters.update([*push(module)])
    for version, loss in enumerate(losses):
        parameters.collect(parameters.versions.read(version))
        torch.autograd.backward(loss)
    assert parameters.gradient_bytes == sum(tensor.nbytes for tensor in expected[0])
    found = parameters.take_gradients()
    for gradient, parts in zip(found, zip(*expected, strict=True), strict=True):
        assert gradient is not None
        assert torch.equal(gradient, parts[0] + parts[1] + parts[2])
    assert parameters.gradient_bytes == 0
    assert parameters.take_gradients() == [None] * len(found)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stashes", [False, True])
def test_updates_match_plain_training(optimizer: str, stashes: bool) -> None:
    """Five updates, with and without copies, give the weights of plain training."""
    module, _ = made("two Linears")
    plain = copy.deepcopy(module)
    reference = OPTIMIZERS[optimizer](list(plain.parameters()))
    parameters = parameter_set(module, optimizer, stashes=stashes)
    for number in range(5):
        moves = [(number + 1) * move for move in push(plain)]
        for parameter, move in zip(plain.parameters(), moves, strict=True):
            parameter.grad = move.clone()
        reference.step()
        if not stashes or number == 3:
            parameters.versions.release(number)
        parameters.update([move.clone() for move in moves])
    parameters.install(parameters.versions.read(5))
    for parameter, right in zip(module.parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter, right)
    assert parameters.versions.extra_bytes == (4 if stashes else 0) * parameters.versions.nbytes
    state = sum(t.nbytes for s in reference.state.values() for t in s.values() if isinstance(t, Tensor))
    assert parameters.optimizer_bytes == state
    assert (state > 0) == (optimizer != "sgd")


def test_install_reaches_every_place_of_a_parameter() -> None:
    """Parameters tied inside a chunk, and recurrent cells that keep lists of their weights."""
    module, _ = made("tied")
    assert isinstance(module, Tied)
    parameters = parameter_set(module)
    parameters.update([*push(module)])
    assert len(parameters.versions.live) == 1
    for version in (1, 0, 1):
        parameters.install(parameters.versions.read(version))
        assert module.embedding.weight is module.output.weight is parameters.versions.read(version)[0]
    recurrent, _ = made("LSTM")
    assert isinstance(recurrent, Recurrent)
    cells = parameter_set(recurrent)
    cells.update([*push(recurrent)])
    cells.install(cells.versions.read(1))
    assert {id(weight) for weight in recurrent.cells._flat_weights} == {id(leaf) for leaf in cells.versions.read(1)}


def test_a_skipped_update_repeats_the_last_version() -> None:
    module, _ = made("Linear")
    rates: list[torch.optim.lr_scheduler.LRScheduler] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        rates.append(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        return rates[0]

    parameters = parameter_set(module, "foreach", lr_scheduler=scheduler)
    before = [leaf.detach().clone() for leaf in parameters.versions.read(0)]
    parameters.skip()
    assert parameters.versions.newest == 1
    assert all(torch.equal(a, b) for a, b in zip(before, parameters.versions.read(1), strict=True))
    assert rates[0].get_last_lr() == [0.5]
    assert parameters.optimizer is not None
    assert not parameters.optimizer.state
    parameters.update([*push(module)])
    assert rates[0].get_last_lr() == [0.25]
    assert not any(torch.equal(a, b) for a, b in zip(before, parameters.versions.read(2), strict=True))


def test_a_flush_leaves_the_newest_weights_in_the_modules() -> None:
    module, _ = made("two Linears")
    parameters = parameter_set(module)
    parameters.update([*push(module)])
    parameters.install(parameters.versions.read(0))
    parameters.restart()
    for parameter, live in zip(module.parameters(), parameters.versions.live, strict=True):
        assert parameter.data_ptr() == live.data_ptr()
    assert parameters.versions.newest == 0


def test_missing_gradients_stay_missing() -> None:
    """As in plain training, an optimizer does not update parameters that no loss depends on."""
    module = nn.ModuleDict({"used": nn.Linear(8, 8), "unused": nn.Linear(8, 8)})
    parameters = parameter_set(module, "foreach")
    before = module["unused"].get_parameter("weight").detach().clone()
    parameters.collect(parameters.versions.read(0))
    torch.autograd.backward(weigh(module["used"](rows())))
    gradients = parameters.take_gradients()
    assert [gradient is None for gradient in gradients] == [False, False, True, True]
    parameters.update(gradients)
    parameters.install(parameters.versions.read(1))
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
def test_unsupported_optimizers_are_refused(make: Callable[[list[Parameter]], Any], words: str) -> None:
    layer = nn.Linear(8, 8)
    with pytest.raises(WeftError, match=words):
        ParameterSet(
            names=["weight", "bias"],
            places=[[(layer, "weight")], [(layer, "bias")]],
            stashes=True,
            optimizer=make,
            lr_scheduler=None,
        )
