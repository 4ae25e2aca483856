"""Which command, in which state of a run's folder, does what: the table of docs/checkpoints.md, row by row."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.train.jobs import lines, summary, tiny, train, weights

from weft.cli import main
from weft.train.run import Folder, locked

RUN = Path("runs/tiny")
SHORT = {"train__updates": 8, "checkpoint__every": 4, "evaluate__every": 0, "checkpoint__keep": 3}


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be copied."""
    home = tmp_path_factory.mktemp("finished")
    assert train(log__folder=str(home), **SHORT) == 0
    return home / "tiny"


def new(source: Path) -> None:
    pass


def stopped(source: Path) -> None:
    """As a killed run leaves its folder: after update 4 of 8."""
    shutil.copytree(source, RUN)
    (RUN / "summary.json").unlink()
    shutil.rmtree(RUN / "checkpoints/update-00000008")
    (RUN / "checkpoints/latest").write_text("update-00000004\n")


def stopped_early(source: Path) -> None:
    """Killed before its first checkpoint."""
    stopped(source)
    shutil.rmtree(RUN / "checkpoints")
    (RUN / "checkpoints").mkdir()


def finished(source: Path) -> None:
    shutil.copytree(source, RUN)


def dangling(source: Path) -> None:
    """`latest` names a checkpoint that is gone."""
    stopped(source)
    (RUN / "checkpoints/latest").write_text("update-00000006\n")


def damaged(source: Path) -> None:
    """No checkpoint is valid."""
    stopped(source)
    (RUN / "checkpoints/update-00000004/state.json").write_text("{}")


def foreign(source: Path) -> None:
    RUN.mkdir(parents=True)
    (RUN / "thesis.tex").write_text("")


STATES: list[Callable[[Path], None]] = [new, stopped, stopped_early, finished, dangling, damaged, foreign]
START, REFUSE = "starts at 0", "refuses"
RESUME, NOTHING = "resumes at 4", "has nothing to do"
TABLE = {
    "train": [START, REFUSE, REFUSE, REFUSE, REFUSE, REFUSE, REFUSE],
    "--overwrite": [START, START, START, START, START, START, REFUSE],
    "--continue": [START, RESUME, START, NOTHING, RESUME, REFUSE, REFUSE],
    "--resume": [REFUSE, RESUME, START, REFUSE, RESUME, REFUSE, REFUSE],
}


def command(name: str) -> int:
    if name == "--resume":
        return main(["train", "--resume", "tiny"])
    options = [] if name == "train" else [name]
    return train(*options, **SHORT)


