"""What all tests share."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.helpers.scripts import Starter

# a busy machine is no failure, and CI looks at the same examples every time
settings.register_profile(
    "weft", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("weft")

# Files that take longest, which begin first: one that came last would leave the other cores with nothing to do. (`make
# test` tells xdist to keep this order.)
LONGEST = (
    "train/test_processes.py",
    "train/test_examples.py",
    "runtime/process/test_failures.py",
    "runtime/process/test_launch.py",
    "test_docs.py",
    "runtime/law/test_law.py",
    "runtime/law/test_prediction_law.py",
    "runtime/law/test_law_real_ranks.py",
    "runtime/comm/test_process_transport.py",
    "runtime/law/test_prediction_controls.py",
    "test_readme.py",
    "simulate/test_scale.py",
    "simulate/test_simulation.py",
    "simulate/test_figures.py",
    "train/test_compare.py",
    "train/test_loop.py",
    "runtime/engine/test_meters.py",
    "runtime/checkpoint/test_resume.py",
)
HERE = Path(__file__).parent
PLACES = {HERE / name: place for place, name in enumerate(LONGEST)}
assert all(path.is_file() for path in PLACES), f"LONGEST names no file: {[p for p in PLACES if not p.is_file()]}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: PLACES.get(item.path, len(PLACES)))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write the golden files anew instead of comparing")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Kernels that share their work among threads may add in another order; and there is little to share here."""
    if (torch := sys.modules.get("torch")) is None:  # tests of what needs no torch do not wait for its import
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def starter() -> "Iterator[Starter]":
    """The process that scripts and commands are forked from."""
    from tests.helpers.scripts import Starter  # imports torch

    process = Starter()
    try:
        yield process
    finally:
        process.end()
