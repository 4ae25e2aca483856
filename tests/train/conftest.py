from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.helpers.scripts import Commands, Starter


@pytest.fixture
def commands(tmp_path: Path, starter: Starter) -> Iterator[Commands]:
    """Runs `weft` in the test's folder; whatever is left of it is killed."""
    made = Commands(tmp_path, starter)
    try:
        yield made
    finally:
        made.end()
