from collections.abc import Callable, Iterator
from typing import Any

import pytest
from tests.helpers.pretend.processes import Processes


def _calls(count: int, **options: Any) -> Iterator[Callable[..., None]]:
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
