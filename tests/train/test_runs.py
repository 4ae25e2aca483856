"""Runs of jobs on virtual ranks: the files they write, how they resume, when they stop."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from tests.train.jobs import TINY, lines, same, summary, train, weights
from torch import nn

from weft.cli import main
from weft.train.job import job_of
from weft.train.optimizers import rate_factor

RUN = Path("runs/tiny")


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_writes_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    files = {"job.toml", "metrics.jsonl", "summary.json", "trace.json", "timeline.svg", "report.html", "checkpoints"}
    files |= {"invocation", "lock", "status"}
    assert {path.name for path in RUN.iterdir()} == files
    out = capsys.readouterr().out
    assert "runs/tiny/report.html" in out
    assert "update 24/24" in out
    training, evaluations = lines(RUN, "train"), lines(RUN, "evaluation")
    assert [line["update"] for line in evaluations] == [8, 16, 24]
    assert training[-1]["update"] == 24
    assert training[-1]["samples"] == 24 * 16
    assert {"update", "samples", "seconds", "loss", "lr", "samples_per_second", "bubble", "memory"} <= set(training[0])
    assert len(training[-1]["resident"]) == 1  # process
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert 0 < evaluations[-1]["accuracy"] <= 1
    result = summary(RUN)
    assert result["how"] == "finished"
    assert result["final"]["loss"] == evaluations[-1]["loss"]
    assert result["delay"] == [1, 1, 0, 0]
    sizes = [chunk["parameters"] for rank in result["ranks"] for chunk in rank["chunks"]]
    assert result["mean_delay"] == (sizes[0] + sizes[2]) / sum(sizes) / 2  # half of the micro-batches, in G0
    assert result["slack"] == {"messages": 0, "ranks": [0, 0]}
    assert re.search(r"^slack +0 forwards$", out, re.MULTILINE)
    page = (RUN / "report.html").read_text()
    assert "mean delay" in page
    assert "<dt>slack</dt><dd>0 forwards</dd>" in page
    assert [rank["rank"] for rank in result["ranks"]] == [0, 1]
    assert [rank["resident"]["ranks"] for rank in result["ranks"]] == [2, 2]
    assert "Resident set of each process" in page


def test_the_learning_rate_is_that_of_the_schedule() -> None:
    train()
    job = job_of("runs/tiny/job.toml")
    for line in lines(RUN, "train"):
        assert line["lr"] == job.train.lr * rate_factor(job.train, line["update"] - 1, 24)


def test_the_learning_rate_rises_and_falls() -> None:
    linear = job_of(None, ["train.warmup=4", "train.decay=linear", "train.floor=0.2"]).train
    assert [round(rate_factor(linear, update, 12), 3) for update in (0, 3, 4, 8, 12)] == [0.2, 0.8, 1.0, 0.6, 0.2]
    cosine = job_of(None, ["train.warmup=0", "train.decay=cosine", "train.floor=0"]).train
    assert rate_factor(cosine, 5, 10) == pytest.approx(0.5)


@pytest.mark.parametrize(("schedule", "fresh"), [("1f1b", False), ("wpipe", False), ("wpipe", True), ("xpipe", False)])
def test_a_resumed_run_is_identical_to_an_uninterrupted_one(schedule: str, fresh: bool) -> None:
    chosen = {"schedule__name": schedule, "schedule__fresh": fresh}
    train(name="uninterrupted", **chosen)
    train(name="resumed", train__updates=24, checkpoint__keep=5, **chosen)
    uninterrupted, resumed = Path("runs/uninterrupted"), Path("runs/resumed")
    (resumed / "checkpoints" / "latest").write_text("update-00000008\n")  # as if killed before the second checkpoint
    (resumed / "summary.json").unlink()
    assert main(["train", "--resume", "resumed"]) == 0
    assert same(weights(resumed), weights(uninterrupted))
    figures = [
        [[line[name] for name in ("update", "samples", "loss", "lr")] for line in lines(run, "train")]
        for run in (uninterrupted, resumed)
    ]
    assert figures[0] == figures[1]
    assert lines(resumed, "evaluation")[-1]["loss"] == lines(uninterrupted, "evaluation")[-1]["loss"]


def test_a_resumed_run_initializes_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    initialized: list[nn.Linear] = []
    reset = nn.Linear.reset_parameters

    def record(linear: nn.Linear) -> None:
        reset(linear)
        if not linear.weight.is_meta:
            initialized.append(linear)

    monkeypatch.setattr(nn.Linear, "reset_parameters", record)
    assert train(train__updates=8) == 0
    assert len(initialized) == 9
    assert train("--continue", train__updates=16) == 0
    assert len(initialized) == 9


META_MODEL = """
import weft
from torch import nn

def build(spec):
    with weft.on_meta():
        return [nn.Linear(spec.features, 8), *(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, spec.classes)]
