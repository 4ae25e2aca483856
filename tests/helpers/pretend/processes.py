"""Processes that have loaded the pretend device and stay up for the next test; see `pretend.load`."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from tests.helpers import pretend

DEADLINE = 60.0


class Processes:
    """`call` runs a function in all of them. After a failure they are of no more use: `kill` them."""

    def __init__(self, count: int) -> None:
        pretend.build.build()  # outside the deadline of the first call
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._connections: list[Connection] = []
        for rank in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, rank), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._connections.append(here)

    def call(self, module: str, name: str, *args: Any, pass_rank: bool = False) -> None:
        """Raises what they raise: the failure of one often follows from that of another."""
        for connection in self._connections:
            connection.send((module, name, args, pass_rank))
        waiting: list[Any] = list(self._connections)
        failures: list[str] = []
        end = time.monotonic() + DEADLINE
        while waiting:
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            assert ready, "\n".join([*failures, f"{name} took more than {DEADLINE} s"])
            for answered in ready:
                waiting.remove(answered)
                assert isinstance(answered, Connection)
                failures += [failure] if (failure := answered.recv()) is not None else []
        assert not failures, "\n".join(failures)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _serve(connection: Connection, rank: int) -> None:
    controls = pretend.load()
    import torch
    from tests.helpers.pretend import nccl

    torch.set_num_threads(1)  # as in the tests of other processes

    nccl.register()
    while True:
        module, name, args, pass_rank = connection.recv()
        body = getattr(importlib.import_module(module), name).body
        try:
            body(*((rank,) if pass_rank else ()), *args)
        except BaseException:
            connection.send(f"rank {rank}:\n{traceback.format_exc()}")
        else:
            connection.send(None)
        nccl.reset()
        controls.reset()


def in_process(body: Callable[..., None]) -> Callable[..., None]:
    """A test that runs in a process with the device; its arguments are sent there."""

    def test(pretend_process: Callable[..., None], **arguments: Any) -> None:
        pretend_process(body.__module__, body.__name__, *(arguments[name] for name in parameters))

    parameters = inspect.signature(body).parameters
    own = inspect.Parameter("pretend_process", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([own, *parameters.values()])  # type: ignore[attr-defined]
    return _marked(test, body)


def on_two_ranks(body: Callable[[int, str], None]) -> Callable[..., None]:
    """A test that runs on two ranks with the device: `body(rank, path)`, with a path for the store."""

    def test(pretend_ranks: Callable[..., None], tmp_path: Any) -> None:
        pretend_ranks(body.__module__, body.__name__, str(tmp_path / "store"))

    return _marked(test, body)


def _marked(test: Callable[..., None], body: Callable[..., None]) -> Callable[..., None]:
    test.__name__ = test.__qualname__ = body.__name__
    test.__module__ = body.__module__
    test.__doc__ = body.__doc__
    test.body = body  # type: ignore[attr-defined]
    reason = pretend.unavailable()
    marked: Callable[..., None] = pytest.mark.skipif(reason is not None, reason=str(reason))(test)
    return marked
