"""A user's own schedule from a file or a package."""

import sys
from pathlib import Path

import pytest

from weft import WeftError
from weft.schedule.user_schedule import load_schedule_function

USER_CODE = """
from __future__ import annotations
from dataclasses import dataclass
from neighbour import STREAM
import weft

@dataclass
class Sizes:
    stages: int

def own(stages, microbatches):
    return weft.Schedule(name="own", stages=Sizes(stages).stages, microbatches=microbatches, streams=[STREAM])

def few(stages, **options):
    return own(stages, **options, microbatches=1)

def wrong(stages, microbatches):
    return 3

def broken(stages, microbatches):
    raise RuntimeError("no\\nway")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_file.py").write_text(USER_CODE)
    (tmp_path / "neighbour.py").write_text('STREAM = "0F0 0B0"')
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    return tmp_path


def test_a_file_may_import_its_neighbours(folder: Path) -> None:
    assert load_schedule_function(f"{folder}/own_file.py:own")(stages=1, microbatches=1).name == "own"


def test_a_module_of_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert load_schedule_function("own_file:own")(stages=1, microbatches=1).name == "own"


def test_errors_of_the_function_become_clear_messages(folder: Path) -> None:
    home = f"{folder}/own_file.py"
    with pytest.raises(WeftError, match="has no 'other'"):
        load_schedule_function(f"{home}:other")
    with pytest.raises(WeftError, match=r"must return a weft.Schedule \(got int\)"):
        load_schedule_function(f"{home}:wrong")(stages=1, microbatches=1)
    with pytest.raises(WeftError, match=r"failed \(RuntimeError: no\)"):
        load_schedule_function(f"{home}:broken")(stages=1, microbatches=1)
    with pytest.raises(WeftError, match="own takes no slack; leave it out"):
        load_schedule_function(f"{home}:own")(stages=1, microbatches=1, slack=0)
    with pytest.raises(WeftError, match=r"failed \(TypeError.*microbatches"):
        load_schedule_function(f"{home}:few")(stages=1, microbatches=1)
    with pytest.raises(WeftError, match="does not exist"):
        load_schedule_function(f"{folder}/none.py:own")
    (folder / "bad.py").write_text("1 +")
    with pytest.raises(WeftError, match=r"can't be imported \(SyntaxError"):
        load_schedule_function(f"{folder}/bad.py:own")
