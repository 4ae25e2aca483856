from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.pool import Pool
from tests.helpers.pretend.ranks import PretendRanks
from tests.helpers.scripts import Scripts, Starter


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Iterator[Callable[..., list[Any]]]:
    """`launch(fn, *args, ranks=2)`: like `weft.launch`, on ranks that stay up for the next test; see `Pool`."""
    pools: dict[int, Pool] = {}

    def launch(fn: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        if ranks not in pools:
            pools[ranks] = Pool(tmp_path_factory.mktemp("pool"), starter, ranks=ranks)
        try:
            return pools[ranks].call(fn, *args)
        except BaseException:
            pools.pop(ranks).kill()
            raise

    yield launch
    for pool in pools.values():
        pool.end()


@pytest.fixture(scope="session")
def pretend_launch(tmp_path_factory: pytest.TempPathFactory, starter: Starter) -> Iterator[Callable[..., list[Any]]]:
    """`pretend_launch(fn, *args, ranks=2)`: as `launch`, on ranks with a pretend device each; see `PretendRanks`."""
    started = PretendRanks(lambda: tmp_path_factory.mktemp("pool"), starter)
    yield started.call
    started.end()


@pytest.fixture(params=["forked ranks", pytest.param("new interpreters", marks=pytest.mark.slow)])
def scripts(tmp_path: Path, starter: Starter, request: pytest.FixtureRequest) -> Iterator[Scripts]:
    """For scripts that launch ranks, which start within a moment or, in `make test-all`, as users start them."""
    scripts = Scripts(tmp_path, starter, forked=request.param == "forked ranks")
    try:
        yield scripts
    finally:
        scripts.end()


@pytest.fixture
def new_interpreters(tmp_path: Path, starter: Starter) -> Iterator[Scripts]:
    """For scripts whose ranks must not know what the script has imported, and for torchrun."""
    scripts = Scripts(tmp_path, starter)
    try:
        yield scripts
    finally:
        scripts.end()
