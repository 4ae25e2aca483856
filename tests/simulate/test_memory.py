"""The memory of a rank, compared with sums by hand and with the memory oracle."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.simulate.cases import CUSTOM, VARIANTS, build, costs, schedules
from tests.simulate.memory_oracle import moments

from weft.schedule import Schedule, Weights, schedule, verify
from weft.simulate import CATEGORIES, ChunkCost, Cost, Link, Simulation, simulate


def expect_agreement(run: Simulation) -> None:
    """Both peaks are those of the oracle, and their categories are those of a moment of the oracle's peak."""
    reach = -min(int(rows["index"].min()) for rows in run.schedule.streams) // run.schedule.microbatches + 1
    oracle = moments(run.schedule, run.cost, max(run.minibatches, reach + max(run.delay) + 2))
    for rank, (memory, held) in enumerate(zip(run.memory, oracle, strict=True)):
        messages = held.pop("messages")
        apart = [dict(zip(held, values, strict=True)) for values in zip(*held.values(), strict=True)]
        whole = [
            held_bytes | {"buffers": held_bytes["buffers"] + waiting}
            for held_bytes, waiting in zip(apart, messages, strict=True)
        ]
        for found, moments_of_rank in ((memory.bytes, whole), (memory.apart_from_messages, apart)):
            assert set(found) == set(CATEGORIES) == set(held)
            peak = max(sum(moment.values()) for moment in moments_of_rank)
            assert found in [moment for moment in moments_of_rank if sum(moment.values()) == peak], rank
        assert memory.total == sum(memory.bytes.values())


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_method_by_the_oracle(name: str, options: dict[str, Any], stages: int) -> None:
    """Sizes that differ by powers of ten, so that an error in any category is noticed."""
    schedule = build(name, options, stages, 4)
    whole = ChunkCost(
        forward=1, backward_input=1, backward_weight=1, update=0.5, activation_bytes=8, input_bytes=2,
        weight_bytes=1000, gradient_bytes=100, optimizer_bytes=10_000,
    )  # fmt: skip
    expect_agreement(simulate(schedule, Cost(chunks=(whole,) * schedule.chunks, link=Link(latency=0.25))))


@given(st.data())
@settings(max_examples=50)
def test_uneven_costs_by_the_oracle(data: st.DataObject) -> None:
    schedule = data.draw(schedules(stages=4, microbatches=6))
    cost = data.draw(costs(schedule))
    assume(any(chunk.forward + chunk.backward_input + chunk.backward_weight + chunk.update for chunk in cost.chunks))
    run = simulate(schedule, cost)
    if run.minibatches * schedule.chunks * schedule.microbatches < 1000:
        expect_agreement(run)


def test_one_stage_by_hand() -> None:
    """F0 B0 F1 B1 U: weights, masters and optimizer at all times, the gradient from the first B to the update."""
    run = simulate(
        schedule("1f1b", stages=1, microbatches=2),
        Cost(
            chunks=(
                ChunkCost(activation_bytes=5, weight_bytes=10, master_bytes=30, gradient_bytes=7, optimizer_bytes=20),
            )
        ),
    )
    assert run.memory[0].bytes == {
        "weights": 10, "masters": 30, "extra_versions": 0, "gradients": 7, "optimizer": 20, "activations": 5,
        "buffers": 0,
    }  # fmt: skip
    assert run.memory[0].total == 72


@pytest.mark.parametrize(("name", "extra"), [("1f1b", 0), ("wpipe", 1), ("2bw", 2)])
def test_mixed_precision_in_bytes_per_parameter(name: str, extra: float) -> None:
    """Compute weights 2 and masters 4; versions are as small as the compute weights, on ranks that hold any."""
    pipe = schedule(name, stages=4, microbatches=8)
    cost = Cost.uniform(pipe, weight_bytes=2, master_bytes=4, gradient_bytes=4, optimizer_bytes=8)
    for rank in simulate(pipe, cost).memory:
        assert [rank.bytes[category] for category in ("weights", "masters", "optimizer")] == [2, 4, 8]
        assert rank.bytes["extra_versions"] == extra


def test_recompute_keeps_inputs_and_the_activations_of_one_micro_batch() -> None:
    """GPipe holds m inputs; while a backward runs, also the activations of its micro-batch."""
    pipe = schedule("gpipe", stages=2, microbatches=4)
    kept = simulate(pipe, Cost.uniform(pipe, activation_bytes=8.0, input_bytes=1.0))
    recomputed = simulate(pipe, Cost.uniform(pipe, activation_bytes=8.0, input_bytes=1.0, recompute=True))
    assert [rank.bytes["activations"] for rank in kept.memory] == [32, 32]
    assert [rank.bytes["activations"] for rank in recomputed.memory] == [11, 11]
    assert recomputed.period == 4 * (1 + 3) + 1 + 3


