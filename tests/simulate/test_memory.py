"""What a rank holds, against hand-made sums and against the ledger."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.simulate.cases import OWN, VARIANTS, build, costs, schedules
from tests.simulate.memory_oracle import moments

from weft.schedule import Schedule, Weights, schedule, verify
from weft.simulate import CATEGORIES, ChunkCost, Cost, Link, Simulation, simulate


def expect_agreement(run: Simulation) -> None:
    """Both peaks are the ledger's, and their categories are those of a moment at which the ledger has them."""
    late = -min(int(rows["index"].min()) for rows in run.schedule.streams) // run.schedule.microbatches + 1
    ledger = moments(run.schedule, run.cost, max(run.minibatches, late + max(run.delay) + 2))
    for rank, (memory, held) in enumerate(zip(run.memory, ledger, strict=True)):
        messages = held.pop("messages")
        apart = [dict(zip(held, values, strict=True)) for values in zip(*held.values(), strict=True)]
        every = [one | {"buffers": one["buffers"] + some} for one, some in zip(apart, messages, strict=True)]
        for found, moments_of_rank in ((memory.bytes, every), (memory.apart_from_messages, apart)):
            assert set(found) == set(CATEGORIES) == set(held)
            most = max(sum(one.values()) for one in moments_of_rank)
            assert found in [one for one in moments_of_rank if sum(one.values()) == most], rank
        assert memory.total == sum(memory.bytes.values())


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_method_by_the_ledger(name: str, options: dict[str, Any], stages: int) -> None:
    """Weights apart by powers of ten, so that every category that is wrong shows."""
    schedule = build(name, options, stages, 4)
    whole = ChunkCost(
        forward=1, backward_input=1, backward_weight=1, update=0.5, activation_bytes=8, input_bytes=2,
        weight_bytes=1000, gradient_bytes=100, optimizer_bytes=10_000,
    )  # fmt: skip
    expect_agreement(simulate(schedule, Cost(chunks=(whole,) * schedule.chunks, link=Link(latency=0.25))))


@given(st.data())
@settings(max_examples=200)
def test_uneven_costs_by_the_ledger(data: st.DataObject) -> None:
    schedule = data.draw(schedules(stages=4, microbatches=6))
    cost = data.draw(costs(schedule))
    assume(any(one.forward + one.backward_input + one.backward_weight + one.update for one in cost.chunks))
    run = simulate(schedule, cost)
    if run.minibatches * schedule.chunks * schedule.microbatches < 1000:
        expect_agreement(run)


def test_one_stage_by_hand() -> None:
    """F0 B0 F1 B1 U: weights 10 and optimizer 20 all the time, the gradient from the first B to the update."""
    run = simulate(
        schedule("1f1b", stages=1, microbatches=2),
        Cost(chunks=(ChunkCost(activation_bytes=5, weight_bytes=10, gradient_bytes=7, optimizer_bytes=20),)),
    )
    assert run.memory[0].bytes == {
        "weights": 10, "extra_versions": 0, "gradients": 7, "optimizer": 20, "activations": 5, "buffers": 0,
    }  # fmt: skip
    assert run.memory[0].total == 42


def test_recompute_keeps_inputs_and_one_whole_micro_batch() -> None:
    """GPipe holds m inputs; while a backward runs, the activations of that one micro-batch are back."""
    pipe = schedule("gpipe", stages=2, microbatches=4)
    kept = simulate(pipe, Cost.uniform(pipe, activation_bytes=8.0, input_bytes=1.0))
    again = simulate(pipe, Cost.uniform(pipe, activation_bytes=8.0, input_bytes=1.0, recompute=True))
    assert [one.bytes["activations"] for one in kept.memory] == [32, 32]
    assert [one.bytes["activations"] for one in again.memory] == [11, 11]
    assert again.period == 4 * (1 + 3) + 1 + 3


def test_what_has_arrived_waits_in_a_buffer() -> None:
    """GPipe's second rank is twice as slow: while it runs the first of four forwards, two more arrive."""
    pipe = schedule("gpipe", stages=2, microbatches=4)
    chunks = (
        ChunkCost(forward=1, activation_bytes=0, gradient_bytes=0, input_bytes=3),
        ChunkCost(forward=2, activation_bytes=0, gradient_bytes=0, input_bytes=3),
    )
    run = simulate(pipe, Cost(chunks=chunks))
    assert [one.bytes["buffers"] for one in run.memory] == [3, 6]
    slow = Cost(chunks=chunks, links={(0, 1): Link(bandwidth=1.0)})  # one every 3: each is taken when it comes
    assert simulate(pipe, slow).memory[1].bytes["buffers"] == 3


