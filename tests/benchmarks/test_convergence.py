"""Convergence: its plan, its verdicts, and its quick form."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convergence.equal_time import CONTENDERS, periods
from benchmarks.convergence.measure import measure
from benchmarks.convergence.methods import (
    BASE,
    CANDIDATE,
    CANDIDATES,
    EVERY,
    METHODS,
    OPTIMISTIC,
    OTHERS,
    PLAIN,
    PROFILES,
)
from benchmarks.convergence.pages import missed, plots, tables
from benchmarks.convergence.plan import (
    CHECKED,
    LENGTHS,
    SEEDS,
    TUNING_SEED,
    Run,
    Settings,
    best_settings,
    next_runs,
    run_of,
)
from benchmarks.convergence.studies import QUICK, STUDIES, even_cut
from benchmarks.convergence.training import train
from benchmarks.convergence.verdicts import Gap, at_share, cells, gap_between
from benchmarks.harness import ResumeCache
from weft.errors import WeftError
from weft.train.job import job_of, schedule_of

STUDY = replace(STUDIES["text"], updates=100, tuning=50, rate=0.1)
BEST = Settings(rate=0.2, beta=0.95, decay=0.01)


def run_named(method: str, **changes: Any) -> Run:
    known: dict[str, Any] = {
        "study": "text", "correction": PLAIN, "settings": Settings(rate=0.1), "updates": 100, "seed": 0,
    }  # fmt: skip
    return Run(method=method, **(known | changes))


def loss_of(run: Run) -> float:
    """A bowl around `BEST`, which is worse for late methods."""
    settings = run.settings
    far = math.log2(settings.rate / BEST.rate) ** 2 + (settings.beta - BEST.beta) ** 2
    far += math.log10(settings.decay / BEST.decay) ** 2
    return 1 + far / 10 + EVERY[run.method].delay / 10 + (1 - run.updates / 100) / 2 + run.seed / 100


def complete() -> dict[Run, float | None]:
    found: dict[Run, float | None] = {}
    while runs := next_runs({"text": STUDY}, found):
        found |= {run: loss_of(run) for run in runs}
    return found


def results_of(found: dict[Run, float | None], **changes: Any) -> dict[str, Any]:
    runs = [
        run.plain() | {"loss": loss, "metric": None if loss is None else 1 - loss / 10, "curve": [3.0, loss]}
        for run, loss in found.items()
    ]
    known = {
        "form": "whole",
        "studies": {"text": {"updates": 100}},
        "delays": {name: method.delay for name, method in EVERY.items()},
        "periods": periods(),
        "complete": True,
        "runs": runs,
        "environment": "a machine",
    }
    return known | changes


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize(
    ("method", "correction"), [*((method, PLAIN) for method in EVERY), *((CANDIDATE, made) for made in CANDIDATES)]
)
def test_every_run_is_a_job(name: str, method: str, correction: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    for _, file in study.files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("text")
    job = job_of(None, run_named(method, study=name, correction=correction).sets(study, tmp_path))
    assert (job.train.optimizer == "nadamw") == correction.startswith("nadamw")
    exact = "predicted" in correction or method in ("xpipe", "xpipe, p = 2", "xpipe, p = 8")
    assert (job.schedule.predict == "exact") == exact
    schedule = schedule_of(job)
    assert (schedule.stages, job.train.batch) == (EVERY[method].ranks, study.batch)
    assert job.train.batch % schedule.microbatches == 0
    assert sum(job.schedule.layers) == study.layers
    assert len(job.schedule.layers) == schedule.chunks


def test_halves_are_cut_at_one_place() -> None:
    for layers in (8, 10, 16):
        for chunks in (4, 8):
            parts = even_cut(layers, chunks)
            assert (sum(parts), sum(parts[: chunks // 2]), len(parts)) == (layers, layers // 2, chunks)
            assert min(parts) >= 1


def test_delays_are_those_of_the_formulas() -> None:
    """Four stages: shares of late micro-batches, mean over the chunks."""
    wanted = {
        "1f1b": 0, "2bw": 1, "wpipe": 1 / 2, "xpipe": 3 / 4,
        **{f"wpipe fresh, m = {turns}p": 1 / (2 * turns) for turns in (2, 4, 8)},
        **{f"paci, m = {turns}p": (3 + 2 + 1) / 4 / (4 * turns) for turns in (2, 4, 8)},
        **{f"weave, m = {turns}p": (4 + 4 + 3 + 2 + 2 + 1 + 1 + 0) / 8 / (4 * turns) for turns in (2, 4, 8)},
    }  # fmt: skip
    assert {name: method.delay for name, method in METHODS.items()} == pytest.approx(wanted)
    for method in METHODS.values():  # the settings are those of a profile that is at least about as late
        assert method.delay <= METHODS[PROFILES[method.profile]].delay + 0.02


def test_search_ends_at_a_minimum_of_every_axis() -> None:
    found = complete()
    for profile, method in PROFILES.items():
        for correction in METHODS[method].corrections:
            assert best_settings("text", STUDY, profile, correction, found) == BEST
    tuned = {run.settings for run in found if run.seed == TUNING_SEED and run.method == BASE}
    assert {0.1, 0.2, 0.4} <= {settings.rate for settings in tuned}  # both neighbours of the best
    assert {0.9, 0.95, 0.975} <= {settings.beta for settings in tuned}
    assert min(settings.decay for settings in tuned) == 0.01  # less is none


def test_plan_has_every_method_on_every_seed_with_its_settings() -> None:
    found = complete()
    whole = {
        (run.method, run.correction, run.seed)
        for run in found
        if (run.settings, run.updates) == (BEST, 100) and run.seed in SEEDS
    }
    assert whole == {
        *((name, made, seed) for name, method in METHODS.items() for made in method.corrections for seed in SEEDS),
        *((name, PLAIN, seed) for name in OTHERS for seed in SEEDS[:2]),
    }
    shorter = {run.updates for run in found if run.method == BASE and run.seed == 0}
    assert shorter == {100, *(round(100 * share) for share in LENGTHS)}
    checked = {(run.method, run.correction) for run in found if run.seed == TUNING_SEED}
    assert set(CHECKED) <= checked


def test_candidates_are_tried_around_their_best_rate_and_momentum() -> None:
    """In one study, before the last seeds."""
    found = complete()
    for name in CANDIDATES:
        tried = {run.settings for run in found if run.correction == name}
        begin = Settings(rate=STUDY.rate)
        rates = {replace(begin, rate=rate) for rate in (0.05, 0.1, 0.2, 0.4)}
        assert tried == rates | {replace(begin, rate=0.2, beta=beta) for beta in (0.8, 0.9, 0.95, 0.975)}
    runs = list(found)
    last_candidate = max(place for place, run in enumerate(runs) if run.correction in CANDIDATES)
    assert last_candidate < min(place for place, run in enumerate(runs) if run.seed == SEEDS[3])
    assert {(run.method, run.updates, run.seed) for run in runs if run.correction in CANDIDATES} == {
        (CANDIDATE, STUDY.tuning, TUNING_SEED)
    }
    known = {replace(run, study="python"): loss for run, loss in found.items() if run.correction not in CANDIDATES}
    assert next_runs({"python": STUDY}, known) == []


def test_a_study_may_have_few_methods_and_seeds() -> None:
    """Only their settings are searched."""
    study = replace(STUDY, methods=("1f1b", "weave, m = 4p"), seeds=2)
    found: dict[Run, float | None] = {}
    while runs := next_runs({"larger": study}, found):
        found |= {run: loss_of(run) for run in runs}
    last = {(run.method, run.correction, run.seed) for run in found if run.seed != TUNING_SEED}
    assert last == {(name, made, seed) for name in study.methods for made in (PLAIN, OPTIMISTIC) for seed in (0, 1)}
    assert {run.method for run in found if run.seed == TUNING_SEED} == {"1f1b", PROFILES["1/8 late"]}


def test_a_diverged_run_is_no_optimum_and_nothing_runs_twice() -> None:
    found: dict[Run, float | None] = {}
    while runs := next_runs({"text": STUDY}, found):
        assert not set(runs) & found.keys()
        found |= {run: None if run.settings.rate > 0.1 else loss_of(run) for run in runs}
    assert best_settings("text", STUDY, METHODS[BASE].profile, PLAIN, found).rate == 0.1
    assert len({str(run) for run in found}) == len(found)


def test_missing_data_fails_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="WEFT_DATA"):
        run_named("wpipe").sets(STUDIES["text"], tmp_path)


def test_upper_bound_is_that_of_students_t() -> None:
    """Mean 0.02, standard deviation 0.01, three seeds: 0.02 + 2.920 x 0.01 / √3."""
    gap = gap_between({0: 1.01, 1: 1.12, 2: 1.23, 3: 9.0}, {0: 1.0, 1: 1.1, 2: 1.2})
    assert gap is not None
    assert gap.mean == pytest.approx(0.02)
    assert gap.upper == pytest.approx(0.02 + 2.920 * 0.01 / math.sqrt(3))
    assert Gap(values=(0.0,)).upper == math.inf  # one seed says nothing
    assert gap_between({0: 1.0}, {1: 1.0}) is None


def test_cells_compare_seed_by_seed_with_the_same_correction() -> None:
    found = complete()
    for run in list(found):
        if run.method == BASE and run.correction == OPTIMISTIC and run.updates == 100:
            found[run] = loss_of(run) - 0.1
    by_label = {cell.label: cell for cell in cells(results_of(found))}
    assert by_label["wpipe"].gap is not None
    assert by_label["wpipe, optimistic"].gap is not None
    assert by_label["wpipe"].gap.values == pytest.approx([0.05] * 5)
    assert by_label["wpipe, optimistic"].gap.values == pytest.approx([0.15] * 5)
    assert by_label[BASE].gap is None
    diverged = next(run for run in found if run.method == "2bw" and run.seed == 1 and run.correction == PLAIN)
    found[diverged] = None
    cell = {cell.label: cell for cell in cells(results_of(found))}["2bw"]
    assert (cell.diverged, len(cell.losses), cell.gap and len(cell.gap.values)) == (1, 4, 4)


def test_equal_time_gives_synchronous_training_fewer_updates() -> None:
    by_case = {(case["stages"], case["turns"], case["hop"]): case["periods"] for case in periods()}
    for (stages, turns, hop), found in by_case.items():
        if not hop:
            m = stages * turns
            assert found["1f1b"] == pytest.approx(3 * (m + stages - 1) / m)
            assert all(found[name] == pytest.approx(3) for name in CONTENDERS[turns].values())
    results = results_of(complete())
    assert at_share(results, "text", PLAIN, 0.6)[0] == pytest.approx(1 + (1 - 0.6) / 2)
    assert at_share(results, "text", PLAIN, 0.1)[0] == pytest.approx(1 + (1 - 0.55) / 2)
    row = next(line for line in tables(results)["time"].splitlines() if "p = 4, m = 4, hop 0" in line)
    assert "-0.164" in row  # wpipe loses 0.05, 1f1b (1 - 4/7) / 2


def test_tables_plots_and_targets() -> None:
    results = results_of(complete())
    shown = tables(results)
    assert shown.keys() == {"settings", "text", "checks", "candidates", "time"}
    assert "**0.2: " in shown["settings"]
    assert "| `wpipe` | plain | 0.5 | 5 |" in shown["text"]
    assert plots(results).keys() == {"delay.svg", "curves.svg"}
    lines = missed(results)
    assert any("wpipe fresh, m = 2p, optimistic" in line for line in lines)  # 0.025 nats
    assert not any("m = 2p:" in line and "at most 0.02" in line for line in lines)  # asked of m of 4p and more
    assert missed(results | {"complete": False})[0].startswith("the plan is not complete")


def test_candidates_are_compared_at_their_best() -> None:
    found = complete()
    for run in found:
        if run.correction in ("gapaware", OPTIMISTIC):
            found[run] = loss_of(run) + (0.25 if run.correction == "gapaware" else -0.5)
        if run.correction == "predicted":
            found[run] = None
    rows = {row.split(" | ")[0].strip("| "): row for row in tables(results_of(found))["candidates"].splitlines()}
    assert rows["gapaware"].endswith("| +0.350 | +0.850 |")
    assert rows["predicted"].endswith("| diverged | – | – |")
    assert rows["nadamw"].endswith("| 0.2, 0.95 | 2.400 | +0.100 | +0.600 |")


def test_recorded_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command adds what the first one left, whatever partial results a killed one has stored."""
    monkeypatch.setattr("benchmarks.convergence.measure.STUDIES", {"text": replace(STUDY, files=())})
    made: list[Run] = []

    def trains(runs: list[Run], *, quick: bool, until: float) -> Any:
        for run in runs[:40]:
            made.append(run)
            yield run, {"loss": loss_of(run), "metric": 0.5, "curve": []}

    monkeypatch.setattr("benchmarks.convergence.measure.train_all", trains)
    whole = measure(quick=False, cache=ResumeCache(tmp_path / "partial.jsonl"))
    assert whole["complete"]
    assert whole["parts"] == [{"environment": whole["parts"][0]["environment"], "runs": len(made)}]
    half = whole | {"runs": whole["runs"][:100], "complete": False}
    (tmp_path / "results.json").write_text(json.dumps(half))
    made.clear()
    again = measure(quick=False, cache=ResumeCache(tmp_path / "partial.jsonl"))
    assert len(made) == len(whole["runs"]) - 100
    assert {run_of(entry) for entry in again["runs"]} == {run_of(entry) for entry in whole["runs"]}
    assert [part["runs"] for part in again["parts"]] == [len(whole["runs"]), len(made)]


def test_hours_are_a_number_above_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_HOURS", "soon")
    with pytest.raises(WeftError, match="WEFT_HOURS is a number of hours"):
        measure(quick=True, cache=ResumeCache())


@pytest.mark.slow
def test_diverged_run_ends_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other failure is an error."""
    wild = run_named("wpipe", settings=Settings(rate=1e30), updates=6)
    found = train(wild, quick=True)
    assert (found["loss"], found["metric"], found["curve"][-1]) == (None, None, None)

    def fails(self: Any, *given: Any) -> None:
        raise WeftError("no luck")

    monkeypatch.setattr("weft.runtime.engine.worker.Worker._check_loss", fails)
    with pytest.raises(WeftError, match="no luck"):
        train(wild, quick=True)


@pytest.mark.slow
def test_quick_form_trains_every_method() -> None:
    results = measure(quick=True, cache=ResumeCache())
    assert results["complete"]
    found = {(cell.method, cell.correction): cell for cell in cells(results)}
    assert found.keys() == {(name, made) for name, method in METHODS.items() for made in method.corrections}
    assert all(cell.losses and not cell.diverged for cell in found.values())
    assert tables(results | {"form": "quick", "environment": "a machine"}).keys() >= {"settings", *QUICK}
