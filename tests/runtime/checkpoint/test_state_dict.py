"""The state dict of a pipeline has the names and tensors of the plain model, including ties, and can be loaded."""

import copy
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.models import ASYNCHRONOUS, BALANCE, SYNCHRONOUS, batches, build, loss_fn
from tests.helpers.pairwise import parametrize_product
from torch import Tensor, nn

import weft
from weft.errors import RunError, WeftError
from weft.runtime.checkpoint import model_state
from weft.runtime.weights.parameter_set import ParameterSet

SCHEDULES = [*SYNCHRONOUS, *ASYNCHRONOUS]
State = dict[str, Tensor]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def pipeline(model: Any, *, schedule: str = "1f1b", stages: int | None = 2, **options: Any) -> weft.Pipeline:
    chosen: dict[str, Any] = {"loss_fn": loss_fn, "optimizer": sgd, "microbatches": 4} | options
    return weft.Pipeline(model, schedule=schedule, stages=stages, **chosen)


def trained(name: str, schedule: str, *, stages: int = 2, steps: int = 5, **options: Any) -> weft.Pipeline:
    """A pipeline after some steps, without a flush."""
    chunks = stages * (2 if schedule in ("interleaved", "wpipe") else 1)
    pipe = pipeline(build(name), schedule=schedule, stages=stages, balance=BALANCE[chunks], **options)
    for batch in batches(name, steps):
        pipe.step(*batch)
    return pipe


def equal(found: State, expected: State) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in found)


# Names


