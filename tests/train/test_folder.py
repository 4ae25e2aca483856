"""Runs and their checkpoints on disk: what is there is found, what is not is told, and nothing is written over."""

from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.train.job import job_of
from weft.train.run.folder import Folder, new_folder, run_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    made = Folder("runs/one")
    made.write_job(job_of(None))
    return made


def land(folder: Folder, update: int, *, best: bool = False, keep: int = 2) -> str:
    path = folder.next(update)
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    folder.publish(path, best=best, keep=keep)
    return path.name


def test_the_newest_and_the_best_stay(folder: Folder) -> None:
    for update in (10, 20, 30, 40, 50):
        land(folder, update, best=update == 20)
    assert folder.names() == ["update-00000020", "update-00000040", "update-00000050"]
    assert {which: folder.find(which) for which in ("latest", "previous", "best", "update-00000040")} == {
        "latest": folder.checkpoints / "update-00000050",
        "previous": folder.checkpoints / "update-00000040",
        "best": folder.checkpoints / "update-00000020",
        "update-00000040": folder.checkpoints / "update-00000040",
    }


def test_a_place_is_never_used_twice(folder: Folder) -> None:
    """A run that was killed between a checkpoint and `latest` saves the same update again."""
    assert [land(folder, 10, keep=9) for _ in range(3)] == ["update-00000010", "update-00000010-2", "update-00000010-3"]
    assert folder.find("previous") == folder.checkpoints / "update-00000010-2"


def test_what_a_killed_run_leaves_is_swept(folder: Folder) -> None:
    land(folder, 10)
    (folder.checkpoints / ".update-00000020.part" / "x").mkdir(parents=True)
    (folder.checkpoints / ".update-00000005.gone").mkdir()
    folder.sweep()
    assert sorted(one.name for one in folder.checkpoints.iterdir()) == ["latest", "update-00000010"]


def test_what_is_not_there_is_told(folder: Folder) -> None:
    assert folder.find("latest") is None
    land(folder, 10)
    for which in ("previous", "best", "update-00000011"):
        with pytest.raises(WeftError, match=f"has no checkpoint {which!r}.*update-00000010"):
            folder.find(which)


@pytest.mark.parametrize("text", ["", "update-00000099", "../../etc", "update-00000010/../x"])
def test_a_pointer_to_nothing_is_refused(folder: Folder, text: str) -> None:
    land(folder, 10)
    (folder.checkpoints / "latest").write_text(text + "\n")
    with pytest.raises(WeftError, match=r"latest names .*there are: update-00000010.*--checkpoint"):
        folder.find("latest")


def test_names_are_numbered_unless_given(folder: Folder) -> None:
    job = job_of(None)
    names = []
    for _ in range(3):
        new = new_folder(job, overwrite=False)
        new.write_job(job)
        names.append(new.path.name)
    assert names == ["gpt-wpipe", "gpt-wpipe-2", "gpt-wpipe-3"]


def test_a_run_of_the_same_name_is_not_lost(folder: Folder) -> None:
    job = job_of(None, ["name=one"])
    with pytest.raises(WeftError, match=r"runs/one is there already.*--resume runs/one.*--overwrite"):
        new_folder(job, overwrite=False)
    land(folder, 10)
    assert new_folder(job, overwrite=True).path == Path("runs/one")
    assert not Path("runs/one").exists()
    Path("runs/two").mkdir()
    (Path("runs/two") / "thesis.tex").write_text("")
    with pytest.raises(WeftError, match="no run"):
        new_folder(job_of(None, ["name=two"]), overwrite=True)


def test_a_run_is_found_by_path_and_name(folder: Folder) -> None:
    assert run_folder("runs/one").path == run_folder("one").path == Path("runs/one")
    with pytest.raises(WeftError, match="did you mean 'one'"):
        run_folder("onee")