"""


def test_a_run_of_a_custom_model_on_the_meta_device() -> None:
    """Its weights depend on nothing but the job, and a resumed run is identical."""
    Path("meta_model.py").write_text(META_MODEL)
    changed = {"model.name": "meta_model.py:build", "train.updates": 8, "checkpoint.every": 4, "evaluate.every": 4}
    data = {key: value for key, value in TINY.items() if not key.startswith("model.")}

    def run(name: str, *more: str, **changes: Any) -> dict[str, Any]:
        settings = data | changed | {"name": name, "schedule.virtual": True} | changes
        sets = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
        assert main(["train", *sets, *more]) == 0
        return weights(Path("runs") / name)

    whole = run("whole")
    assert same(run("again"), whole)
    run("resumed", **{"train.updates": 4})
    assert same(run("resumed", "--continue"), whole)


def test_a_run_of_an_earlier_weft_goes_on_with_autocast() -> None:
    """Its job has no format; then bf16 meant autocast, without masters."""
    assert train(train__precision="bf16", train__updates=8) == 0
    assert all(rank["bytes"]["masters"] == 2 * rank["bytes"]["weights"] > 0 for rank in summary(RUN)["ranks"])
    file = RUN / "job.toml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if not line.startswith("format = ")))
    assert main(["train", "--resume", "tiny", "--set", "train.updates=16"]) == 0
    assert job_of(str(file)).train.precision == "bf16-autocast"
    assert all(rank["bytes"]["masters"] == 0 for rank in summary(RUN)["ranks"])


def test_a_run_resumes_under_another_schedule() -> None:
    train(schedule__ranks=4, schedule__microbatches=4, train__updates=8)
    before = lines(RUN, "evaluation")[-1]["loss"]
    sets = ["schedule.ranks=2", "schedule.name=1f1b", "train.updates=16"]
    assert main(["train", "--resume", "tiny", *(word for setting in sets for word in ("--set", setting))]) == 0
    evaluations = lines(RUN, "evaluation")
    assert [line["update"] for line in evaluations] == [8, 16]
    assert evaluations[-1]["loss"] < before


def test_settings_of_the_optimizer_state_are_fixed(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused change leaves the run as it was."""
    train(train__updates=8)
    before = (RUN / "job.toml").read_text()
    assert main(["train", "--resume", "tiny", "--set", "train.lr=0.5", "--set", "train.updates=16"]) == 2
    assert "train.lr is part of the checkpoint" in capsys.readouterr().err
    assert (RUN / "job.toml").read_text() == before


def test_a_finished_run_keeps_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    train(train__updates=8)
    before = (RUN / "summary.json").read_text()
    assert main(["train", "--resume", "tiny"]) == 2
    assert "runs/tiny is finished (updates: 8)" in capsys.readouterr().err
    assert train("--continue", train__updates=8) == 0
    assert "runs/tiny/report.html" in capsys.readouterr().out
    assert (RUN / "summary.json").read_text() == before


def test_continue_starts_and_resumes(capsys: pytest.CaptureFixture[str]) -> None:
    train("--continue", train__updates=8)
    assert train("--continue", train__updates=16) == 0
    assert [line["update"] for line in lines(RUN, "evaluation")] == [8, 16]
    assert train("--continue", name="") == 2
    assert "needs a name" in capsys.readouterr().err
    assert train("--continue", "--resume", "tiny") == 2


def test_a_resumed_run_keeps_its_partition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times differ; here the second measurement would give another partition."""
    times = [1.0] * 9
    monkeypatch.setattr("weft.runtime.partition.balance.layer_seconds", lambda layers, example, **options: times)
    train(schedule__balance="time", train__updates=8)
    assert summary(RUN)["layers"] == [3, 2, 2, 2]
    times[:3] = [9.0] * 3
    assert main(["train", "--resume", "tiny", "--set", "train.updates=16"]) == 0
    assert summary(RUN)["layers"] == [3, 2, 2, 2]


def test_a_run_that_never_started_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake that only ranks notice; when it is fixed, the same name is free."""
    assert train(schedule__name="1f1b", schedule__cure="gapaware") == 2
    assert "GapAware is for chunks" in capsys.readouterr().err
    assert not RUN.exists()
    assert train(train__updates=4) == 0
    assert train("--overwrite", train__updates=4, schedule__cure="gapaware", schedule__name="1f1b") == 2


def test_restarts_are_for_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--max-restarts", "2") == 2
    assert "--max-restarts is for the processes that weft starts" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    """By name it is refused; without a name the newest valid one is used, with a warning."""
    train(checkpoint__keep=3)
    damaged = RUN / "checkpoints/update-00000024/chunk-001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    more = ["--set", "train.updates=32"]
    assert main(["train", "--resume", "tiny", "--checkpoint", "update-00000024", *more]) == 2
    assert "chunk-001.safetensors has another size" in capsys.readouterr().err
    assert main(["train", "--resume", "tiny", *more]) == 0
    err = capsys.readouterr().err
    assert "chunk-001.safetensors has another size" in err
    assert "using update-00000016, the newest valid checkpoint" in err
    assert [line["update"] for line in lines(RUN, "evaluation")] == [8, 16, 24, 32]
    names = {path.name for path in (RUN / "checkpoints").iterdir()}
    assert "aside-update-00000024" in names  # the checkpoint that the resumed run replaced is not lost
    assert {"update-00000024", "update-00000032"} <= names


