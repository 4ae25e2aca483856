"""What weave holds, hides and delays: the figures of docs/weave.md."""

from typing import Any

import pytest

from weft.schedule import Op, find_block, lower, schedule
from weft.simulate import ChunkCost, Cost, Link, Simulation, simulate
from weft.simulate import slack as simulated_slack


def run(p: int, m: int, *, hop: float = 0.0, name: str = "weave", **options: Any) -> Simulation:
    """Times in powers of two, so that sums are exact."""
    pipe = schedule(name, stages=p, microbatches=m, **options)
    found = simulate(pipe, Cost.uniform(pipe, link=Link(latency=hop)))
    assert found.steady
    return found


def mean_late(found: Simulation) -> float:
    """Micro-batches of a mini-batch that read an old version, mean over chunks."""
    program = lower(found.schedule)
    forwards = program.delay[program.op == Op.F]
    return float(forwards.sum()) / found.schedule.chunks


@pytest.mark.parametrize(
    ("p", "slack", "split", "in_flight", "late"),
    [
        (8, 0, True, [3, 4, 4, 3, 4, 4, 3, 4], 2.8125),
        (8, 0.5, True, [6] * 8, 5.125),
        (4, 0, True, [2] * 4, 1.125),
        (4, 0.5, True, [3] * 4, 2.125),
        (16, 0, True, [6] * 16, 5.15625),
        (4, 0, False, [3, 3, 2.5, 3], 2.0),
        (8, 0, False, [6, 5.5, 5.5, 5, 5, 5, 4.5, 5], 4.25),
        (8, 0.5, False, [8] * 8, 7.0),
    ],
)
def test_the_table(p: int, slack: float, split: bool, in_flight: list[float], late: float) -> None:
    found = run(p, 16, slack=slack, split=split)
    assert found.bubbles == (0.0,) * p
    assert list(found.in_flight) == in_flight
    assert mean_late(found) == late
    assert set(found.versions) <= {1, 2}


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("slack", [0, 0.25, 0.5, 1.0])
def test_a_hop_of_the_slack_is_hidden_and_a_longer_one_is_not(slack: float, split: bool) -> None:
    for p in (2, 3, 4, 8):
        options: dict[str, Any] = {"slack": slack, "split": split}
        assert run(p, 3 * p, hop=slack, **options).bubble == 0
        hidden = {(2, 0.25, False): 0.5}.get((p, slack, split), slack)  # no block of less
        assert run(p, 3 * p, hop=hidden + 1 / 64, **options).bubble > 0


def test_wpipe_needs_twice_the_activations_for_the_same_hop() -> None:
    wpipe, weave = run(8, 16, hop=0.5, name="wpipe", warmup=2), run(8, 16, hop=0.5)
    assert wpipe.bubble == weave.bubble == 0
    assert max(weave.in_flight) < 0.4 * max(wpipe.in_flight)


@pytest.mark.parametrize(("hop", "loses"), [(0.0, 0.11), (0.25, 0.15)])
def test_slack_absorbs_other_ratios_of_f_i_and_w(hop: float, loses: float) -> None:
    """F : I : W = 1 : 1.5 : 1.5, as where a backward costs three forwards."""
    for slack, expected in ((0, loses), (0.5, 0.0)):
        pipe = schedule("weave", stages=8, microbatches=16, slack=slack)
        chunk = ChunkCost(forward=0.5, backward_input=0.75, backward_weight=0.75)
        found = simulate(pipe, Cost(chunks=(chunk,) * 16, link=Link(latency=hop)))
        assert found.bubble >= expected if expected else found.bubble == 0


@pytest.mark.parametrize(("p", "m", "slack", "models"), [(4, 8, 0, 0.75), (8, 16, 0, 0.75), (4, 16, 0.5, 0.625)])
def test_extra_weights_are_half_a_model_on_early_ranks_and_a_whole_one_at_the_turn(
    p: int, m: int, slack: float, models: float
) -> None:
    extra = [rank.bytes["extra_versions"] for rank in run(p, m, slack=slack).memory]
    assert (extra[0], extra[-1], sum(extra) / p) == (0.5, 1.0, models)


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("hidden", [0, 0.25, 0.5, 1.0])
def test_the_arithmetic_of_slack_is_that_of_the_simulator(hidden: float, split: bool) -> None:
    for p in (2, 3, 4, 8):
        found = simulated_slack(schedule("weave", stages=p, microbatches=3 * p, slack=hidden, split=split))
        assert found is not None
        assert found.messages == pytest.approx(find_block(p, hidden, split).slack)
