"""The life of a rank that `launch` has started, from its first line to its last word to its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import os
import pickle
import runpy
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from weft.errors import PeerError, RunError, WeftError, one_line
from weft.runtime.process import hang_dump
from weft.runtime.process.malloc import keep_freed_memory

GO, STOP = b"go", b"stop"  # what a parent tells its ranks


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a rank is told first; fn and its arguments follow, once it can load them."""

    main: tuple[str, str] | None
    argv: list[str]
    place: str
    ranks: int
    threads: int | None
    backend: str | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """What a rank died of; `echo` is 0 for a cause, more for what is likelier the consequence of another rank's."""

    rank: int
    cause: str
    echo: int = 0
    when: float
    details: str = ""
    is_input: bool = False  # a mistake of the caller, not of the run
    mistake: str | None = None  # a WeftError that fn raised

    def error(self) -> Exception:
        if self.is_input:
            return WeftError(self.cause)
        error = RunError(f"rank {self.rank} {self.cause}{self.details}")
        error.mistake = self.mistake
        return error


@dataclass
class _Here:
    """What this process is, if launch has started it."""

    inside: str = ""  # which rank
    loading: str = ""  # what it is importing, as long as it is
    stop: threading.Event = field(default_factory=threading.Event)  # set when fn is asked to come to an end


here = _Here()


def serve(descriptors: list[int]) -> None:
    """The whole life of a rank; the first descriptor leads to its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # whole lines, and none lost when the rank is killed
    faulthandler.enable()
    hang_dump.ready()
    pipe = Connection(descriptors[0])
    try:
        job, call = pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    go = threading.Event()
    threading.Thread(target=_watch, args=(pipe, go), daemon=True).start()
    rank = int(os.environ["RANK"])
    try:
        fn, args = _load(rank, job, call)
        pipe.send_bytes(pickle.dumps(("loaded", None)))
        _meet(rank, job)
        pipe.send_bytes(pickle.dumps(("joined", None)))
        go.wait()
        message = _result(fn, args)
    except BaseException as error:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        pipe.send_bytes(pickle.dumps(("failed", _failure(rank, error))))
        threading.Event().wait()  # for the end: while its connections are open, no peer fails because of it
    else:
        pipe.send_bytes(message)


def _watch(pipe: Connection, go: threading.Event) -> None:
    """Pass on the parent's word, and end this process when the parent has ended."""
    with contextlib.suppress(EOFError, OSError):
        while word := pipe.recv_bytes():
            (go if word == GO else here.stop).set()
    os._exit(1)


def _load(rank: int, job: Job, call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Import torch and the script, then fn and its arguments."""
    here.inside = f"rank {rank} of {job.ranks}"
    import torch

    keep_freed_memory()
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    sys.argv = job.argv
    if job.main is not None:
        how, where = job.main
        here.loading = os.path.basename(where)
        run = runpy.run_path if how == "path" else functools.partial(runpy.run_module, alter_sys=True)
        main = types.ModuleType("__mp_main__")  # the name by which multiprocessing, and so pickle, knows it
        main.__dict__.update(run(where, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    here.loading = "fn and its arguments"
    try:
        loaded: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(call)
    except Exception as problem:
        raise WeftError(
            f"weft.launch runs fn in new processes, which must be able to import it and the types of its arguments "
            f"({one_line(problem)}); put them at the top level of a module on sys.path"
        ) from problem
    here.loading = ""
    return loaded


def _meet(rank: int, job: Job) -> None:
    import torch.distributed as dist

    store = dist.FileStore(job.place, job.ranks)  # type: ignore[attr-defined]
    backend = choose_backend(job.backend, rank, job.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.ranks)


def choose_backend(asked: str | None, local_rank: int, local_ranks: int) -> str:
    """Where the ranks compute decides how they talk."""
    import torch

    cuda = torch.cuda.is_available() and torch.cuda.device_count() >= local_ranks
    backend = asked or ("cuda:nccl,cpu:gloo" if cuda else "gloo")
    if "nccl" in backend:
        torch.cuda.set_device(local_rank)
    return backend


def _result(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    import torch.distributed as dist

    try:
        result = fn(*args)
    except SystemExit as leave:
        if leave.code not in (None, 0):
            raise
        result = None
    try:
        message = pickle.dumps(("done", result))
    except Exception as problem:
        raise RunError(f"its result can't be pickled ({one_line(problem)}); return plain data") from problem
    if dist.is_initialized():
        dist.destroy_process_group()
    return message


def _failure(rank: int, error: BaseException) -> Failure:
    now = time.monotonic()  # one clock for all processes of a machine
    if here.loading and isinstance(error, WeftError):
        return Failure(rank=rank, cause=str(error), when=now, is_input=True)
    what = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else one_line(error)
    cause = f"failed{f' while loading {here.loading}' if here.loading else ''}: {what}"
    steps = error.__traceback__
    while steps is not None and steps.tb_frame.f_code.co_filename == __file__:
        steps = steps.tb_next
    text = "".join(traceback.format_exception(type(error), error, steps)).rstrip()
    mistake = str(error) if isinstance(error, WeftError) else None
    details = f"\n\nrank {rank}: {text}"
    return Failure(rank=rank, cause=cause, echo=_echo(error), when=now, details=details, mistake=mistake)


def _echo(error: BaseException) -> int:
    """0 for a cause, 2 for what another rank's failure has caused, 1 for a RunError that does not show which it is."""
    root = error
    for _ in range(100):  # in case of a chain without end
        root = root.__cause__ or root.__context__ or root
    names = [base.__name__ for base in type(root).__mro__]  # torch itself may be what failed to import
    lost = isinstance(root, (PeerError, ConnectionError)) or "/gloo/" in str(root) or "DistError" in names
    if isinstance(error, RunError) and not isinstance(error, PeerError):
        return 1 if lost or root is error else 0
    return 2 if lost else 0
