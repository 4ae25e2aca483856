"""Files are complete or absent."""

from pathlib import Path

import pytest

from weft import WeftError
from weft.output import write_text


def test_a_file_is_replaced_and_no_temporary_file_is_left(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    path.write_text("before")
    write_text(path, "after\n")
    assert path.read_text() == "after\n"
    assert list(tmp_path.iterdir()) == [path]
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode  # readable like any other file


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "x.svg"
    path.write_text("before")
    with pytest.raises(UnicodeEncodeError):
        write_text(path, "\ud800")
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WeftError, match="can't be written: No such file or directory"):
        write_text(tmp_path / "none" / "x.svg", "")
    with pytest.raises(WeftError, match="can't be written"):
        write_text(tmp_path, "")
