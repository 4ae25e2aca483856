"""Convergence: its runs, their verdicts, and its quick form."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convergence.measure import best, beyond, measure
from benchmarks.convergence.pages import _panels, _rate, missed, plots, tables
from benchmarks.convergence.speed import rates, read_rates
from benchmarks.convergence.studies import METHODS, QUICK, STUDIES, SYNCHRONOUS, Run, comparisons, even_cut
from benchmarks.convergence.training import train
from benchmarks.convergence.verdicts import cells
from benchmarks.harness import ResumeCache
from weft.errors import WeftError
from weft.train.job import job_of, schedule_of


def run_of(method: str, ranks: int, **changes: Any) -> Run:
    known: dict[str, Any] = {"study": "text", "optimizer": "sgd", "rate": 0.1, "seed": 0}
    return Run(method=method, ranks=ranks, **(known | changes))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_run_is_a_job_with_as_many_samples_in_an_update(method: str, ranks: int, tmp_path: Path) -> None:
    if ranks not in METHODS[method].ranks:
        ranks = 2
    for file in ("text/tinyshakespeare.txt",):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("text")
    job = job_of(None, run_of(method, ranks).sets(STUDIES["text"], tmp_path))
    schedule = schedule_of(job)
    assert schedule.name == METHODS[method].schedule
    assert (schedule.stages * job.schedule.replicas, job.train.batch) == (ranks, STUDIES["text"].batch)
    assert sum(job.schedule.layers) == STUDIES["text"].layers
    wanted = ranks if METHODS[method].fixed else 2
    assert schedule.microbatches * job.schedule.replicas == wanted


def test_halves_are_cut_at_one_place() -> None:
    for layers in (8, 10, 16):
        for chunks in (2, 4, 8):
            parts = even_cut(layers, chunks)
            assert (sum(parts), sum(parts[: chunks // 2]), len(parts)) == (layers, layers // 2, chunks)
            assert min(parts) >= 1


def test_the_whole_form_has_every_method_on_every_size_and_three_seeds() -> None:
    runs = comparisons("text", STUDIES["text"], "adamw", 0.1, quick=False)
    asynchronous = [name for name, method in METHODS.items() if len(method.ranks) > 1]
    assert {(run.method, run.ranks) for run in runs} >= {(name, p) for name in asynchronous for p in (2, 4, 8)}
    assert all(sum(run.method == name and run.ranks == 2 for run in runs) >= 3 for name in METHODS)
    assert len({str(run) for run in runs}) == len(runs)


def test_missing_data_fails_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="WEFT_DATA"):
        run_of("wpipe", 2).sets(STUDIES["text"], tmp_path)


def test_sweep_continues_while_the_best_is_at_its_edge() -> None:
    assert best({0.1: 2.0, 0.2: 1.0, 0.4: None}) == 0.2
    assert beyond({0.1: 2.0, 0.2: 1.0, 0.4: None}) == []
    assert beyond({0.1: 2.0, 0.2: 1.0}) == [0.4]
    assert beyond({0.1: 1.0, 0.2: None}) == [0.05]


def results_of(losses: dict[str, list[float | None]]) -> dict[str, Any]:
    """Results in which synchronous training has the losses 1.0, 1.1 and 1.2, so a noise of 0.1."""
    known: dict[str, list[float | None]] = {SYNCHRONOUS: [1.0, 1.1, 1.2], **losses}
    runs = [
        vars(run_of(method, 2, seed=seed, optimizer=optimizer))
        | {"loss": loss, "metric": None if loss is None else 0.5, "curve": [2.0, loss]}
        for optimizer in ("sgd", "adamw")
        for method, by_seed in known.items()
        for seed, loss in enumerate(by_seed)
    ]
    study = {"title": "a text", "updates": 20, "batch": 4, "evaluated": 10}
    sweeps = {f"text, {optimizer}": {"0.05": 2.0, "0.1": 1.0, "0.2": None} for optimizer in ("sgd", "adamw")}
    return {"studies": {"text": study}, "sweeps": sweeps, "runs": runs, "environment": "a machine"}


def test_verdicts_follow_from_the_noise_of_seeds() -> None:
    losses: dict[str, list[float | None]] = {
        "wpipe": [1.05, 1.15, 1.25],
        "xpipe": [1.15, 1.25, 1.35],
        "2bw": [1.0, None, 1.2],
        "pipedream": [0.8, 0.9, 1.0],
    }
    results = results_of(losses)
    found = {cell.method: cell for cell in cells(results) if cell.optimizer == "sgd"}
    assert found["wpipe"].noise == pytest.approx(0.1)
    assert found["wpipe"].differences == pytest.approx([0.05] * 3)
    verdicts = {name: cell.verdict for name, cell in found.items()}
    assert verdicts == {
        SYNCHRONOUS: "within", "wpipe": "within", "xpipe": "worse", "2bw": "1 of 3 diverged", "pipedream": "better",
    }  # fmt: skip
    assert found["2bw"].curve == (2.0, None)
    lines = missed(results)
    assert len(lines) == 2  # of both optimizers
    assert all("xpipe" in line for line in lines)
    shown = tables(results)
    assert shown.keys() == {"rates", "text", "claim"}
    assert "+0.150 (+0.150 to +0.150)" in shown["text"]
    assert "**+1.5**" in shown["claim"]
    assert "0.2: diverged" in shown["rates"]


def test_tables_and_plots_of_the_whole_form() -> None:
    """Not every method runs on every number of ranks with every optimizer."""
    results = results_of({})
    results["runs"] = [
        vars(run) | {"loss": 1.0 + run.seed / 10, "metric": 0.5, "curve": [2.0, 1.0]}
        for optimizer in ("sgd", "adamw")
        for run in comparisons("text", STUDIES["text"], optimizer, 0.1, quick=False)
    ]
    assert "| wpipe, p = 8 |  |  |  |  | 1.100 ± 0.100 | 50.0 ± 0.0 % |" in tables(results)["text"]
    assert "xpipe, p = 8" in plots(results)["differences.svg"]
    results["sweeps"]["text, sgd"] = {"0.1": 2.0, "0.2": 1.0}
    assert missed(results) == ["text, sgd: the best rate is at the edge of the sweep"]


def test_plots_show_the_methods() -> None:
    found = plots(results_of({"wpipe": [1.05, 1.15, 1.25]}))
    assert found.keys() == {"differences.svg", "curves.svg"}
    assert all(">wpipe" in svg for svg in found.values())


def test_curves_over_time_are_of_methods_whose_rate_is_known() -> None:
    results = results_of({name: [1.0, 1.1, 1.2] for name in ("wpipe", "wpipe, predicted", "xpipe")})
    results["throughput"] = {"transformer": {"1f1b": 0.5, "wpipe": 0.8}, "resnext": {"xpipe": 0.9}}
    svg = plots(results)["time.svg"]
    assert "wpipe" in svg
    assert "predicted" not in svg
    assert "xpipe" not in svg  # its rate is that of another model
    found = _panels(results, list(cells(results)), partial(_rate, results))
    assert found.keys() == {"text, SGD, momentum", "text, AdamW"}
    # 20 updates in two parts, each point in the middle of its part
    assert [at for at, _ in found["text, AdamW"][SYNCHRONOUS]] == [10, 30]
    assert [at for at, _ in found["text, AdamW"]["wpipe"]] == [6.25, 18.75]
    assert {STUDIES[name].like for name in ("text", "qqp")} == {"transformer"}
    assert STUDIES["cifar10"].like == "resnext"


def test_rates_are_those_of_two_micro_batches_and_the_best_of_synchronous_training(tmp_path: Path) -> None:
    def size(**seconds: list[float]) -> dict[str, Any]:
        named = {name if name == "DDP" else f"weft {name.replace('_', ' ')}": times for name, times in seconds.items()}
        return {"limit": {name: [1.0] * 3 for name in named}, "seconds": named}

    sizes = {
        "2": size(gpipe=[2.0] * 3, wpipe=[1.25, 1.0, 2.0], DDP=[1.0] * 3),
        "8": size(gpipe=[2.5] * 3, interleaved=[1.6] * 3, wpipe=[1.0] * 3, xpipe=[1.0] * 3),
    }
    wanted = {"transformer": {"wpipe": 0.8, "1f1b": 0.625}}
    assert rates({"models": {"transformer": sizes}}) == wanted
    assert read_rates(tmp_path / "convergence") == read_rates(None) == {}
    (tmp_path / "throughput").mkdir()
    (tmp_path / "throughput/results.json").write_text(json.dumps({"models": {"transformer": sizes}}))
    assert read_rates(tmp_path / "convergence") == wanted


def test_diverged_synchronous_training_is_reported() -> None:
    """On every seed, in the first part of the run: nothing can be compared, and other methods are still shown."""
    results = results_of({SYNCHRONOUS: [None] * 3, "wpipe": [1.0, 1.1, 1.2]})
    for run in results["runs"]:
        if run["loss"] is None:
            run["curve"] = [None, None]
    assert (
        "| wpipe, p = 2 | synchronous training diverged | synchronous training diverged |" in tables(results)["claim"]
    )
    assert "no seed ended in both" in tables(results)["text"]
    assert all("synchronous training diverged" in line for line in missed(results))
    found = plots(results)
    assert found.keys() == {"curves.svg"}
    assert "wpipe" in found["curves.svg"]


def test_a_difference_without_noise_has_no_verdict() -> None:
    """One seed alone says nothing of the noise."""
    results = results_of({SYNCHRONOUS: [1.0], "wpipe": [1.1], "xpipe": [1.0]})
    shown = tables(results)["claim"]
    assert "| wpipe, p = 2 | noise unknown | noise unknown |" in shown
    assert "| xpipe, p = 2 | +0.0 | +0.0 |" in shown


@pytest.mark.slow
def test_diverged_run_ends_without_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other failure is an error."""
    found = train(run_of("wpipe", 2, rate=1e30), quick=True)
    assert (found["loss"], found["metric"], found["curve"][-1]) == (None, None, None)

    def fails(self: Any, *given: Any) -> None:
        raise WeftError("no luck")

    monkeypatch.setattr("weft.runtime.engine.worker.Worker._check_loss", fails)
    with pytest.raises(WeftError, match="no luck"):
        train(run_of("wpipe", 2), quick=True)


@pytest.mark.slow
def test_quick_form_trains_every_method() -> None:
    """Data parallelism is synchronous training, to the rounding of sums; nothing else is."""
    results = measure(quick=True, cache=ResumeCache())
    found = {(cell.method, cell.optimizer): cell for cell in cells(results)}
    assert {method for method, _ in found} == METHODS.keys()
    assert all(cell.losses and not cell.diverged for cell in found.values())
    for (method, _), cell in found.items():
        same = abs(cell.differences[0]) < 1e-6
        assert same == (method in (SYNCHRONOUS, "data parallelism")), method
    assert QUICK["text"].title in results["studies"]["text"]["title"]
