"""Figures of the methods: closed formulas compared with executed schedules."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from math import ceil
from typing import Any

import pytest
from tests.simulate.cases import ASYNCHRONOUS, build

from weft.schedule import schedule
from weft.simulate import Cost, Link, Simulation, simulate, timeline

SIZES = [*((p, factor * p) for p in (1, 2, 4, 8) for factor in (1, 2, 4)), (16, 16), (3, 12)]
sizes = pytest.mark.parametrize(("p", "m"), SIZES)


def run(name: str, p: int, m: int, *, hop: float = 0.0, **options: Any) -> Simulation:
    pipe = schedule(name, stages=p, microbatches=m, **options)
    found = simulate(pipe, Cost.uniform(pipe, forward=12.0, backward=24.0, link=Link(latency=12.0 * hop)))
    assert found.steady
    return found


@sizes
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_synchronous_methods(name: str, p: int, m: int) -> None:
    found = run(name, p, m)
    assert found.bubble == pytest.approx((p - 1) / (m + p - 1), abs=1e-12)
    assert found.period == 36 * (m + p - 1)
    assert found.fill == 0
    assert found.throughput == pytest.approx(m / found.period)


@sizes
@pytest.mark.parametrize("v", [1, 2, 3, 4])
def test_bubble_of_interleaved(v: int, p: int, m: int) -> None:
    found = run("interleaved", p, m, chunks=v)
    assert found.bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)
    assert found.messages_per_microbatch == 2 * (v * p - 1)
    assert found.fill == 0


@sizes
def test_bubble_of_zb_h1_is_a_third(p: int, m: int) -> None:
    """F, I and W of equal cost."""
    found = run("zb-h1", p, m)
    assert found.bubble == pytest.approx((p - 1) / (3 * m + p - 1), abs=1e-12)
    assert found.period - 36 * m == pytest.approx((run("1f1b", p, m).period - 36 * m) / 3)
    assert found.fill == 0


@sizes
@pytest.mark.parametrize("name", ASYNCHRONOUS)
def test_asynchronous_methods_have_no_bubble(name: str, p: int, m: int) -> None:
    options = {"slack": 0} if name == "weave" else {}  # which as many micro-batches as stages are enough for
    found = run(name, p, m, **options)
    assert found.bubbles == (0.0,) * p
    assert found.period == 36 * m


@pytest.mark.parametrize("p", [1, 2, 4, 8, 16])
def test_no_bubble_with_one_micro_batch(p: int) -> None:
    assert run("pipedream", p, 1).bubble == run("pipedream", p, 1, vertical_sync=True).bubble == 0


@sizes
def test_versions_and_delay(p: int, m: int) -> None:
    synchronous = [run(name, p, m) for name in ("gpipe", "1f1b", "interleaved", "zb-h1")]
    assert all(set(found.versions) == {1} and set(found.delay) == {0} for found in synchronous)
    two = run("2bw", p, m)
    assert (two.versions, two.delay) == ((2,) * p, (1,) * p)
    wpipe = run("wpipe", p, m)
    assert (wpipe.versions, wpipe.delay) == ((2,) * p + (1,) * p, (1,) * p + (0,) * p)
    fresh = run("wpipe", p, m, fresh=True)
    assert fresh.mean_delays == (p / m,) * p + (0,) * p  # the first of m / p turns
    assert fresh.mean_delay == p / (2 * m)
    assert run("paci", p, m).mean_delays == tuple((p - 1 - r) / m for r in range(p))
    for figure in ("versions", "delay", "period", "bubbles", "fill", "in_flight", "traffic", "memory"):
        assert getattr(fresh, figure) == getattr(wpipe, figure), figure
    delay = tuple(ceil((p - 1 - r) / m) for r in range(p))
    for name in ("paci", "xpipe", "spectrain", "pipeoptim"):
        found = run(name, p, m)
        assert (found.versions, found.delay) == ((1,) * p, delay), name
    stashed = run("pipedream", p, m)
    assert stashed.delay == delay
    assert stashed.versions == tuple(1 + updates for updates in delay)


@sizes
def test_mean_delay(p: int, m: int) -> None:
    """Averaged over the micro-batches of a mini-batch, whatever is predicted."""
    assert {run(name, p, m).mean_delay for name in ("gpipe", "1f1b", "interleaved", "zb-h1")} == {0.0}
    assert run("2bw", p, m).mean_delays == (1.0,) * p
    assert run("wpipe", p, m).mean_delays == (1.0,) * p + (0.0,) * p
    assert run("wpipe", p, m).mean_delay == 0.5
    newest = [sum(max(0, ceil((p - 1 - r - j) / m)) for j in range(m)) / m for r in range(p)]
    for name in ("pipedream", "spectrain", "pipeoptim"):
        assert run(name, p, m).mean_delays == pytest.approx(newest), name
        assert run(name, p, m).mean_delay == pytest.approx(sum(newest) / p), name
    assert run("xpipe", p, m).mean_delays == run("xpipe", p, m).delay  # the bellwether reads for all


def test_mean_delay_of_a_model_is_weighted_by_parameters() -> None:
    pipe = schedule("wpipe", stages=2, microbatches=4)
    equal = Cost.uniform(pipe)
    chunks = [replace(chunk, weight_bytes=size) for chunk, size in zip(equal.chunks, (1.0, 2.0, 3.0, 6.0), strict=True)]
    assert simulate(pipe, replace(equal, chunks=tuple(chunks))).mean_delay == 3 / 12
    assert simulate(pipe, Cost.uniform(pipe, weight_bytes=0.0)).mean_delay == 0.5  # all chunks alike


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_stashes_of_pipedream(p: int, m: int) -> None:
    """Up to N - r - 1 besides the newest with one micro-batch; N - 1 everywhere with vertical sync."""
    assert run("pipedream", p, m).versions == tuple(1 + ceil((p - 1 - r) / m) for r in range(p))
    vertical = run("pipedream", p, 1, vertical_sync=True)
    assert (vertical.versions, vertical.delay) == ((p,) * p, (p - 1,) * p)


@sizes
def test_in_flight(p: int, m: int) -> None:
    ranks = range(p)
    assert run("gpipe", p, m).in_flight == (m,) * p
    assert run("1f1b", p, m).in_flight == tuple(p - r for r in ranks)
    assert run("zb-h1", p, m).in_flight == (p,) * p
    assert run("wpipe", p, m).in_flight == tuple((2 * p - r) / 2 for r in ranks)
    for name in ("pipedream", "2bw", "paci", "xpipe", "spectrain", "pipeoptim"):
        assert run(name, p, m).in_flight == tuple(p - r for r in ranks), name


@sizes
def test_idle_of_fill_and_drain(p: int, m: int) -> None:
    """In forwards of a stage: 3 (p - 1) under 2bw, half of it under wpipe; the same on each rank."""
    for name, idle in (("2bw", 3.0), ("wpipe", 1.5)):
        found = run(name, p, m)
        assert found.fill == 12 * idle * (p - 1)
        shown = timeline(found.schedule, found.cost, minibatches=3)
        for r in range(p):
            busy = sum(block.end - block.start for block in shown.blocks if block.rank == r)
            assert shown.makespan - busy == 12 * idle * (p - 1)


@sizes
def test_messages(p: int, m: int) -> None:
    for name, each in (("2bw", 2 * (p - 1)), ("1f1b", 2 * (p - 1)), ("wpipe", 2 * (2 * p - 1))):
        found = run(name, p, m)
        assert found.messages_per_microbatch == each
        sent = sum(messages for messages, _ in found.traffic.values())
        assert sent == (m * each if p > 1 else 0)  # within a rank there are no messages
    ring = {(r, (r + 1) % p) for r in range(p)} | {((r + 1) % p, r) for r in range(p)}
    assert set(run("wpipe", p, m).traffic) == (ring if p > 1 else set())


@sizes
@pytest.mark.parametrize("hop", [0.125, 0.5, 0.75, 1.5, 2.0, 16.0])
def test_the_time_of_a_hop(p: int, m: int, hop: float) -> None:
    """2c(p-1)/p under 2bw, twice that under wpipe, for c from 1/8 to 16."""
    for name, hops in (("2bw", 2), ("wpipe", 4)):
        expected = 3 + Fraction(hops) * Fraction(hop) * (p - 1) / p
        assert run(name, p, m, hop=hop).period / (12 * m) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(p, m) for p, m in SIZES if m > p])
def test_more_warmup_hides_the_hop(p: int, m: int) -> None:
    """Up to half of a chunk's forward and backward: 1.5 under 2bw, 0.75 under wpipe."""
    for name, limit in (("2bw", 1.5), ("wpipe", 0.75)):
        for hop in (0.0, 0.25, limit / 2, limit):
            found = run(name, p, m, hop=hop, warmup=2)
            assert found.period == 36 * m
        if p > 1:
            beyond = run(name, p, m, hop=limit + 0.125, warmup=2)
            assert 36 * m < beyond.period < run(name, p, m, hop=limit + 0.125).period
            assert sum(beyond.in_flight) > sum(run(name, p, m).in_flight)  # the cost


