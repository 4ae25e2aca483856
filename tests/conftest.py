"""What all tests share."""

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.helpers.scripts import Commands, Starter

pytest.register_assert_rewrite("tests.helpers")  # a failing assertion there shows its values, too

# a busy machine is no failure, and CI tries the same examples every time
settings.register_profile(
    "weft", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize="CI" in os.environ
)
settings.load_profile("weft")


def pytest_collection_finish() -> None:
    """Let garbage collections leave out what was imported; each would look at it for a third of a second.

    The first optimizer imports as much as torch itself.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--write-golden", action="store_true", help="write golden files instead of comparing with them")
    parser.addoption("--device", default="cpu", metavar="NAME", help="where pipelines compute, such as cuda or pretend")


def pytest_configure(config: pytest.Config) -> None:
    """Also for the ranks, scripts and commands that tests start."""
    from tests.helpers import devices  # after the rewrite

    devices.choose(config.getoption("--device"))
    try:
        devices.check()
    except ValueError as problem:  # a WeftError
        pytest.exit(str(problem), returncode=pytest.ExitCode.USAGE_ERROR)


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Kernels with several threads may add in another order, and the tensors of tests are too small to need them."""
    if (torch := sys.modules.get("torch")) is None:  # tests that need no torch do not wait for its import
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


@pytest.fixture
def commands(tmp_path: Path, starter: "Starter") -> "Iterator[Commands]":
    """Runs `weft` in the test's folder; whatever is left of it is killed."""
    from tests.helpers.scripts import Commands

    made = Commands(tmp_path, starter)
    try:
        yield made
    finally:
        made.end()


def _calls(count: int, **options: Any) -> Iterator[Callable[..., None]]:
    from tests.helpers.pretend.processes import Processes  # after the rewrite

    started: list[Processes] = []

    def call(*args: Any) -> None:
        if not started:
            started.append(Processes(count))
        try:
            started[0].call(*args, **options)
        except BaseException:
            started.pop().kill()
            raise

    yield call
    for processes in started:
        processes.kill()


@pytest.fixture(scope="session")
def pretend_process() -> Iterator[Callable[..., None]]:
    """For `in_process`."""
    yield from _calls(1)


@pytest.fixture(scope="session")
def pretend_ranks() -> Iterator[Callable[..., None]]:
    """For `on_two_ranks`."""
    yield from _calls(2, pass_rank=True)
