from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.scripts import Scripts, Starter


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Callable[..., Any]:
    """`weft.launch` without the seconds that new interpreters take to import torch; see `Scripts.launch`."""

    def launched(fn: Callable[..., Any], *args: Any, ranks: int) -> Any:
        scripts = Scripts(tmp_path_factory.mktemp("launched"), starter)
        try:
            return scripts.launch(fn, *args, ranks=ranks)
        finally:
            scripts.end()

    return launched


@pytest.fixture
def scripts(tmp_path: Path, starter: Starter) -> Iterator[Scripts]:
    one = Scripts(tmp_path, starter)
    try:
        yield one
    finally:
        one.end()