@pytest.mark.parametrize("m", [2, 6])
def test_more_warmup_in_turns_of_two_hides_two_thirds(m: int) -> None:
    """wpipe on two ranks, where turns of four do not divide the micro-batches: a hop of up to 0.5."""
    for hop in (0.0, 0.25, 0.5):
        assert run("wpipe", 2, m, hop=hop, warmup=2).period == 36 * m
    assert 36 * m < run("wpipe", 2, m, hop=0.625, warmup=2).period < run("wpipe", 2, m, hop=0.625).period
    assert (run("wpipe", 2, m, warmup=2).in_flight, run("wpipe", 2, m).in_flight) == ((2.5, 1.5), (2.0, 1.5))


@pytest.mark.parametrize("p", [2, 3, 4, 8])
def test_the_fewest_micro_batches_for_more_warmup(p: int) -> None:
    """2bw with as many micro-batches as forwards ahead: two versions are still enough."""
    found = run("2bw", p, 2 * (p - 1), hop=1.5, warmup=2)
    assert found.period == 36 * 2 * (p - 1)
    assert [rank.versions for rank in found.memory] == [{rank: 2} for rank in range(p)]


@sizes
def test_weights_held_over_all_ranks(p: int, m: int) -> None:
    """In units of a model, which has p stages: 2bw holds 2, wpipe 1.5, synchronous methods 1."""
    for name, models in (("2bw", 2.0), ("wpipe", 1.5), ("1f1b", 1.0), ("gpipe", 1.0), ("zb-h1", 1.0)):
        held = [rank.bytes["weights"] + rank.bytes["extra_versions"] for rank in run(name, p, m).memory]
        assert held == [models] * p


