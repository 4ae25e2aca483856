from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.runtime.scripts import Scripts, Starter


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels that share their work among threads may add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def starter() -> Iterator[Starter]:
    one = Starter()
    try:
        yield one
    finally:
        one.end()


@pytest.fixture
def scripts(tmp_path: Path, starter: Starter) -> Iterator[Scripts]:
    one = Scripts(tmp_path, starter)
    try:
        yield one
    finally:
        one.end()
