"""The life of a rank that `launch` has started, from its first line to its report to the parent."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gc
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

from weft import faults
from weft.errors import PeerError, RunError, StorageError, WeftError, one_line
from weft.runtime.process import hang_dump, liveness
from weft.runtime.process.leaving import run_finalizers
from weft.runtime.process.malloc import configure_malloc
from weft.streams import flush_within

GO, STOP = b"go", b"stop"  # messages from the parent to a rank
FLUSH = 0.5  # seconds that the output of a failed rank may delay its report; see `parent.CAUSE_WAIT`


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """The first message to a rank. fn and its arguments follow, since they need these settings to be unpickled."""

    main: tuple[str, str] | None  # how to import the script: ("module" | "path", where)
    argv: list[str]
    store_path: str
    ranks: int
    threads: int | None
    backend: str | None


@dataclass(frozen=True, kw_only=True)
class Failure:
    """Why a rank failed."""

    rank: int
    cause: str
    secondary: int = 0  # 2: the consequence of another rank's failure; 1: possibly; 0: no
    when: float
    details: str = ""
    is_input: bool = False  # an error in the caller's input, not in the run
    mistake: str | None = None  # the message of a WeftError that fn raised

    def error(self) -> Exception:
        if self.is_input:
            return WeftError(self.cause)
        error = RunError(f"rank {self.rank} {self.cause}{self.details}")
        error.mistake = self.mistake
        return error


@dataclass
class ThisRank:
    """What this process is, if `launch` has started it."""

    name: str = ""  # such as "rank 0 of 4"; empty in any other process
    loading: str = ""  # what it is importing at the moment
    stop: threading.Event = field(default_factory=threading.Event)  # set when fn is asked to end


this_rank = ThisRank()


def serve(descriptors: list[int]) -> None:
    """The whole life of a rank; the first descriptor is its socket to the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)  # whole lines, and no line is lost when the rank is killed
    faulthandler.enable()
    hang_dump.enable()
    faults.arm()
    pipe = Connection(descriptors[0])
    try:
        spec, call = pickle.loads(pipe.recv_bytes()), pipe.recv_bytes()
    except (EOFError, OSError):
        os._exit(1)
    report = _Reporter(pipe)
    go = threading.Event()
    threading.Thread(target=_listen, args=(pipe, go), daemon=True).start()
    liveness.start_reports(lambda status: report("status", status))
    rank = int(os.environ["RANK"])
    try:
        report("importing")
        fn, args = _load(rank, spec, call)
        report("loaded")
        _join_group(rank, spec)
        report("joined")
        go.wait()
        message = _run(fn, args)
    except BaseException as error:
        flush_within(FLUSH)  # the parent kills this process when it knows
        report("failed", _failure(rank, error))
        threading.Event().wait()  # until the parent kills it: an early exit would close connections and fail its peers
    else:
        report.send(message)
        _exit()


def _exit() -> None:
    """End without the destructors of C++ libraries, after all that Python does at its end.

    They run beside threads that are still alive, and aborted every fifth rank (16 of 80, torch 2.13).
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that fn has left behind
    atexit._run_exitfuncs()
    gc.collect()
    for file in gc.get_objects():
        if issubclass(type(file), io.TextIOWrapper | io.BufferedWriter):  # which fn may not have closed
            with contextlib.suppress(Exception):
                file.flush()
    os._exit(0)


class _Reporter:
    """Sends messages to the parent, from several threads."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe, self._lock = pipe, threading.Lock()

    def __call__(self, stage: str, value: Any = None) -> None:
        self.send(pickle.dumps((stage, value)))

    def send(self, message: bytes) -> None:
        with self._lock:
            self._pipe.send_bytes(message)


def _listen(pipe: Connection, go: threading.Event) -> None:
    """Set the event that the parent's message names; end this process when the parent has ended."""
    with contextlib.suppress(EOFError, OSError):
        while message := pipe.recv_bytes():
            (go if message == GO else this_rank.stop).set()
    os._exit(1)


def _load(rank: int, spec: RankSpec, call: bytes) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Import torch and the script, then unpickle fn and its arguments."""
    this_rank.name = f"rank {rank} of {spec.ranks}"
    import torch

    faults.hit("import")
    configure_malloc()
    if spec.threads is not None:
        torch.set_num_threads(spec.threads)
    sys.argv = spec.argv
    if spec.main is not None:
        kind, where = spec.main
        this_rank.loading = os.path.basename(where)
        run = runpy.run_path if kind == "path" else functools.partial(runpy.run_module, alter_sys=True)
        main = types.ModuleType("__mp_main__")  # the name that multiprocessing, and so pickle, uses
        main.__dict__.update(run(where, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    this_rank.loading = "fn and its arguments"
    try:
        loaded: tuple[Callable[..., Any], tuple[Any, ...]] = pickle.loads(call)
    except Exception as problem:
        raise WeftError(
            f"weft.launch runs fn in new processes, which must be able to import it and the types of its arguments "
            f"({one_line(problem)}); put them at the top level of a module on sys.path"
        ) from problem
    this_rank.loading = ""
    return loaded


def _join_group(rank: int, spec: RankSpec) -> None:
    import torch.distributed as dist

    from weft.runtime.device import choose_backend

    faults.hit("rendezvous")
    store = dist.FileStore(spec.store_path, spec.ranks)  # type: ignore[attr-defined]
    this_rank.loading = "its device"
    backend = choose_backend(spec.backend, is_launched=True)
    this_rank.loading = ""
    dist.init_process_group(backend, store=store, rank=rank, world_size=spec.ranks)


def _run(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Call fn, and leave the process group; returns the message with its result."""
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
    run_finalizers()
    if dist.is_initialized():
        dist.destroy_process_group()
    return message


def _failure(rank: int, error: BaseException) -> Failure:
    now = time.monotonic()  # all processes of a machine share this clock
    if this_rank.loading and isinstance(error, WeftError):
        return Failure(rank=rank, cause=str(error), when=now, is_input=True)
    what = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else one_line(error)
    what = str(error) if isinstance(error, StorageError) else what
    cause = f"failed{f' while loading {this_rank.loading}' if this_rank.loading else ''}: {what}"
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    mistake = str(error) if isinstance(error, WeftError) else None
    details = "" if isinstance(error, StorageError) else f"\n\nrank {rank}: {text}"
    return Failure(rank=rank, cause=cause, secondary=_secondary(error), when=now, details=details, mistake=mistake)


def _secondary(error: BaseException) -> int:
    """2 for a consequence of another rank's failure, 1 for a RunError that does not show whether it is, else 0."""
    root = error
    for _ in range(100):  # the chain may be a cycle
        root = root.__cause__ or root.__context__ or root
    names = [base.__name__ for base in type(root).__mro__]  # by name: torch may be what could not be imported
    lost = isinstance(root, (PeerError, ConnectionError)) or "/gloo/" in str(root) or "DistError" in names
    if isinstance(error, RunError) and not isinstance(error, PeerError):
        return 1 if lost or root is error else 0
    return 2 if lost else 0
