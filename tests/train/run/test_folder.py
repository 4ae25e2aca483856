"""Runs and their checkpoints on disk: they are found, nothing is overwritten, mistakes get a clear message."""

import os
from pathlib import Path

import pytest

from weft.errors import WeftError
from weft.train.run import Folder, FolderWriter, Saved, find_run, new_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    monkeypatch.chdir(tmp_path)
    created = Folder("runs/one")
    created.create()
    created.begin("", invocation="first")
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


def test_a_run_that_goes_on_deletes_no_file_that_is_being_written(folder: Folder) -> None:
    """Its folder may have been moved meanwhile, and the file be that of the run that has its place now."""
    written = [folder.path / ".invocation.1.part", folder.checkpoints / ".latest.1.part"]
    for file in written:
        file.touch()
    for update in (10, 20, 30):
        save(folder, update)
    assert all(file.exists() for file in written)
    assert folder.names() == ["update-00000020", "update-00000030"]
    assert not list(folder.checkpoints.glob(".update-*"))


def test_a_missing_checkpoint_is_reported(folder: Folder) -> None:
    assert folder.find("latest") is None
    save(folder, 10)
    for which in ("previous", "best", "update-00000011"):
        with pytest.raises(WeftError, match=f"has no checkpoint {which!r}.*update-00000010"):
            folder.find(which)


@pytest.mark.parametrize("text", ["", "update-00000099", "../../etc", "update-00000010/../x"])
def test_a_pointer_to_nothing_is_not_followed(folder: Folder, text: str) -> None:
    """Names still work, and the checkpoints that are there are offered, the newest first."""
    for update in (10, 20):
        save(folder, update)
    (folder.checkpoints / "latest").write_text(text + "\n")
    assert folder.find("latest") is None
    assert folder.dangling() == text
    assert folder.find("update-00000010") == folder.checkpoints / "update-00000010"
    assert [path.name for path in folder.newest()] == ["update-00000020", "update-00000010"]


def test_latest_comes_first(folder: Folder) -> None:
    """A run that was killed between a checkpoint and `latest` has a newer one."""
    save(folder, 10)
    folder.next(20).mkdir()
    assert [path.name for path in folder.newest()] == ["update-00000010", "update-00000020"]
    assert folder.dangling() is None


def test_default_names_are_numbered(folder: Folder) -> None:
    assert [new_folder("runs", "gpt-wpipe").path.name for _ in range(3)] == ["gpt-wpipe", "gpt-wpipe-2", "gpt-wpipe-3"]


def test_a_folder_of_something_else_is_left_alone(folder: Folder) -> None:
    assert not folder.is_new()
    assert Folder("runs/two").is_new()
    Path("runs/two").mkdir()
    (Path("runs/two") / "lock").write_text("")
    assert Folder("runs/two").is_new()
    (Path("runs/two") / "thesis.tex").write_text("")
    with pytest.raises(WeftError, match="is not a run"):
        Folder("runs/two").is_new()


def test_an_earlier_run_is_deleted_when_its_successor_begins(folder: Folder) -> None:
    save(folder, 10)
    folder.write_summary({"how": "finished"})
    folder.begin("b = 1\n", invocation="second")
    assert folder.names() == ["update-00000010"]
    assert folder.summary() is None
    folder.write_summary({"how": "finished"})
    (folder.path / "lock").write_text("mine")
    folder.begin("c = 1\n", invocation="third", overwrite=True)
    assert sorted(path.name for path in folder.path.iterdir()) == ["checkpoints", "invocation", "job.toml", "lock"]
    assert folder.names() == []
    assert (folder.text("job.toml"), folder.begun_by()) == ("c = 1\n", "third")


@pytest.mark.parametrize("killed_at", ["summary.json", "metrics.jsonl", "job.toml", "invocation"])
def test_a_killed_beginning_leaves_no_results_of_another_job(
    folder: Folder, killed_at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it was about to change: results never stand beside a job that has not produced them."""
    folder.begin("old\n", invocation="first")
    folder.write_summary({"how": "finished"})
    (folder.path / "metrics.jsonl").write_text("{}\n")
    replace, unlink = os.replace, Path.unlink

    def replacing(source: str, target: str) -> None:
        if Path(target).name == killed_at:
            raise KeyboardInterrupt
        replace(source, target)

    def unlinking(path: Path, missing_ok: bool = False) -> None:
        if path.name == killed_at:
            raise KeyboardInterrupt
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(os, "replace", replacing)
    monkeypatch.setattr(Path, "unlink", unlinking)
    with pytest.raises(KeyboardInterrupt):
        folder.begin("new\n", invocation="second", overwrite=True)
    assert folder.begun_by() in ("first", "", "second" if killed_at == "job.toml" else "first")
    assert folder.summary() is None or folder.text("job.toml") == "old\n"
    assert not folder.is_new()


def test_a_run_is_found_by_path_and_name(folder: Folder) -> None:
    assert find_run("runs/one").path == find_run("one").path == Path("runs/one")
    with pytest.raises(WeftError, match="did you mean 'one'"):
        find_run("onee")