DIVERGING = {"train__lr": 1e30, "train__warmup": 0, "train__nan": "skip", "train__optimizer": "sgd"}


def test_a_run_that_only_skips_ends_as_diverged(capsys: pytest.CaptureFixture[str]) -> None:
    assert train(**DIVERGING, schedule__fresh=False) == 2
    place = "weft: rank 0, chunk 0, mini-batch 10, update: 10 mini-batches in a row were skipped"
    assert place in capsys.readouterr().err
    assert not (RUN / "summary.json").exists()


def test_a_diverged_run_ends_well() -> None:
    """With nan = skip and many skips a run may diverge; its files are still valid."""
    assert train(**DIVERGING, train__max_skips=1000) == 0
    result = summary(RUN)
    assert result["final"]["loss"] is None
    assert result["skipped"] > 0
    assert (RUN / "report.html").exists()


def test_the_best_is_kept_and_patience_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A learning rate that is far too high makes the loss worse at once."""
    changes = {"train__lr": 1.0, "train__warmup": 0, "train__updates": 80, "train__optimizer": "sgd"}
    changes |= {"train__nan": "skip", "evaluate__patience": 2, "evaluate__every": 4, "checkpoint__every": 0}
    assert train(**changes) == 0
    losses = [line["loss"] or math.inf for line in lines(RUN, "evaluation")]
    assert len(losses) < 20
    best = losses.index(min(losses))
    assert len(losses) == best + 3
    checkpoints = RUN / "checkpoints"
    assert (checkpoints / "best").read_text().strip() == f"update-{4 * (best + 1):08}"
    assert "stopped early" in capsys.readouterr().out
    before = weights(RUN)
    assert main(["train", "--resume", "tiny", "--checkpoint", "latest"]) == 0  # still out of patience: no update
    assert same(weights(RUN), before)
    assert len(lines(RUN, "evaluation")) == len(losses)
    assert (checkpoints / "best").read_text() != (checkpoints / "latest").read_text()


def test_the_newest_checkpoints_are_kept() -> None:
    train(checkpoint__every=4, evaluate__every=0, checkpoint__keep=3)
    names = sorted(path.name for path in (RUN / "checkpoints").iterdir())
    assert names == ["best", "latest", "update-00000016", "update-00000020", "update-00000024"]


def test_staleness_and_events_are_written() -> None:
    train(log__telemetry=4, log__tensorboard=True, schedule__name="xpipe")
    samples = lines(RUN, "staleness")
    assert {line["chunk"] for line in samples} == {0, 1}
    assert "samples" not in summary(RUN)["ranks"][0]["chunks"][0]
    assert [line["update"] for line in samples if line["chunk"] == 0] == [1, 5, 9, 13, 17, 21]
    assert list((RUN / "events").glob("events.*"))


def test_a_language_model_generates_text() -> None:
    Path("abc.txt").write_text("abcdefgh" * 200)
    Path("text.toml").write_text(
        """
        name = "text"
        model = {name = "gpt", size = "tiny"}
        data = {name = "text", path = "abc.txt", context = 16}
        schedule = {ranks = 2, virtual = true}
        train = {updates = 50, batch = 8, lr = 0.01, warmup = 4}
        log = {sample = 12, prompt = "cde"}
        """
    )
    assert main(["train", "text.toml"]) == 0
    result = summary(Path("runs/text"))
    assert result["final"]["perplexity"] == pytest.approx(math.exp(result["final"]["loss"]))
    assert result["entropy"] == pytest.approx(math.log(8), rel=1e-3)
    text = Path("runs/text/sample.txt").read_text()
    assert text.startswith("cde")
    assert len(text) == 15
    assert set(text) <= set("abcdefgh")  # of 256 bytes


def test_replicas_share_the_batch() -> None:
    train(schedule__replicas=2, schedule__ranks=4, train__updates=8)
    assert len(summary(RUN)["ranks"]) == 4


def test_a_checkpoint_carries_the_state_under_these_keys() -> None:
    """Checkpoints of earlier versions have the same keys, except data, and are resumed."""
    train(train__updates=8)
    state = json.loads((RUN / "checkpoints/update-00000008/state.json").read_text())["extra"]
    assert list(state) == ["update", "seconds", "judge", "layers", "fixed", "data"]
    assert list(state["judge"]) == ["last", "best", "worse"]
    assert list(state["judge"]["best"]) == ["update", "samples", "seconds", "value"]
    assert list(state["fixed"]) == ["batch", "lr", "momentum", "betas", "weight_decay"]
    assert list(state["data"]) == ["train", "validation", "order"]
    assert list(state["data"]["train"]) == ["samples", "targets", "inputs"]