@pytest.mark.parametrize("name", ["mlp", "conv", "transformer"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_plain_model_loads_the_state(schedule: str, name: str) -> None:
    """Strictly, with buffers and tied names, in the order of the model; it then evaluates like the pipeline."""
    pipe = trained(name, schedule)
    state = pipe.state_dict()
    model = build(name)
    assert list(state) == list(model.state_dict())
    assert [(tensor.dtype, tensor.shape) for tensor in state.values()] == [
        (tensor.dtype, tensor.shape) for tensor in model.state_dict().values()
    ]
    model.load_state_dict(state, strict=True)
    batch = batches(name, 6)[5]
    with torch.no_grad():
        assert loss_fn(model.eval()(batch[0]), batch[1]).item() == pytest.approx(pipe.evaluate([batch]), rel=1e-6)


def test_buffers_are_the_newest() -> None:
    """Statistics have seen every micro-batch once, even with recompute."""
    for recompute in (False, True):
        state = trained("conv", "wpipe", steps=5, recompute=recompute).state_dict()
        assert state["1.num_batches_tracked"] == state["3.num_batches_tracked"] == 5 * 4
        assert not torch.equal(state["1.running_mean"], torch.zeros(4))


class Odd(nn.Module):
    """Has a buffer that is not saved, and parameters that its forward does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passing", torch.ones(16), persistent=False)
        self.register_buffer("lasting", torch.ones(16))
        self.idle = nn.Linear(16, 2)
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.linear(x) * self.passing * self.lasting)


def test_unsaved_buffers_and_unused_parameters() -> None:
    model = nn.Sequential(*(Odd() for _ in range(4)))
    pipe = pipeline(copy.deepcopy(model))
    for batch in batches("mlp", 2):
        pipe.step(*batch)
    state = pipe.state_dict()
    model.load_state_dict(state, strict=True)
    assert not any("passing" in name for name in state)


def test_layers_of_a_list_are_named_by_number() -> None:
    layers = [nn.Linear(16, 16) for _ in range(3)]
    assert list(pipeline(layers).state_dict()) == [f"{n}.{what}" for n in range(3) for what in ("weight", "bias")]
    assert list(pipeline(nn.ModuleList(layers)).state_dict()) == list(nn.ModuleList(layers).state_dict())


class Cut(nn.Module):
    """Has tensors that no layer uses, and one parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused, self.last = nn.Linear(16, 16), nn.Linear(3, 3), nn.Linear(16, 16)
        self.last.weight = self.first.weight
        self.register_buffer("scale", torch.full((16,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        weft.cut()
        return torch.as_tensor(self.last(h) * self.scale)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_model_with_cuts_keeps_its_names(schedule: str) -> None:
    """The state includes unchanged tensors that no layer uses, and loading changes them too."""
    model = Cut()
    before = copy.deepcopy(model.state_dict())
    pipe = pipeline(copy.deepcopy(model), schedule=schedule, example=torch.zeros(2, 16))
    for batch in batches("mlp", 3):
        pipe.step(*batch)
    state = pipe.state_dict()
    assert list(state) == list(before)
    assert torch.equal(state["first.weight"], state["last.weight"])
    assert not torch.equal(state["first.weight"], before["first.weight"])
    assert torch.equal(state["unused.weight"], before["unused.weight"])
    model.load_state_dict(state, strict=True)
    other = {name: tensor + 1 for name, tensor in state.items()}
    pipe.load_state_dict(other)
    assert equal(pipe.state_dict(), other)


# Flushing


@pytest.mark.parametrize("schedule", ASYNCHRONOUS)
def test_reading_the_state_flushes(schedule: str) -> None:
    """All mini-batches are in the state, with or without an explicit flush; a returned state does not change later."""
    asked, flushed = trained("mlp", schedule, stages=4), trained("mlp", schedule, stages=4)
    flushed.flush()
    state = asked.state_dict()
    assert equal(state, flushed.state_dict())
    kept = copy.deepcopy(state)
    for pipe in (asked, flushed):
        for batch in batches("mlp", 3):
            pipe.step(*batch)
    assert equal(state, kept)
    assert equal(asked.state_dict(), flushed.state_dict())
    assert not equal(asked.state_dict(), kept)


def test_writing_to_a_returned_state_changes_nothing() -> None:
    pipe = trained("transformer", "wpipe")
    state = pipe.state_dict()
    kept = copy.deepcopy(state)
    for tensor in state.values():
        tensor.zero_()
    assert equal(pipe.state_dict(), kept)


# Loading


@pytest.mark.parametrize("name", ["conv", "transformer"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_loading_restores_the_weights(schedule: str, name: str) -> None:
    """In a pipeline with mini-batches in flight, into all versions, copies of tied weights and replicas: with a
    stateless optimizer, it then trains like a new pipeline that loads the same state."""
    options: dict[str, Any] = {"replicas": 2, "microbatches": 4} if name == "transformer" else {}
    pipe = trained(name, schedule, **options)
    state = pipe.state_dict()
    new = trained(name, schedule, steps=0, **options)
    new.load_state_dict(copy.deepcopy(state))
    assert equal(new.state_dict(), state)
    for batch in batches(name, 3):
        pipe.step(*batch)
    pipe.step(*batches(name, 1)[0])  # in flight
    pipe.load_state_dict(state)
    assert equal(pipe.state_dict(), state)
    for trains in (pipe, new):
        for batch in batches(name, 4):
            trains.step(*batch)
    assert equal(pipe.state_dict(), new.state_dict())


@pytest.mark.parametrize(("source", "target"), [("wpipe", "1f1b"), ("gpipe", "pipedream")])
def test_loading_on_another_number_of_stages(source: str, target: str) -> None:
    state = trained("transformer", source, stages=2).state_dict()
    pipe = trained("transformer", target, stages=4, steps=2)
    pipe.load_state_dict(state)
    assert equal(pipe.state_dict(), state)


def test_a_plain_models_state_can_be_loaded() -> None:
    model = build("transformer")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    pipe = trained("transformer", "wpipe")
    pipe.load_state_dict(model.state_dict())
    assert equal(pipe.state_dict(), dict(model.state_dict()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("3.0.weight"), r"has no 3\.0\.weight \(missing: 1\); give the whole model's"),
        (lambda state: state.clear(), r"has no 0\.0\.weight \(missing: 16\); give"),
        (lambda state: state.update(extra=torch.zeros(1)), r"model has no extra \(unknown: 1\); give this model's"),
        (
            lambda state: state.update({"0.0.bias": torch.zeros(3)}),
            r"0\.0\.bias has another shape \(model: \(16,\), state: \(3,\)\); give this model's",
        ),
    ],
    ids=["missing", "empty", "unknown", "shape"],
)
def test_a_state_that_does_not_fit(change: Any, message: str) -> None:
    """Nothing of it is loaded, and the pipeline continues."""
    pipe = trained("mlp", "2bw")
    before = pipe.state_dict()
    state = {name: tensor + 1 for name, tensor in before.items()}
    change(state)
    with pytest.raises(WeftError, match=message):
        pipe.load_state_dict(state)
    assert equal(pipe.state_dict(), before)
    pipe.step(*batches("mlp", 1)[0])
    assert not equal(pipe.state_dict(), before)


# Tied weights


def held(pipe: weft.Pipeline) -> list[tuple[int, ParameterSet]]:
    """The sets of tied parameters, each with the chunk that holds it."""
    return [
        (chunk, parameter_set)
        for (_, chunk), built in sorted(pipe._assembly.chunks.items())
        for holders, parameter_set in zip(pipe._assembly.layout.sets[chunk], built.chunk.sets, strict=True)
        if holders
    ]


@parametrize_product(schedule=SCHEDULES, stages=[2, 4], options=[{}, {"clip_norm": 0.1}, {"replicas": 2}])
def test_copies_of_tied_weights_are_always_equal(schedule: str, stages: int, options: dict[str, Any]) -> None:
    """Every version that two chunks hold is bit-identical, after every step and not just after a flush."""
    adam = {"optimizer": lambda params: torch.optim.Adam(params, lr=0.05)}
    pipe = trained("transformer", schedule, stages=stages, steps=0, **adam, **options)
    holders = pipe.schedule.chunks - 1
    copies = [parameter_set for _, parameter_set in held(pipe)]
    assert [chunk for chunk, _ in held(pipe)] == [0, holders] * options.get("replicas", 1)
    addresses = {parameter_set.versions.live[0].data_ptr() for parameter_set in copies}
    assert len(addresses) == len(copies)  # they do not share memory
    shared = 0
    seen: dict[int, Tensor] = {}
    for t, batch in enumerate(batches("transformer", 6)):
        pipe.step(*batch)
        for parameter_set in copies:
            newest = parameter_set.versions.newest
            (weights,) = parameter_set.versions.read(newest)
            if newest in seen:
                shared += t > 0
                assert torch.equal(weights, seen[newest])
            seen.setdefault(newest, weights.detach().clone())
    assert shared
    assert len(seen) > 3
    assert not torch.equal(seen[max(seen)], seen[min(seen)])
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], state["7.weight"])
    for parameter_set in copies:
        assert torch.equal(parameter_set.versions.live[0].cpu(), state["0.weight"])


def test_one_parameter_in_three_chunks_and_twice_in_one() -> None:
    """The gradients of all its uses are summed, each once: within 1e-6 of plain training, since sums are by chunk."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    for layer in (1, 3, 5):
        model.get_submodule(str(layer)).weight = model.get_submodule("0").weight
    plain = copy.deepcopy(model)
    pipe = pipeline(model, stages=3, balance=[2, 2, 2])
    assert [chunk for chunk, _ in held(pipe)] == [0, 1, 2]
    optimizer = sgd(plain.parameters())
    for inputs, targets in batches("mlp", 3):
        pipe.step(inputs, targets)
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (loss_fn(plain(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_layer_in_two_chunks() -> None:
    """The module itself, not just its parameter."""
    model = build("mlp")
    model[6] = model[1]
    plain = copy.deepcopy(model)
    assert plain[6] is plain[1]
    pipe = pipeline(model, schedule="gpipe", balance=[4, 4])
    optimizer = sgd(plain.parameters())
    for inputs, targets in batches("mlp", 3):
        pipe.step(inputs, targets)
        optimizer.zero_grad()
        for x, y in zip(inputs.chunk(4), targets.chunk(4), strict=True):
            (loss_fn(plain(x), y) / 4).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    state = pipe.state_dict()
    assert torch.equal(state["1.0.weight"], state["6.0.weight"])
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, plain.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_tied_and_frozen_weights_stay() -> None:
    model = build("transformer")
    model.get_submodule("0").weight.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    pipe = pipeline(model, schedule="wpipe", balance=BALANCE[4])
    assert not held(pipe)
    for batch in batches("transformer", 3):
        pipe.step(*batch)
    state = pipe.state_dict()
    for name in state:
        assert torch.equal(state[name], before[name]) == (name in ("0.weight", "7.weight"))


# Real ranks


def on_two_ranks(schedules: list[str]) -> list[tuple[State, State, State]]:
    """The states after training, after loading another state, and after training from there."""
    torch.set_num_threads(1)
    found = []
    for schedule in schedules:
        stages = None if dist.is_initialized() else 2
        chunks = 4 if schedule == "wpipe" else 2
        pipe = pipeline(build("transformer"), schedule=schedule, stages=stages, balance=BALANCE[chunks])
        for batch in batches("transformer", 4):
            pipe.step(*batch)
        state = pipe.state_dict()
        pipe.load_state_dict({name: tensor / 2 for name, tensor in state.items()})
        halved = pipe.state_dict()
        for batch in batches("transformer", 4):
            pipe.step(*batch)
        found.append((state, halved, pipe.state_dict()))
    return found


def test_every_real_rank_has_the_whole_state(launch: Callable[..., list[Any]]) -> None:
    schedules = ["1f1b", "wpipe"]
    virtual = on_two_ranks(schedules)
    for real in launch(on_two_ranks, schedules, ranks=2):
        for states, expected in zip(real, virtual, strict=True):
            assert all(map(equal, states, expected))


# A tensor at a time


def states_on_three_ranks() -> list[Any]:
    """The names and sums that each way of asking gives here; and the tensors that this rank took memory for."""
    torch.set_num_threads(1)
    stages = None if dist.is_initialized() else 3
    pipe = pipeline(build("transformer"), schedule="1f1b", stages=stages, balance=[2, 3, 3])
    for batch in batches("transformer", 2):
        pipe.step(*batch)
    whole = pipe.state_dict()
    made: list[str] = []
    gathered = model_state._gathered

    def counting(assembly: Any, name: str, **options: Any) -> Tensor:
        tensor, local = gathered(assembly, name, **options), assembly.chunks.get((0, assembly.layout.homes[name]))
        if not tensor.is_meta and (local is None or tensor.data_ptr() != local.tensor(name).data_ptr()):
            made.append(name)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_state, "_gathered", counting)
        first = pipe.state_dict(rank0_only=True)
        streamed = {name: tensor.clone() for name, tensor in pipe.iter_state_dict(rank0_only=True)}
        made_for_first = list(made)
        everywhere = dict(pipe.iter_state_dict())
    same = [state == {} or equal(state, whole) for state in (first, streamed, everywhere)]
    result = [len(whole), len(first), len(streamed), len(everywhere), same, len(made_for_first)]
    pipe.close()
    return result


def test_rank_0_alone_has_the_state(launch: Callable[..., list[Any]]) -> None:
    first, *others = launch(states_on_three_ranks, ranks=3)
    count = first[0]
    assert first == [count, count, count, count, [True] * 3, 2 * count]
    assert others == [[count, 0, 0, count, [True] * 3, 0]] * 2
    assert states_on_three_ranks() == first


def test_the_step_after_a_state_gives_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Malloc would keep many small tensors that the user has dropped."""
    given_back: list[int] = []
    steps = 0
    monkeypatch.setattr("weft.runtime.pipeline.give_back_memory", lambda: given_back.append(steps))
    pipe = pipeline(build("mlp"), schedule="2bw", stages=2)
    for steps, batch in enumerate(batches("mlp", 4)):
        pipe.step(*batch)
        if steps == 1:
            pipe.state_dict()
    assert given_back == [2]


def test_a_state_is_of_one_moment() -> None:
    pipe = pipeline(build("mlp"), schedule="2bw", stages=2)
    state = pipe.iter_state_dict()
    pipe.step(*batches("mlp", 1)[0])
    with pytest.raises(weft.WeftError, match="take all its tensors before the next step"):
        next(state)
    state = pipe.iter_state_dict()
    next(state)
    pipe.step(*batches("mlp", 1)[0])
    with pytest.raises(weft.WeftError, match="take all its tensors before the next step"):
        next(state)


def interrupted(count: int) -> list[Any]:
    """Rank 0 takes some tensors, asks for the state, and takes the rest: what went wrong, and whether all is right."""
    pipe = pipeline(build("mlp"), stages=None if dist.is_initialized() else 2)
    expected = pipe.state_dict()
    state = pipe.iter_state_dict(rank0_only=True)
    taken, problem = dict(itertools.islice(state, count)), ""
    if taken and count < len(expected):
        try:
            pipe.state_dict(rank0_only=True)
        except RunError as refused:
            problem = str(refused)
        taken |= dict(state)
    again = pipe.state_dict()
    pipe.close()
    return [problem, equal(taken or expected, expected), equal(again, expected)]


def left_early() -> str:
    """Rank 0 takes one tensor and leaves, and ends only when rank 1 has given up: what rank 1 says."""
    pipe, problem = pipeline(build("mlp"), stages=None), ""
    pipe.state_dict()
    pipe._assembly.collectives._deadline = 1.0  # not before: building may take longer
    try:
        for _ in pipe.iter_state_dict():
            if dist.get_rank() == 0:
                break
    except RunError as late:
        problem = str(late)
    own = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        own.wait(["given up"])
    else:
        own.set("given up", "")
    return problem


def test_a_rank_waits_for_one_that_has_left_an_iteration(launch: Callable[..., list[Any]]) -> None:
    first, second = launch(left_early, ranks=2)
    assert first == ""
    assert "waited 1 s for all ranks to gather" in second
    assert "which every rank iterates to the end" in second


def test_a_rank_that_leaves_an_iteration_can_not_go_on(launch: Callable[..., list[Any]]) -> None:
    """Rank 1 still sends the rest of the first state; its tensors would be taken for others of the same shapes."""
    first, second = launch(interrupted, 2, ranks=2)
    assert "left iter_state_dict before its last tensor" in first[0]
    assert first[1:] == second[1:] == [True, True]


def test_the_last_tensor_ends_an_iteration(launch: Callable[..., list[Any]]) -> None:
    count = len(build("mlp").state_dict())
    assert launch(interrupted, count, ranks=2) == [["", True, True]] * 2
