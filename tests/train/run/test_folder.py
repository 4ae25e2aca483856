"""Runs and their checkpoints on disk: they are found, nothing is overwritten, mistakes get a clear message."""

from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.train.run import Folder, FolderWriter, Saved, find_run, new_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    created = Folder("runs/one")
    created.write_job("")
    return created


def save(folder: Folder, update: int, *, best: bool = False, keep: int = 2) -> str:
    path = folder.next(update)
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    FolderWriter(folder, keep=keep)(Saved(path=path, best=best))
    return path.name


def test_the_newest_and_the_best_checkpoints_are_kept(folder: Folder) -> None:
    for update in (10, 20, 30, 40, 50):
        save(folder, update, best=update == 20)
    assert folder.names() == ["update-00000020", "update-00000040", "update-00000050"]
    assert {which: folder.find(which) for which in ("latest", "previous", "best", "update-00000040")} == {
        "latest": folder.checkpoints / "update-00000050",
        "previous": folder.checkpoints / "update-00000040",
        "best": folder.checkpoints / "update-00000020",
        "update-00000040": folder.checkpoints / "update-00000040",
    }


def test_a_path_is_never_used_twice(folder: Folder) -> None:
    """A run that was killed between a checkpoint and `latest` saves the same update again."""
    assert [save(folder, 10, keep=9) for _ in range(3)] == ["update-00000010", "update-00000010-2", "update-00000010-3"]
    assert folder.find("previous") == folder.checkpoints / "update-00000010-2"


def test_leftovers_of_a_killed_run_are_deleted(folder: Folder) -> None:
    save(folder, 10)
    (folder.checkpoints / ".update-00000020.part" / "x").mkdir(parents=True)
    (folder.checkpoints / ".update-00000005.gone").mkdir()
    folder.sweep()
    assert sorted(path.name for path in folder.checkpoints.iterdir()) == ["latest", "update-00000010"]


def test_a_missing_checkpoint_is_reported(folder: Folder) -> None:
    assert folder.find("latest") is None
    save(folder, 10)
    for which in ("previous", "best", "update-00000011"):
        with pytest.raises(WeftError, match=f"has no checkpoint {which!r}.*update-00000010"):
            folder.find(which)


@pytest.mark.parametrize("text", ["", "update-00000099", "../../etc", "update-00000010/../x"])
def test_a_pointer_to_nothing_is_refused(folder: Folder, text: str) -> None:
    save(folder, 10)
    (folder.checkpoints / "latest").write_text(text + "\n")
    with pytest.raises(WeftError, match=r"latest names .*there are: update-00000010.*--checkpoint"):
        folder.find("latest")


def test_default_names_are_numbered(folder: Folder) -> None:
    names = []
    for _ in range(3):
        created = new_folder("runs", "", default="gpt-wpipe", overwrite=False)
        created.write_job("")
        names.append(created.path.name)
    assert names == ["gpt-wpipe", "gpt-wpipe-2", "gpt-wpipe-3"]


def test_a_run_of_the_same_name_is_not_lost(folder: Folder) -> None:
    with pytest.raises(WeftError, match=r"runs/one exists already.*--resume runs/one.*--overwrite"):
        new_folder("runs", "one", default="", overwrite=False)
    save(folder, 10)
    assert new_folder("runs", "one", default="", overwrite=True).path == Path("runs/one")
    assert not Path("runs/one").exists()
    Path("runs/two").mkdir()
    (Path("runs/two") / "thesis.tex").write_text("")
    with pytest.raises(WeftError, match="is not a run"):
        new_folder("runs", "two", default="", overwrite=True)


def test_a_run_is_found_by_path_and_name(folder: Folder) -> None:
    assert find_run("runs/one").path == find_run("one").path == Path("runs/one")
    with pytest.raises(WeftError, match="did you mean 'one'"):
        find_run("onee")
