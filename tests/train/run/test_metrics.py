"""The lines of `metrics.jsonl`."""

import contextlib
import math
import resource
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.train.run import Evaluated, Metrics, Progress, StalenessSampled, Stepped, read_metrics


def progress(update: int, loss: float = 1.0) -> Progress:
    return Progress(updates=20, update=update, samples=2 * update, seconds=0.5, loss=loss)


def test_every_event_becomes_a_line(tmp_path: Path) -> None:
    sample = {"update": 3, "chunk": 0, "predicted": 0.1, "stale": 0.2}
    with Metrics(tmp_path, update=0, tensorboard=False) as metrics:
        metrics(Stepped(progress=progress(4)))
        metrics(Evaluated(progress=progress(4), metrics={"loss": 2.0, "accuracy": 0.5}, best=True))
        metrics(StalenessSampled(samples=(sample,)))
    train, evaluation, staleness = read_metrics(tmp_path / "metrics.jsonl")
    place = {"update": 4, "samples": 8, "seconds": 0.5}
    figures = ["loss", "lr", "samples_per_second", "bubble", "bubbles", "memory", "resident", "waited_for_data"]
    assert list(train) == ["kind", *place, *figures]
    assert list(replace(progress(4), norm=0.5).figures) == ["loss", "norm", *figures[1:]]
    assert evaluation == {"kind": "evaluation", **place, "loss": 2.0, "accuracy": 0.5}
    assert staleness == {"kind": "staleness", **sample}


def test_a_resumed_run_drops_the_lines_beyond_its_checkpoint(tmp_path: Path) -> None:
    with Metrics(tmp_path, update=0, tensorboard=False) as metrics:
        for update in (5, 10, 15):
            metrics(Stepped(progress=progress(update, loss=math.inf if update == 5 else 1.0)))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "upd')  # killed in the middle of a line
    with Metrics(tmp_path, update=10, tensorboard=False) as metrics:
        metrics(Evaluated(progress=progress(12), metrics={}, best=False))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    assert [(line["kind"], line["update"]) for line in lines] == [("train", 5), ("train", 10), ("evaluation", 12)]
    assert lines[0]["loss"] is None


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"update": 1}\nnonsense\n')
    with pytest.raises(WeftError, match=r"metrics.jsonl, line 2 is not JSON"):
        read_metrics(tmp_path / "metrics.jsonl")


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """A full disk, of this process alone: a write ends at the limit, and the next one fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_lines_wait_for_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "metrics.jsonl"
    with Metrics(tmp_path, update=0, tensorboard=False) as metrics:
        metrics(Stepped(progress=progress(1)))
        with file_size_limit(path.stat().st_size + 9):
            metrics(Stepped(progress=progress(2)))
            assert path.read_text().endswith('\n{"kind": ')
            metrics(Evaluated(progress=progress(2), metrics={"loss": 2.0}, best=True))
        assert [line["update"] for line in read_metrics(path)] == [1]
        metrics(Stepped(progress=progress(3)))
        metrics(Stepped(progress=progress(4)))
    lines = [(line["kind"], line["update"]) for line in read_metrics(path)]
    assert lines == [("train", 1), ("train", 2), ("evaluation", 2), ("train", 3), ("train", 4)]
    (said,) = capsys.readouterr().err.splitlines()
    assert said.endswith("metrics.jsonl can't be written: File too large; training goes on; lines are kept for later")


def test_lines_that_are_lost_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = Metrics(tmp_path, update=0, tensorboard=False)
    with file_size_limit(0), metrics:
        for update in (2, 3):
            metrics(Stepped(progress=progress(update)))
    assert "2 lines of" in capsys.readouterr().err.splitlines()[-1]


def test_problems_of_the_output_are_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems: dict[str, str] = {}
    monkeypatch.setattr("weft.train.run.metrics.output_problems", lambda: problems)
    with Metrics(tmp_path, update=0, tensorboard=False) as metrics:
        for update in range(1, 6):
            problems |= {2: {"stdout": "blocked"}, 4: {"stdout": "closed", "stderr": "closed"}}.get(update, {})
            metrics(Evaluated(progress=progress(update), metrics={}, best=False))
    said = [line for line in read_metrics(tmp_path / "metrics.jsonl") if line["kind"] == "output"]
    assert said == [
        {"kind": "output", "update": 2, "stream": "stdout", "problem": "blocked"},
        {"kind": "output", "update": 4, "stream": "stdout", "problem": "closed"},
        {"kind": "output", "update": 4, "stream": "stderr", "problem": "closed"},
    ]


def test_training_goes_on_without_tensorboard(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with Metrics(tmp_path, update=0, tensorboard=False) as metrics:
        metrics._tensorboard = types.SimpleNamespace(add_scalar=fail, flush=fail, close=fail)
        for update in (1, 2):
            metrics(Stepped(progress=progress(update)))
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert capsys.readouterr().err.count("TensorBoard events can't be written: No space left on device") == 1
