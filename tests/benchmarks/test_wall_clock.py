"""Wall clock: its jobs, its tables and targets, and its quick form on two real ranks."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import ResumeCache
from benchmarks.wall_clock.jobs import SEEDS, SETTINGS, sets_of
from benchmarks.wall_clock.measure import measure
from benchmarks.wall_clock.pages import gap, missed, tables
from weft.train.job import job_of, schedule_of


def results(**losses: list[float]) -> dict[str, Any]:
    """All end at 2.0 and 2.1, but for these."""
    known = {name: losses.get(name.replace(" ", "_").replace("-", "_"), [2.0, 2.1]) for name in SETTINGS}
    runs = [
        {"schedule": name, "seed": seed, "updates": 100, "seconds": 60.0, "bubble": 0.1, "loss": loss, "accuracy": 0.5}
        for name, by_seed in known.items()
        for seed, loss in enumerate(by_seed)
    ]
    return {"environment": "2 cores", "runs": runs}


@pytest.mark.parametrize("name", SETTINGS)
def test_every_run_is_a_job_on_two_real_ranks(name: str) -> None:
    job = job_of(None, sets_of(name, 1, quick=False))
    schedule = schedule_of(job)
    assert (schedule.stages, schedule.microbatches, job.schedule.virtual, job.train.seed) == (2, 4, False, 1)
    assert (schedule.name, schedule.options.get("fresh", False)) == (name.split()[0], name == "wpipe fresh")


def test_gaps_are_of_the_same_seed() -> None:
    shown = results(wpipe_fresh=[1.9, 2.3], zb_h1=[1.8, 2.0])
    assert gap(shown, "wpipe fresh", "1f1b") == pytest.approx([-0.1, 0.2])
    row = next(line for line in tables(shown)["runs"].splitlines() if line.startswith("| `wpipe fresh`"))
    assert row.endswith("| 1.900 2.300 | 50.0 % | -0.100 +0.200 | +0.100 +0.300 |")
    assert missed(shown) == [
        "wpipe fresh ends -0.100 +0.200 nats from 1f1b (seed by seed), at most 0",
        "wpipe fresh ends +0.100 +0.300 nats from zb-h1 (seed by seed), at most 0",
        "weave ends +0.200 +0.100 nats from zb-h1 (seed by seed), at most 0",
    ]
    assert missed(results()) == []


def test_each_command_adds_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until all have run; after that nothing is trained."""
    trained: list[str] = []

    def train(sets: list[str], seconds: float, timed: int) -> dict[str, Any]:
        trained.append(sets[-1])
        return {"updates": 100, "seconds": seconds, "bubble": 0.1, "loss": 2.0, "accuracy": 0.5}

    monkeypatch.setattr("benchmarks.wall_clock.measure._train", train)
    recorded = {}
    for seed in (*SEEDS, None):
        trained.clear()
        recorded = measure(quick=False, cache=ResumeCache(tmp_path / "partial.jsonl"))
        (tmp_path / "results.json").write_text(json.dumps(recorded))
        (tmp_path / "partial.jsonl").unlink(missing_ok=True)
        assert trained == ([] if seed is None else [f"train.seed={seed}"] * len(SETTINGS))
        assert missed(recorded) == (["seed 1 has not run: repeat the command"] if seed == 0 else [])
    assert {(run["schedule"], run["seed"]) for run in recorded["runs"]} == {
        (name, seed) for name in SETTINGS for seed in SEEDS
    }


@pytest.mark.slow
def test_quick_form() -> None:
    found = measure(quick=True, cache=ResumeCache())
    assert [(run["schedule"], run["seed"]) for run in found["runs"]] == [(name, SEEDS[0]) for name in SETTINGS]
    for run in found["runs"]:
        assert run["updates"] > 1
        assert 0 < run["bubble"] < 1
        assert 0 < run["seconds"] < 60
        assert run["loss"] > 0
    assert tables(found | {"environment": "2 cores"})