@pytest.mark.parametrize(
    ("name", "state", "does"),
    [(name, state, does) for name, row in TABLE.items() for state, does in zip(STATES, row, strict=True)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_a_command_in_a_state(
    name: str,
    state: Callable[[Path], None],
    does: str,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    state(finished_run)
    files = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"}
    capsys.readouterr()
    code = command(name)
    shown = capsys.readouterr()
    if does == REFUSE:
        assert code == 2
        assert len(shown.err.splitlines()) == 1
        after = {path: path.read_bytes() for path in RUN.rglob("*") if path.is_file() and path.name != "lock"}
        assert after == files
        assert RUN.exists() == (state is not new)
        return
    assert code == 0, shown.err
    if does == NOTHING:
        assert "finished" in shown.out
        assert (RUN / "invocation").read_bytes() == files[RUN / "invocation"]
        return
    assert summary(RUN)["update"] == 8
    assert ("using update-00000004, the newest valid checkpoint" in shown.err) == (state is dangling and does == RESUME)
    first = 1 if does == START else 5  # a display shows the first update after the start
    assert f"\nupdate {first}/8" in shown.out
    assert all((weights(RUN)[name] == tensor).all() for name, tensor in weights(finished_run).items())


@pytest.mark.parametrize("name", TABLE)
def test_a_run_with_an_owner_is_left_alone(
    name: str, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stopped(finished_run)
    with locked(RUN):
        assert command(name) == 2
        assert "runs/tiny belongs to another run at the moment (pid " in capsys.readouterr().err
    assert Folder(RUN).names() == ["update-00000004"]


def test_a_mistake_that_only_the_ranks_notice_keeps_the_earlier_run(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(finished_run)
    assert train("--overwrite", **SHORT, schedule__name="1f1b", schedule__cure="gapaware") == 2
    assert "GapAware is for chunks" in capsys.readouterr().err
    assert summary(RUN)["update"] == 8
    assert Folder(RUN).names() == ["update-00000004", "update-00000008"]


def test_a_name_is_used_whatever_latest_says(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    dangling(finished_run)
    assert main(["train", "--resume", "tiny", "--checkpoint", "update-00000004"]) == 0
    assert "newest valid" not in capsys.readouterr().err
    assert lines(RUN, "train")[-1]["update"] == 8
    assert main(["export", "tiny", "--checkpoint", "update-00000004"]) == 0


def test_more_updates_continue_a_finished_run(
    finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finished(finished_run)
    assert main(["train", "--continue", *tiny(schedule__virtual=True, **SHORT | {"train__updates": 12})]) == 0
    assert summary(RUN)["update"] == 12


def resume(*arguments: str) -> int:
    return main(["train", "--resume", "tiny", *arguments])


@pytest.fixture
def copied(finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    finished(finished_run)


@pytest.mark.usefixtures("copied")
def test_results_without_a_checkpoint_are_not_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    """A folder of checkpoints that is gone is no run before its first checkpoint."""
    shutil.rmtree(RUN / "checkpoints")
    assert resume("--set", "train.updates=12") == 2
    assert "has results, but no checkpoint" in capsys.readouterr().err
    assert summary(RUN)["update"] == 8


@pytest.mark.usefixtures("copied")
def test_a_run_does_not_end_before_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    assert resume("--set", "train.updates=6") == 2
    assert "8 updates, job: 6); raise train.updates" in capsys.readouterr().err
    assert summary(RUN)["updates"] == 8


@pytest.mark.usefixtures("copied")
def test_a_resumed_run_keeps_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert resume("--set", "name=other") == 2
    assert "--resume keeps the name" in capsys.readouterr().err


@pytest.mark.usefixtures("copied")
def test_a_run_is_no_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--resume", "tiny"]) == 2
    assert "runs/tiny is a single run; use weft train --resume runs/tiny" in capsys.readouterr().err
    (RUN / "choice.json").write_text("{}")
    assert resume("--set", "train.updates=12") == 2
    assert "runs/tiny is a comparison; use weft compare --resume runs/tiny" in capsys.readouterr().err
    assert main(["export", "tiny"]) == 2
    assert "export one of its runs" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"", None])
@pytest.mark.usefixtures("copied")
def test_whatever_latest_is_the_newest_valid_checkpoint_is_used(
    content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    latest = RUN / "checkpoints" / "latest"
    latest.unlink()
    latest.mkdir() if content is None else latest.write_bytes(content)
    assert main(["export", "tiny", "--checkpoint", "update-00000004"]) == 0
    assert "newest valid" not in capsys.readouterr().err
    assert main(["export", "tiny", "--checkpoint", "previous"]) == 0
    assert "update-00000004" in capsys.readouterr().out
    assert main(["export", "tiny"]) == 0
    captured = capsys.readouterr()
    assert "update-00000008" in captured.out
    assert "using update-00000008, the newest valid checkpoint" in captured.err


@pytest.mark.usefixtures("copied")
def test_broken_results_do_not_count(capsys: pytest.CaptureFixture[str]) -> None:
    (RUN / "summary.json").write_text("{")
    assert resume("--set", "train.updates=12") == 0
    assert "summary.json can't be read" in capsys.readouterr().err
    assert summary(RUN)["update"] == 12


@pytest.mark.usefixtures("copied")
def test_a_batch_larger_than_the_data_costs_no_earlier_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("--overwrite", **SHORT, data__samples=10) == 2
    assert "(train.batch: 16, samples: 10)" in capsys.readouterr().err
    assert Folder(RUN).names() == ["update-00000004", "update-00000008"]


@pytest.mark.usefixtures("copied")
def test_a_leftover_that_can_not_be_deleted_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    (RUN / "checkpoints" / ".update-00000004.part").mkdir()
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors=False: None)
    assert resume("--set", "train.updates=12") == 0
    assert summary(RUN)["update"] == 12
