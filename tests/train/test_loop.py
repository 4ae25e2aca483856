"""A run on virtual ranks: what it leaves behind, how it goes on, when it stops."""

import json
import math
from pathlib import Path

import pytest
import torch
from tests.train.jobs import lines, weights, words

from weft.cli import main
from weft.train.job import job_of
from weft.train.optimizers import share


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(*more: str, **changes: object) -> int:
    return main(["train", *words(schedule__virtual=True, **changes), *more])


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_a_run_leaves_what_it_should(capsys: pytest.CaptureFixture[str]) -> None:
    assert train() == 0
    run = Path("runs/tiny")
    made = {"job.toml", "metrics.jsonl", "summary.json", "trace.json", "timeline.svg", "report.html", "checkpoints"}
    assert {one.name for one in run.iterdir()} == made
    out = capsys.readouterr().out
    assert "runs/tiny/report.html" in out
    assert "update 24/24" in out
    training, judged = lines(run, "train"), lines(run, "evaluation")
    assert [line["update"] for line in judged] == [8, 16, 24]
    assert training[-1]["update"] == 24
    assert training[-1]["samples"] == 24 * 16
    assert {"update", "samples", "seconds", "loss", "lr", "samples_per_second", "bubble", "memory"} <= set(training[0])
    assert judged[-1]["loss"] < judged[0]["loss"]
    assert 0 < judged[-1]["accuracy"] <= 1
    summary = json.loads((run / "summary.json").read_text())
    assert summary["how"] == "finished"
    assert summary["final"]["loss"] == judged[-1]["loss"]
    assert summary["delay"] == [1, 1, 0, 0]
    assert [one["rank"] for one in summary["ranks"]] == [0, 1]


def test_the_rate_is_that_of_the_schedule() -> None:
    train()
    job = job_of("runs/tiny/job.toml")
    for line in lines(Path("runs/tiny"), "train"):
        assert line["lr"] == job.train.lr * share(job.train, line["update"] - 1, 24)


def test_the_rate_rises_and_falls() -> None:
    job = job_of(None, ["train.warmup=4", "train.decay=linear", "train.floor=0.2"]).train
    assert [round(share(job, update, 12), 3) for update in (0, 3, 4, 8, 12)] == [0.2, 0.8, 1.0, 0.6, 0.2]
    cosine = job_of(None, ["train.warmup=0", "train.decay=cosine", "train.floor=0"]).train
    assert share(cosine, 5, 10) == pytest.approx(0.5)


@pytest.mark.parametrize("schedule", ["1f1b", "wpipe", "xpipe"])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(schedule: str) -> None:
    train(name="whole", schedule__name=schedule)
    train(name="half", schedule__name=schedule, train__updates=24, checkpoint__keep=5)
    run = Path("runs/half")
    (run / "checkpoints" / "latest").write_text("update-00000008\n")  # as if it had been killed in the second third
    (run / "summary.json").unlink()
    assert main(["train", "--resume", "half"]) == 0
    assert equal(weights(run), weights(Path("runs/whole")))
    whole, half = (lines(Path("runs") / name, "train") for name in ("whole", "half"))
    figures = ("update", "samples", "loss", "lr")
    assert [[line[one] for one in figures] for line in half] == [[line[one] for one in figures] for line in whole]
    assert lines(run, "evaluation")[-1]["loss"] == lines(Path("runs/whole"), "evaluation")[-1]["loss"]


def test_it_goes_on_under_another_schedule() -> None:
    train(schedule__ranks=4, schedule__microbatches=4, train__updates=8)
    before = lines(Path("runs/tiny"), "evaluation")[-1]["loss"]
    more = ["schedule.ranks=2", "schedule.name=1f1b", "train.updates=16"]
    assert main(["train", "--resume", "tiny", *(word for one in more for word in ("--set", one))]) == 0
    judged = lines(Path("runs/tiny"), "evaluation")
    assert [line["update"] for line in judged] == [8, 16]
    assert judged[-1]["loss"] < before


def test_what_belongs_to_the_state_can_not_be_changed(capsys: pytest.CaptureFixture[str]) -> None:
    """And a refusal leaves the run as it was."""
    train(train__updates=8)
    before = Path("runs/tiny/job.toml").read_text()
    assert main(["train", "--resume", "tiny", "--set", "train.lr=0.5", "--set", "train.updates=16"]) == 2
    assert "train.lr is a part of the checkpoint" in capsys.readouterr().err
    assert Path("runs/tiny/job.toml").read_text() == before


def test_a_finished_run_keeps_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    train(train__updates=8)
    before = Path("runs/tiny/summary.json").read_text()
    assert main(["train", "--resume", "tiny"]) == 2
    assert "runs/tiny is finished (updates: 8)" in capsys.readouterr().err
    assert train("--continue", train__updates=8) == 0
    assert "runs/tiny/report.html" in capsys.readouterr().out
    assert Path("runs/tiny/summary.json").read_text() == before


