"""Convergence: its plan, its verdicts, and its quick form."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convergence.equal_time import CONTENDERS, TORCH, at_share, points_of, races, shares_to
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
    SLOW,
)
from benchmarks.convergence.pages import missed, plots, tables
from benchmarks.convergence.periods import periods
from benchmarks.convergence.plan import (
    CHECKED,
    FEWEST,
    KEY,
    LENGTHS,
    LONGER,
    SEEDS,
    TUNING_SEED,
    Run,
    Settings,
    best_settings,
    next_runs,
    run_of,
)
from benchmarks.convergence.studies import QUICK, STUDIES, Study, even_cut
from benchmarks.convergence.training import train
from benchmarks.convergence.verdicts import Gap, cells, gap_between
from benchmarks.harness import ResumeCache, describe_environment, sources_digest
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


known_periods = functools.cache(periods)


def results_of(found: dict[Run, float | None], **changes: Any) -> dict[str, Any]:
    runs = [
        run.plain() | {"loss": loss, "metric": None if loss is None else 1 - loss / 10, "curve": [3.0, loss]}
        for run, loss in found.items()
    ]
    known = {
        "form": "whole",
        "studies": {"text": {"updates": 100}},
        "delays": {name: method.delay for name, method in EVERY.items()},
        "periods": known_periods(),
        "complete": True,
        "runs": runs,
        "environment": "a machine",
    }
    return known | changes


@pytest.mark.parametrize("name", STUDIES)
@pytest.mark.parametrize(
    ("method", "correction"),
    [
        *((name, correction) for name, method in EVERY.items() for correction in method.corrections),
        *((CANDIDATE, correction) for correction in CANDIDATES),
    ],
)
def test_every_run_is_a_job(name: str, method: str, correction: str, tmp_path: Path) -> None:
    study = STUDIES[name]
    for _, file in study.files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("text")
    job = job_of(None, run_named(method, study=name, correction=correction).sets(study, tmp_path))
    assert (job.train.optimizer == "nadamw") == correction.startswith("nadamw")
    cures = [known for known in (OPTIMISTIC, "gapaware") if correction.endswith(known)]
    assert [job.schedule.cure] == (cures or ["none"])
    assert (job.schedule.c, job.schedule.cured) == (1, "all")
    exact = "predicted" in correction or method in ("xpipe", "xpipe, p = 2", "xpipe, p = 8")
    assert (job.schedule.predict == "exact") == exact
    schedule = schedule_of(job)
    known = EVERY[method]
    assert schedule.stages == (1 if known.by_turns and not study.batch_norm else known.ranks)
    assert job.train.batch == study.batch
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
    for method in EVERY.values():  # the settings are those of a profile that is at least about as late
        late = METHODS[PROFILES[method.profile]].delay
        assert method.delay <= late + 0.02 or method.options == METHODS["xpipe"].options  # it has one profile


def test_search_ends_at_a_minimum_of_every_axis() -> None:
    found = complete()
    for profile, method in PROFILES.items():
        for correction in METHODS[method].corrections:
            assert best_settings("text", STUDY, profile, correction, found) == BEST
            place = (method, correction, TUNING_SEED)
            tuned = {run.settings for run in found if (run.method, run.correction, run.seed) == place}
            neighbours = [{"rate": 0.1}, {"rate": 0.4}, {"beta": 0.9}, {"beta": 0.975}, {"decay": 0.1}]
            assert {replace(BEST, **change) for change in neighbours} <= tuned
            assert min(settings.decay for settings in tuned) == 0.01  # less is none


def test_plan_has_the_key_methods_on_every_seed_and_the_others_on_some() -> None:
    found = complete()
    whole = {
        (run.method, run.correction, run.seed)
        for run in found
        if (run.settings, run.updates) == (BEST, 100) and run.seed in SEEDS
    }
    places = {(name, correction) for name, method in METHODS.items() for correction in method.corrections}
    some = places - set(KEY)
    assert whole == {
        *((*place, seed) for place in KEY for seed in SEEDS),
        *((*place, seed) for place in some for seed in SEEDS[: 2 if place[0] in SLOW else 3]),
        *((name, correction, 0) for name, method in OTHERS.items() for correction in method.corrections),
        *((name, correction, 1) for name, method in OTHERS.items() for correction in method.corrections),
    }
    shorter = {run.updates for run in found if run.method == BASE and run.seed == 0}
    assert shorter == {100, *(round(100 * share) for share in (*LENGTHS, LONGER))}
    checked = {(run.method, run.correction) for run in found if run.seed == TUNING_SEED}
    assert set(CHECKED) <= checked


def test_candidates_are_tried_around_their_best_rate_and_momentum() -> None:
    """In one study; they begin with less momentum than the others. Some change synchronous training, too."""
    both = {name for name, candidate in CANDIDATES.items() if candidate.synchronous == name}
    found = complete()
    for name in CANDIDATES:
        tried = {run.settings for run in found if (run.method, run.correction) == (CANDIDATE, name)}
        begin = Settings(rate=STUDY.rate, beta=0.8)
        rates = {replace(begin, rate=rate) for rate in (0.05, 0.1, 0.2, 0.4)}
        betas = {replace(begin, rate=0.2, beta=beta) for beta in (0.6, 0.8, 0.9, 0.95, 0.975)}
        assert tried == rates | betas | {replace(begin, rate=rate, beta=0.95) for rate in (0.1, 0.4)}
    tried_on = {(run.method, run.correction) for run in found if run.correction in CANDIDATES}
    assert both == {"nadamw", "nesterov", "basis rotation", "basis rotation, optimistic"}
    assert tried_on == {*((CANDIDATE, name) for name in CANDIDATES), *((BASE, name) for name in both)}
    assert {(run.updates, run.seed) for run in found if run.correction in CANDIDATES} == {(STUDY.tuning, TUNING_SEED)}


def plan_of(name: str, study: Study, found: dict[Run, float | None]) -> list[Run]:
    """What is left of a study, given the results of others."""
    known = dict(found)
    while runs := next_runs({name: study}, known):
        known |= {run: loss_of(run) for run in runs}
    return [run for run in known if run.study == name]


def test_a_study_may_take_the_settings_of_another_one() -> None:
    """Or begin its search with them, but for the rate."""
    found = complete()
    python = plan_of("python", replace(STUDY, like="text", searched=()), found)
    assert {run.settings for run in python if run.seed != TUNING_SEED} == {BEST}
    assert {(run.method, run.correction) for run in python if run.seed == TUNING_SEED} == set(CHECKED)
    qqp = plan_of("qqp", replace(STUDY, like="text"), found)
    assert {run.settings.beta for run in qqp} == {0.95, 0.9, 0.975}
    larger = plan_of("larger", replace(STUDY, like="text", searched=("rate",)), found)
    assert {replace(run.settings, rate=0) for run in larger} == {replace(BEST, rate=0)}
    assert {(run.method, run.correction, run.seed) for run in larger if run.seed != TUNING_SEED} == {
        (*place, seed) for place in FEWEST for seed in (0, 1)
    }


def test_with_batch_norms_all_methods_have_micro_batches_of_one_size() -> None:
    study = STUDIES["cifar10"]
    runs = plan_of("cifar10", replace(study, rate=0.1), {})
    sizes = {sets for run in runs for sets in EVERY[run.method].settings(batch_norm=True)}
    assert {sets for sets in sizes if "microbatches" in sets} == {"schedule.microbatches=8"}
    assert {sets for sets in sizes if "ranks" in sets} == {"schedule.ranks=4"}


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
    assert by_label["wpipe"].gap.values == pytest.approx([0.05] * 3)
    assert by_label["wpipe, optimistic"].gap.values == pytest.approx([0.15] * 3)
    assert by_label[BASE].gap is None
    diverged = next(run for run in found if run.method == "2bw" and run.seed == 1 and run.correction == PLAIN)
    found[diverged] = None
    cell = {cell.label: cell for cell in cells(results_of(found))}["2bw"]
    assert (cell.diverged, len(cell.losses), cell.gap and len(cell.gap.values)) == (1, 2, 2)


def test_a_cell_that_ran_before_the_search_ended_says_so() -> None:
    """It is shown until as many seeds have run with the best settings."""
    found = complete()
    place = ("wpipe", PLAIN, 100)
    before = [run for run in found if (run.method, run.correction, run.updates) == place and run.seed != TUNING_SEED]
    older = {replace(run, settings=replace(BEST, rate=BEST.rate / 2)): found.pop(run) for run in before}
    shown = {cell.label: cell for cell in cells(results_of(found | older))}
    assert [cell.label for cell in shown.values() if not cell.tuned] == ["wpipe"]
    assert shown["wpipe"].losses == {run.seed: loss for run, loss in older.items()}
    assert "| `wpipe` | plain | 0.5 | 3 * |" in tables(results_of(found | older))["text"]
    for runs in range(1, 4):
        again = found | older | dict.fromkeys(before[:runs], 1.0)
        cell = {cell.label: cell for cell in cells(results_of(again))}["wpipe"]
        assert (cell.tuned, cell.losses == shown["wpipe"].losses) == (runs == 3, runs < 3)


def test_periods_are_those_of_the_formulas() -> None:
    cases = {(case["stages"], case["turns"], case["costs"]): case["periods"] for case in known_periods()}
    for (stages, turns, costs), found in cases.items():
        if costs == "hop 0":
            m = stages * turns
            assert found["1f1b"] == pytest.approx(3 * (m + stages - 1) / m)
            assert all(found[name] == pytest.approx(3) for name in CONTENDERS[turns].values())
            assert 3 - 1e-9 <= found[TORCH] <= found["1f1b"]
    assert {"wpipe", "1f1b", "zb-h1", TORCH} == cases[2, 2, "measured"].keys()  # weave was measured elsewhere


def test_equal_time_gives_synchronous_training_fewer_updates() -> None:
    results = results_of(complete())
    base = points_of(results, "text", BASE, OPTIMISTIC)
    full, per_share = loss_of(run_named(BASE, correction=OPTIMISTIC, settings=BEST, updates=100)), 0.5
    assert at_share(base, 0.6)[0] == pytest.approx(full + (1 - 0.6) * per_share)
    assert at_share(base, 0.1)[0] == pytest.approx(full + (1 - 0.55) * per_share)
    assert at_share(base, 1.05)[0] == pytest.approx(full - 0.05 * per_share)  # a faster schedule makes more
    assert not at_share(base, 1.2)  # not known
    found = {(race.cell.label, race.where): race for race in races(results, list(cells(results)))}
    race = found["wpipe, optimistic", "text, p = 4, m = 4, hop 0"]
    loss = loss_of(run_named("wpipe", correction=OPTIMISTIC, settings=BEST, updates=100))
    assert race.gaps["1f1b"].mean == pytest.approx(loss - full - (1 - 4 / 7) * per_share)
    assert not race.time  # wpipe ran with one length only
    mixed = results | {"runs": [*results["runs"], run_named(BASE, correction=OPTIMISTIC).plain() | {"loss": 0.0}]}
    assert points_of(mixed, "text", BASE, OPTIMISTIC) == base  # which has other settings


def test_time_to_a_loss_is_that_of_its_share_of_updates() -> None:
    base = {0: [(0.5, 3.0), (1.0, 2.0), (1.1, 1.0)], 1: [(0.5, 3.0), (1.0, 1.0)]}
    points = {0: [(0.5, 2.5), (1.0, 1.5)], 1: [(0.5, 2.5), (1.0, 1.5)]}
    assert shares_to(points, base) == [0.75, math.inf]
    assert shares_to({0: [(0.5, 2.0), (1.0, 1.5)]}, base) == [0.5]


def test_tables_plots_and_targets() -> None:
    results = results_of(complete())
    shown = tables(results)
    assert shown.keys() == {"settings", "text", "checks", "candidates", "time"}
    assert "**0.2: " in shown["settings"]
    assert "| `wpipe` | plain | 0.5 | 3 |" in shown["text"]
    assert plots(results).keys() == {"delay.svg", "curves.svg"}
    assert missed(results | {"complete": False})[0].startswith("the plan is not complete")


AT_2P = [  # a tenth of their delays
    "text, wpipe fresh, m = 2p, optimistic: +0.0250 (+0.0250), at most 0.02 nats",
    "text, weave, m = 2p, optimistic: +0.0266 (+0.0266), at most 0.02 nats",
]


@pytest.mark.parametrize(
    ("method", "correction", "more", "lines"),
    [
        (BASE, PLAIN, 0.0, []),
        ("wpipe fresh, m = 2p", PLAIN, 0.01, []),  # asked with the optimistic step, and of m of 4p and more
        ("wpipe fresh, m = 4p", PLAIN, 0.01, ["text, wpipe fresh, m = 4p: +0.0225 (+0.0225), at most 0.02 nats"]),
        ("weave, m = 4p", OPTIMISTIC, math.inf, ["text, weave, m = 4p, optimistic: 5 of 5 seeds diverged"]),
        ("wpipe fresh, m = 8p", PLAIN, 0.01, ["text, wpipe fresh, m = 8p: 0.16 of the gap of 2bw, at most 0.1"]),
        (
            *("wpipe", OPTIMISTIC, 0.4),
            [
                f"equal time, text, p = {p}, m = {p}, hop 0, wpipe, optimistic: {gap:+.3f} ({gap:+.3f}) to {opponent}"
                for p, opponent, gap in (
                    *((4, "1f1b", 0.236), (4, "zb-h1", 0.35)),
                    *((8, "1f1b", 0.225), (8, "zb-h1", 0.337)),  # loses 0.45, and 0.225 for being faster than 1f1b
                )
            ],
        ),
    ],
)
def test_every_target_can_be_missed(method: str, correction: str, more: float, lines: list[str]) -> None:
    found = complete()
    for run in found:
        if (run.method, run.correction) == (method, correction) and run.seed != TUNING_SEED:
            found[run] = loss_of(run) + more if math.isfinite(more) else None
    even = [case for case in known_periods() if case["costs"] == "hop 0"]
    assert sorted(missed(results_of(found, periods=even))) == sorted([*AT_2P, *lines])


def test_answers_are_judged_by_the_points_lost() -> None:
    """A tenth of the gap here: 0.25 points of `wpipe` with m = 2p are fewer than 0.3."""
    found = {replace(run, study="qqp"): loss for run, loss in complete().items()}
    changes: dict[str, Any] = {"studies": {"qqp": {"updates": 100}}, "periods": []}
    assert not missed(results_of(found, **changes))
    for run in found:
        if (run.method, run.correction) == ("weave, m = 2p", PLAIN) and run.seed != TUNING_SEED:
            found[run] = loss_of(run) + 0.01
    assert missed(results_of(found, **changes)) == ["qqp, weave, m = 2p: +0.4 (+0.4) points lost, at most 0.3"]


def test_candidates_are_compared_at_their_best() -> None:
    """With synchronous training, too, which has the same if that changes it."""
    found = complete()
    for run in found:
        if run.correction in ("gapaware", OPTIMISTIC):
            found[run] = loss_of(run) + (0.25 if run.correction == "gapaware" else -0.5)
        if run.correction == "predicted":
            found[run] = None
    rows = {row.split(" | ")[0].strip("| "): row for row in tables(results_of(found))["candidates"].splitlines()}
    assert rows[PLAIN].endswith("| 0.2, 0.95 | 2.300 | +0.000 | 2.250 | +0.050 |")
    assert rows[OPTIMISTIC].endswith("| 1.800 | -0.500 | 1.750 | +0.050 |")
    assert rows["gapaware"].endswith("| 2.650 | +0.350 | 2.250 | +0.400 |")
    assert rows["predicted"].endswith("| diverged | – | 2.250 | – |")
    assert rows["nadamw"].endswith("| 0.2, 0.95 | 2.400 | +0.100 | 2.350 | +0.050 |")


def test_recorded_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second command adds what the first one left, whatever partial results a killed one has stored."""
    monkeypatch.setattr("benchmarks.convergence.measure.STUDIES", {"text": replace(STUDY, files=())})
    made: list[Run] = []

    def trains(runs: list[Run], *, quick: bool, until: float) -> Any:
        for run in runs[:40]:
            made.append(run)
            yield run, {"loss": loss_of(run), "metric": 0.5, "curve": []}

    monkeypatch.setattr("benchmarks.convergence.measure.train_all", trains)
    monkeypatch.setattr("benchmarks.convergence.measure.periods", list)
    whole = measure(quick=False, cache=ResumeCache(tmp_path / "partial.jsonl"))
    assert whole["complete"]
    head = {"environment": describe_environment("numpy", "torch"), "sources": sources_digest()}
    assert whole["parts"] == [head | {"runs": len(made)}]
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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "wpipe fresh, m = 2p" else pytest.mark.slow)
        for name, method in METHODS.items()
        if method.by_turns
    ],
)
def test_one_rank_learns_what_four_ranks_learn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many turns, `by_turns` methods read the same versions; to rounding, as sums have another order."""
    run = run_named(name, correction=OPTIMISTIC, settings=Settings(rate=0.01), updates=6)
    alone = train(run, quick=True)["loss"]
    monkeypatch.setitem(EVERY, name, replace(EVERY[name], by_turns=False))
    assert train(run, quick=True)["loss"] == pytest.approx(alone, rel=1e-5)
    turns = EVERY[name].turns  # with fewer late micro-batches, or none, the loss differs
    other = replace(EVERY[name], turns=2 * turns) if turns else EVERY["wpipe" if name == "1f1b" else BASE]
    monkeypatch.setitem(EVERY, name, replace(other, by_turns=True))
    assert abs(train(run, quick=True)["loss"] - alone) > 1e-4


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
    results = measure(quick=True, cache=ResumeCache()) | {"form": "quick", "environment": "a machine"}
    assert results["complete"]
    found = {(cell.method, cell.correction): cell for cell in cells(results)}
    assert found.keys() == {(name, made) for name, method in METHODS.items() for made in method.corrections}
    assert all(cell.losses and not cell.diverged for cell in found.values())
    assert tables(results).keys() >= {"settings", *QUICK}