def test_recompute_by_layer_keeps_inputs_of_layers_and_the_activations_of_one() -> None:
    """GPipe holds four inputs of each of m micro-batches; while a backward runs, also the rest of one layer."""
    pipe = schedule("gpipe", stages=2, microbatches=4)
    costs: Any = {"activation_bytes": 32.0, "input_bytes": 1.0, "layers": 4.0}
    by_layer = simulate(pipe, Cost.uniform(pipe, **costs, recompute="layer"))
    whole = simulate(pipe, Cost.uniform(pipe, **costs, recompute=True))
    assert [rank.bytes["activations"] for rank in by_layer.memory] == [4 * 4 + 8 - 1] * 2
    assert [rank.bytes["activations"] for rank in whole.memory] == [4 + 32 - 1] * 2
    assert by_layer.period == whole.period
    mixed = simulate(pipe, Cost.uniform(pipe, **costs, recompute=["layer", False]))
    assert [rank.bytes["activations"] for rank in mixed.memory] == [23, 128]


def test_arrived_messages_wait_in_a_buffer() -> None:
    """GPipe's second rank is twice as slow: while it runs the first of four forwards, two more arrive."""
    pipe = schedule("gpipe", stages=2, microbatches=4)
    chunks = (
        ChunkCost(forward=1, activation_bytes=0, gradient_bytes=0, input_bytes=3),
        ChunkCost(forward=2, activation_bytes=0, gradient_bytes=0, input_bytes=3),
    )
    run = simulate(pipe, Cost(chunks=chunks))
    assert [rank.bytes["buffers"] for rank in run.memory] == [3, 6]
    slow = Cost(chunks=chunks, links={(0, 1): Link(bandwidth=1.0)})  # one every 3: each is taken at its arrival
    assert simulate(pipe, slow).memory[1].bytes["buffers"] == 3


def test_the_peak_without_messages_may_be_at_another_moment() -> None:
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
    """ZB-H1: every rank holds p micro-batches, whereas the last rank of 1F1B holds one."""
    for name, held in (("zb-h1", [4, 4, 4, 4]), ("1f1b", [4, 3, 2, 1])):
        run = simulate(schedule(name, stages=4, microbatches=8))
        assert [rank.bytes["activations"] for rank in run.memory] == held


def test_a_late_update_holds_two_gradients() -> None:
    """The update comes after the backward of the next mini-batch, so both gradients exist at once."""
    own = Schedule(name="late", stages=1, microbatches=1, streams=("0F0 0B0 0U-1",), weights=Weights(delay=1))
    run = simulate(own, Cost(chunks=(ChunkCost(gradient_bytes=100),)))
    assert run.memory[0].bytes["gradients"] == 200


@pytest.mark.parametrize(
    ("name", "options", "temporaries"),
    [
        ("xpipe", {}, [2, 2, 2, 2]),  # the predictions of forward and backward of a mini-batch overlap
        ("xpipe", {"versions": "exact"}, [1, 1, 1, 0]),  # the backward reads the newest; the last rank has no delay
        ("spectrain", {}, [1, 1, 1, 1]),  # while an action runs
        ("pipeoptim", {}, [1, 1, 1, 0]),
        ("wpipe", {"predict": "published", "fresh": True}, [0.5] * 4),  # late micro-batches share one prediction
    ],
)
def test_predicted_weights_are_temporary(name: str, options: dict[str, Any], temporaries: list[float]) -> None:
    run = simulate(schedule(name, stages=4, microbatches=8, **options))
    assert [rank.bytes["buffers"] for rank in run.memory] == temporaries
    assert [rank.bytes["extra_versions"] for rank in run.memory] == [0, 0, 0, 0]
    assert set(run.versions) == {1}


def test_predictions_that_the_backward_reuses_do_not_accumulate() -> None:
    """Each forward predicts and its backward reuses the prediction: as many as are in flight, p - r."""
    order = schedule("pipedream", stages=2, microbatches=4).streams
    policy = Weights(delay=None, ahead=1)
    own = Schedule(name="own", stages=2, microbatches=4, streams=order, weights=policy)
    verify(own)
    run = simulate(own)
    assert [rank.bytes["buffers"] for rank in run.memory] == [2, 1]
    expect_agreement(run)


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("unit", [0.1, 0.3, 0.7, 1 / 3])
def test_the_unit_of_time_does_not_matter(name: str, options: dict[str, Any], unit: float) -> None:
    """A message that arrives exactly at the end of an action does so in every unit, despite rounding."""
    pipe = build(name, options, 4, 8)
    bytes_of = [
        [rank.bytes for rank in simulate(pipe, _timed(pipe, forward)).memory] for forward in (12.0, 12.0 * unit)
    ]
    assert bytes_of[0] == bytes_of[1]


def _timed(pipe: Schedule, forward: float) -> Cost:
    return Cost.uniform(
        pipe, forward=forward, backward=2 * forward, activation_bytes=48.0, input_bytes=12.0, weight_bytes=12.0,
        gradient_bytes=12.0,
    )  # fmt: skip


@pytest.mark.parametrize("custom", CUSTOM, ids=lambda custom: custom.name)
def test_custom_schedules_by_the_oracle(custom: Schedule) -> None:
    expect_agreement(
        simulate(custom, Cost.uniform(custom, forward=4.0, backward=8.0, input_bytes=2.0, link=Link(latency=0.5)))
    )
    assert simulate(custom).in_flight[1] == 2  # it has one chunk; on the rank with two, a chunk is half a stage