def test_continue_begins_and_goes_on(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train("--continue", train__updates=8)
    assert train("--continue", train__updates=16) == 0
    assert [line["update"] for line in lines(Path("runs/tiny"), "evaluation")] == [8, 16]
    assert train("--continue", name="") == 2
    assert "needs a name" in capsys.readouterr().err
    assert train("--continue", "--resume", "tiny") == 2


def test_the_cut_of_a_resumed_run_is_that_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured times differ; here the second measurement would cut elsewhere."""
    times = [1.0] * 9
    monkeypatch.setattr("weft.runtime.partition.balance.layer_seconds", lambda layers, example: times)
    train(schedule__balance="time", train__updates=8)
    assert json.loads(Path("runs/tiny/summary.json").read_text())["layers"] == [3, 2, 2, 2]
    times[:3] = [9.0] * 3
    assert main(["train", "--resume", "tiny", "--set", "train.updates=16"]) == 0
    assert json.loads(Path("runs/tiny/summary.json").read_text())["layers"] == [3, 2, 2, 2]


def test_a_run_that_never_began_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake that only ranks can see; mended, the same name is free."""
    assert train(schedule__name="xpipe", train__clip_norm=1.0) == 2
    assert "clip_norm needs one norm" in capsys.readouterr().err
    assert not Path("runs/tiny").exists()
    assert train(train__updates=4) == 0
    assert train("--overwrite", train__updates=4, train__clip_norm=1.0, schedule__name="xpipe") == 2


def test_restarts_are_for_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--max-restarts", "2") == 2
    assert "--max-restarts is for the processes that weft starts" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_refused_and_the_one_before_is_used_if_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train(checkpoint__keep=3)
    damaged = Path("runs/tiny/checkpoints/update-00000024/chunk-001.safetensors")
    damaged.write_bytes(damaged.read_bytes()[:-1])
    more = ["--set", "train.updates=32"]
    assert main(["train", "--resume", "tiny", *more]) == 2
    told = capsys.readouterr().err
    assert "chunk-001.safetensors has another size" in told
    assert "--checkpoint previous" in told
    assert main(["train", "--resume", "tiny", "--checkpoint", "previous", *more]) == 0
    assert [line["update"] for line in lines(Path("runs/tiny"), "evaluation")] == [8, 16, 24, 32]
    names = {one.name for one in Path("runs/tiny/checkpoints").iterdir()}
    assert "aside-update-00000024" in names  # of the way that was not gone; not lost, and not in the way
    assert {"update-00000024", "update-00000032"} <= names


def test_a_loss_that_is_not_finite_ends_no_run() -> None:
    """With nan = skip a run may diverge; all that it leaves is still JSON, and a page."""
    more = {"train__lr": 1e30, "train__warmup": 0, "train__nan": "skip", "train__optimizer": "sgd"}
    assert train(**more) == 0
    summary = json.loads(Path("runs/tiny/summary.json").read_text())
    assert summary["final"]["loss"] is None
    assert summary["skipped"] > 0
    assert Path("runs/tiny/report.html").exists()


def test_the_best_is_kept_and_patience_ends_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """A rate that is far too high makes the loss worse at once."""
    more = {"train__lr": 1.0, "train__warmup": 0, "train__updates": 80, "train__optimizer": "sgd", "train__nan": "skip"}
    assert train(evaluate__patience=2, evaluate__every=4, checkpoint__every=0, **more) == 0
    judged = [line["loss"] or math.inf for line in lines(Path("runs/tiny"), "evaluation")]
    assert len(judged) < 20
    best = judged.index(min(judged))
    assert len(judged) == best + 3
    checkpoints = Path("runs/tiny/checkpoints")
    assert (checkpoints / "best").read_text().strip() == f"update-{4 * (best + 1):08}"
    assert "stopped early" in capsys.readouterr().out
    weights_then = weights(Path("runs/tiny"))
    assert main(["train", "--resume", "tiny", "--checkpoint", "latest"]) == 0  # it is tired still, and makes no update
    assert equal(weights(Path("runs/tiny")), weights_then)
    assert len(lines(Path("runs/tiny"), "evaluation")) == len(judged)
    assert (checkpoints / "best").read_text() != (checkpoints / "latest").read_text()


def test_old_checkpoints_go_and_the_newest_stay() -> None:
    train(checkpoint__every=4, evaluate__every=0, checkpoint__keep=3)
    names = sorted(one.name for one in Path("runs/tiny/checkpoints").iterdir())
    assert names == ["best", "latest", "update-00000016", "update-00000020", "update-00000024"]


def test_staleness_and_events_are_written() -> None:
    train(log__telemetry=4, log__tensorboard=True, schedule__name="xpipe")
    found = lines(Path("runs/tiny"), "staleness")
    assert {line["chunk"] for line in found} == {0, 1}
    assert "samples" not in json.loads(Path("runs/tiny/summary.json").read_text())["ranks"][0]["chunks"][0]
    assert [line["update"] for line in found if line["chunk"] == 0] == [1, 5, 9, 13, 17, 21]
    assert list(Path("runs/tiny/events").glob("events.*"))


def test_a_language_model_writes() -> None:
    Path("abc.txt").write_text("abcdefgh" * 200)
    Path("words.toml").write_text(
        """
        name = "words"
        model = {name = "gpt", size = "tiny"}
        data = {name = "text", path = "abc.txt", context = 16}
        schedule = {ranks = 2, virtual = true}
        train = {updates = 50, batch = 8, lr = 0.01, warmup = 4}
        log = {sample = 12, prompt = "cde"}
        """
    )
    assert main(["train", "words.toml"]) == 0
    summary = json.loads(Path("runs/words/summary.json").read_text())
    assert summary["final"]["perplexity"] == pytest.approx(math.exp(summary["final"]["loss"]))
    assert summary["entropy"] == pytest.approx(math.log(8), rel=1e-3)
    text = Path("runs/words/sample.txt").read_text()
    assert text.startswith("cde")
    assert len(text) == 15
    assert set(text) <= set("abcdefgh")  # of 256 bytes


def test_replicas_share_the_batch() -> None:
    train(schedule__replicas=2, schedule__ranks=4, train__updates=8)
    assert len(json.loads(Path("runs/tiny/summary.json").read_text())["ranks"]) == 4
