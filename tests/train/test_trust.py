"""Code that the folder of another user names is not imported without consent."""

import os
import shutil
from pathlib import Path

import pytest
from tests.train.jobs import lines, tiny, train

from weft.cli import main
from weft.train.job import job_of, user_code_of

RUN = Path("runs/tiny")
STRANGER = 54321  # no user has this number
CODE = """
from pathlib import Path

import torch
import weft

Path("imported").touch()

def order(**sizes):
    return weft.schedule("1f1b", **sizes)

def optimizer(params, lr):
    return torch.optim.SGD(params, lr=lr)
"""
MORE = ("--set", "train.updates=16")
OWN = {"schedule__name": "code.py:order", "train__optimizer": "code.py:optimizer", "train__updates": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose job names code, and one whose job does not."""
    home = tmp_path_factory.mktemp("made")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        Path("code.py").write_text(CODE)
        assert train(**OWN) == 0
        assert Path("imported").exists()
        assert train(name="plain", train__updates=8) == 0
        shutil.copytree("runs/tiny", "runs/copied")
        Path("runs/copied/choice.json").write_text("{}")
    return home


@pytest.fixture(autouse=True)
def _in_folder(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    forget()


def forget() -> None:
    Path("imported").unlink(missing_ok=True)


def imported() -> bool:
    return Path("imported").exists()


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch) -> None:
    """All folders belong to another user."""
    monkeypatch.setattr("weft.train.trust.os.geteuid", lambda: STRANGER)


COMMANDS = {
    "train --resume": ["train", "--resume", "tiny", *MORE],
    "print-config": ["train", "--resume", "tiny", "--print-config"],
    "export": ["export", "tiny"],
    "compare --resume": ["compare", "--resume", "copied", "--schedules", "1f1b"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("stranger")
def test_code_of_another_user_needs_consent(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(COMMANDS[command]) == 2
    assert not imported()
    (err,) = capsys.readouterr().err.splitlines()
    assert err.startswith(("weft: runs/tiny belongs to ", "weft: runs/copied belongs to "))
    assert f"not to you (user {STRANGER})" in err
    assert "schedule.name=code.py:order, train.optimizer=code.py:optimizer" in err
    assert "--trust" in err
    assert main([*COMMANDS[command], "--trust"]) == 0
    assert imported()


@pytest.mark.parametrize("command", COMMANDS)
def test_own_code_needs_none(command: str) -> None:
    assert main(COMMANDS[command]) == 0
    assert imported()


@pytest.mark.usefixtures("stranger")
def test_a_run_of_another_user_that_names_no_code_needs_none() -> None:
    assert main(["train", "--resume", "plain", *MORE]) == 0
    assert main(["export", "plain"]) == 0


@pytest.mark.usefixtures("stranger")
def test_what_the_command_sets_is_not_foreign(capsys: pytest.CaptureFixture[str]) -> None:
    """The user names the code, or replaces it by something that is none."""
    sets = ["--set", "schedule.name=1f1b"]
    assert main(["train", "--resume", "tiny", *MORE, *sets]) == 2
    assert "imported: train.optimizer=code.py:optimizer;" in capsys.readouterr().err
    shutil.copy("code.py", "own.py")
    assert main(["train", "--resume", "tiny", *MORE, *sets, "--set", "train.optimizer=own.py:optimizer"]) == 0


@pytest.mark.usefixtures("stranger")
def test_continue_runs_the_job_that_it_is_given() -> None:
    """It only reads when the run would end, whatever code its job names."""
    assert train("--continue", train__updates=16, train__optimizer="sgd", schedule__name="1f1b") == 0
    assert not imported()
    assert [line["update"] for line in lines(RUN, "evaluation")] == [8, 16]


def test_a_comparison_names_schedules_in_a_file_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main(["compare", *tiny(name="compared", schedule__virtual=True, train__updates=4), "--schedules", "1f1b"]) == 0
    )
    choice = Path("runs/compared/choice.json")
    choice.write_text(choice.read_text().replace('"1f1b"', '"1f1b", "code.py:order"'))
    monkeypatch.setattr("weft.train.trust.os.geteuid", lambda: STRANGER)
    assert main(["compare", "--resume", "compared"]) == 2
    assert "schedules[1]=code.py:order" in capsys.readouterr().err
    assert not imported()
    assert main(["compare", "--resume", "compared", "--trust"]) == 0
    assert imported()


@pytest.mark.parametrize("path", ["runs/tiny", "runs/tiny/job.toml"])
def test_the_owner_of_the_folder_and_of_its_job_counts(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    os.chown(path, STRANGER, -1)
    assert main(["export", "tiny"]) == 2
    assert f"{path} belongs to user {STRANGER}, not to you (" in capsys.readouterr().err
    assert not imported()
    os.chown(path, os.geteuid(), -1)
    assert main(["export", "tiny"]) == 0


def test_the_keys_that_name_code() -> None:
    assert user_code_of(job_of(None)) == {}
    for key in ("model.name", "data.name", "train.optimizer"):
        for name in ("package.module:function", "file.py:function"):
            assert user_code_of(job_of(None, [f"{key}={name}"])) == {key: name}
    sets = ["schedule.name=code.py:order", "schedule.ranks=2", "train.optimizer=a.b:c"]
    assert user_code_of(job_of(None, sets)) == {"schedule.name": "code.py:order", "train.optimizer": "a.b:c"}
    Path("a:b.csv").write_text("0F0,0B0\n")
    assert user_code_of(job_of(None, ["schedule.name=a:b.csv", "schedule.ranks=1"])) == {}