def test_bytes_apart_from_messages_are_those_of_their_own_moment() -> None:
    """GPipe's second rank is slower: two messages of 100 bytes wait while it holds 16, none while it holds 32."""
    pipe = schedule("gpipe", stages=2, microbatches=4)
    chunks = (
        ChunkCost(forward=1, activation_bytes=0, gradient_bytes=0, input_bytes=100),
        ChunkCost(forward=2, activation_bytes=8, gradient_bytes=0, input_bytes=100),
    )
    last = simulate(pipe, Cost(chunks=chunks)).memory[1]
    assert (last.bytes["activations"], last.bytes["buffers"]) == (16, 200)
    assert (last.apart_from_messages["activations"], last.apart_from_messages["buffers"]) == (32, 0)


def test_split_backward_holds_activations_until_the_weight_gradient() -> None:
    """ZB-H1: every rank holds p micro-batches, although 1F1B's last holds one."""
    for name, held in (("zb-h1", [4, 4, 4, 4]), ("1f1b", [4, 3, 2, 1])):
        run = simulate(schedule(name, stages=4, microbatches=8))
        assert [one.bytes["activations"] for one in run.memory] == held


def test_two_gradients_of_a_chunk_when_its_update_comes_late() -> None:
    """The update is written behind the next mini-batch's backward, so both gradients live at once."""
    own = Schedule(name="late", stages=1, microbatches=1, streams=("0F0 0B0 0U-1",), weights=Weights(delay=1))
    run = simulate(own, Cost(chunks=(ChunkCost(gradient_bytes=100),)))
    assert run.memory[0].bytes["gradients"] == 200


@pytest.mark.parametrize(
    ("name", "options", "temporaries"),
    [
        ("xpipe", {}, [2, 2, 2, 2]),  # forward's and backward's prediction of a mini-batch overlap
        ("xpipe", {"versions": "exact"}, [1, 1, 1, 0]),  # the backward takes the newest; the last rank is never late
        ("spectrain", {}, [1, 1, 1, 1]),  # while an action runs
        ("pipeoptim", {}, [1, 1, 1, 0]),
    ],
)
def test_predicted_weights_are_temporary(name: str, options: dict[str, Any], temporaries: list[int]) -> None:
    run = simulate(schedule(name, stages=4, microbatches=8, **options))
    assert [one.bytes["buffers"] for one in run.memory] == temporaries
    assert [one.bytes["extra_versions"] for one in run.memory] == [0, 0, 0, 0]
    assert run.versions == (1, 1, 1, 1)


def test_predictions_that_the_backward_reads_again_do_not_pile_up() -> None:
    """Each forward predicts and its own backward reads that prediction: as many as are in flight, p - r."""
    order = schedule("pipedream", stages=2, microbatches=4).streams
    policy = Weights(delay=None, ahead=1)
    own = Schedule(name="own", stages=2, microbatches=4, streams=order, weights=policy)
    verify(own)
    run = simulate(own)
    assert [one.bytes["buffers"] for one in run.memory] == [2, 1]
    expect_agreement(run)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("unit", [0.1, 0.3, 0.7, 1 / 3])
def test_the_unit_of_time_changes_no_byte(name: str, options: dict[str, Any], unit: float) -> None:
    """Messages that come at the very end of an action come then in any unit, whatever floats make of it."""
    pipe = build(name, options, 4, 8)
    bytes_of = [[one.bytes for one in simulate(pipe, _timed(pipe, forward)).memory] for forward in (12.0, 12.0 * unit)]
    assert bytes_of[0] == bytes_of[1]


def _timed(pipe: Schedule, forward: float) -> Cost:
    return Cost.uniform(
        pipe, forward=forward, backward=2 * forward, activation_bytes=48.0, input_bytes=12.0, weight_bytes=12.0,
        gradient_bytes=12.0,
    )  # fmt: skip


@pytest.mark.parametrize("own", OWN, ids=lambda own: own.name)
def test_own_schedules_by_the_ledger(own: Schedule) -> None:
    expect_agreement(
        simulate(own, Cost.uniform(own, forward=4.0, backward=8.0, input_bytes=2.0, link=Link(latency=0.5)))
    )
    assert simulate(own).in_flight[1] == 2  # one chunk there; the rank with two counts half stages
