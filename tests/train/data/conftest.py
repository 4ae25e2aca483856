"""Fixtures of the data tests."""

from pathlib import Path

import pytest
from tests.train.data.data_files import WORDS


@pytest.fixture
def vocabulary(tmp_path: Path) -> str:
    path = tmp_path / "vocabulary.txt"
    path.write_text("\n".join(WORDS) + "\n")
    return str(path)
