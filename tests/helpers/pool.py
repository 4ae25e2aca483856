"""Ranks that stay up between tests: started once by `weft.launch`, then given one function after the other.

Each function has a new default process group, as under `weft.launch`. Tests of how ranks start, fail and end need ranks
of their own.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import pickle
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist
from tests.helpers.rank_functions import DEADLINE
from tests.helpers.scripts import PATIENCE, Scripts, Starter

from weft.runtime.device import choose_backend


class Pool:
    """Ranks that wait for functions. After a failure they are of no more use: `kill` them.

    Each rank calls `prepare` once, before its first function.
    """

    def __init__(
        self, folder: Path, starter: Starter, *, ranks: int, prepare: Callable[[], None] | None = None
    ) -> None:
        self._scripts = Scripts(folder, starter)
        with tempfile.TemporaryDirectory(prefix="weft-") as short, socket.socket(socket.AF_UNIX) as listener:
            address = os.path.join(short, "pool")  # the path of a socket may have 107 characters
            listener.bind(address)
            listener.listen(ranks)
            self._script = self._scripts.start_launch(serve, address, str(folder / "store"), prepare, ranks=ranks)
            try:
                self._ranks = self._accept(listener, ranks)
            except BaseException:
                self.kill()
                raise

    def _accept(self, listener: socket.socket, ranks: int) -> list[Connection]:
        by_rank: dict[int, Connection] = {}
        end = time.monotonic() + DEADLINE
        listener.settimeout(0.5)
        while len(by_rank) < ranks:
            assert time.monotonic() < end, "ranks did not start"
            assert self._script.poll() is None, self._script.err
            with contextlib.suppress(TimeoutError):
                connection = Connection(listener.accept()[0].detach())
                by_rank[connection.recv()] = connection
        return [by_rank[rank] for rank in range(ranks)]

    def call(self, fn: Callable[..., Any], *args: Any, backend: str | None = None) -> list[Any]:
        """The results of `fn(*args)` by rank; an error as soon as it fails on any rank.

        `backend` is that of the process group; None for the one that weft chooses.
        """
        call = pickle.dumps((backend, fn, args))
        for connection in self._ranks:
            connection.send_bytes(call)
        results: dict[Connection, Any] = {}
        end = time.monotonic() + PATIENCE
        while waiting := [connection for connection in self._ranks if connection not in results]:
            ready = wait(waiting, timeout=max(0.0, end - time.monotonic()))
            results |= {connection: self._receive(connection) for connection in waiting if connection in ready}
            assert time.monotonic() < end, f"{fn.__qualname__} did not end in {PATIENCE:g} s"
        return [results[connection] for connection in self._ranks]

    def _receive(self, connection: Connection) -> Any:
        try:
            ok, value = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._script.wait()
            ok, value = False, self._script.err
        assert ok, f"rank {self._ranks.index(connection)}: {value}"
        return value

    def end(self) -> None:
        """Let the ranks return, and check that they do."""
        for connection in self._ranks:
            connection.close()
        try:
            done = self._scripts.finish(self._script)
            assert done.code == 0, done.err
        finally:
            self._scripts.end()

    def kill(self) -> None:
        self._scripts.end()


def serve(address: str, store_path: str, prepare: Callable[[], None] | None) -> None:
    """The main function of a rank of a pool."""
    if prepare is not None:
        prepare()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    store = dist.FileStore(store_path, ranks)  # type: ignore[attr-defined]
    gc.freeze()  # so that collecting what a function leaves takes no time
    connection = Client(address, family="AF_UNIX")
    connection.send(rank)
    for number in itertools.count():
        try:
            call = connection.recv_bytes()
        except EOFError:
            return
        try:
            answer = pickle.dumps((True, _run(call, dist.PrefixStore(str(number), store))))  # type: ignore[attr-defined]
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)


def _run(call: bytes, store: Any) -> Any:
    """With the process groups of the previous call gone: every group has threads, which take time even if idle."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    gc.collect()
    dist.destroy_process_group()
    backend, fn, args = pickle.loads(call)
    backend = backend or choose_backend(None, is_launched=True)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
    return fn(*args)