@pytest.mark.parametrize("n", range(2, 17))
def test_updates_between_a_forward_and_its_update(n: int) -> None:
    """max(0, ⌈(N-1-r-j)/m⌉) for every cost of F and B; every backward runs when the newest version is W_t.

    Counted by time, for a mini-batch with all its predecessors. Each N and each m occur, with both costs; the test of
    the same name in tests/schedule counts in the order of work, for all pairs of N and m.
    """
    for m in {1, *range(1 + n % 4, 17, 4)}:
        pipe = schedule("pipedream", stages=n, microbatches=m)
        t = ceil((n - 1) / m)
        for forward, backward in ((1.0, 2.0), (2.5, 0.75)):
            cost = Cost.uniform(pipe, forward=forward, backward=backward, update=0.25)
            ran = {str(block.step.action): block for block in timeline(pipe, cost, minibatches=t + 1).blocks}
            for r in range(n):
                updates = [ran[f"{r}U{u}"] for u in range(t + 1)]
                for j in range(m):
                    forward_block, backward_block = ran[f"{r}F{t * m + j}"], ran[f"{r}B{t * m + j}"]
                    between = sum(forward_block.end <= update.start for update in updates[:t])
                    assert between == max(0, ceil((n - 1 - r - j) / m)), (m, r, j)
                    assert sum(update.end <= backward_block.start for update in updates) == t, (m, r, j)


@pytest.mark.parametrize("p", [1, 2, 4, 8])
def test_how_far_ahead_methods_predict(p: int) -> None:
    for m in (1, p, 4 * p):
        ranks = range(p)
        published = tuple((2 * (2 * (p + m - 2) - r) + 2 * m) // (4 * m) for r in ranks)  # round half up
        assert run("xpipe", p, m).ahead == published
        assert run("xpipe", p, m, versions="exact").ahead == tuple(ceil((p - 1 - r) / m) for r in ranks)
        assert run("spectrain", p, m).ahead == tuple(r // 2 + p - r - 1 for r in ranks)
        assert run("pipeoptim", p, m).ahead == tuple(p - r - 1 for r in ranks)


def test_build_uses_the_next_size() -> None:
    """The helper of the tests rounds up to a size that the method allows."""
    assert build("wpipe", {}, 4, 5).microbatches == 8
    assert build("2bw", {"warmup": 2}, 4, 1).microbatches == 6


@pytest.mark.parametrize("p", [1, 2, 4, 8])
@pytest.mark.parametrize("times", [1, 2, 4])
def test_in_flight_of_synchronous_methods_is_at_most_the_mini_batch(p: int, times: int) -> None:
    m = times * p
    expected = {
        "gpipe": [m] * p,
        "1f1b": [min(m, p - r) for r in range(p)],
        "zb-h1": [min(m, p)] * p,
    }
    for name, held in expected.items():
        assert list(simulate(schedule(name, stages=p, microbatches=m)).in_flight) == held
    for v in (2, 3, 4):
        run = simulate(schedule("interleaved", stages=p, microbatches=m, chunks=v))
        assert run.in_flight == pytest.approx([min(m, p + (p - 1 - 2 * r) / v) for r in range(p)])
