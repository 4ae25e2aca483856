"""Local ranks from a plain script: what torchrun does, without a command line.

`launch` starts one fresh interpreter a rank, much as multiprocessing's "spawn" does, but holds the reins from the
first instruction on, for what multiprocessing can't promise: that a rank dies with its parent even while it still
imports; that Ctrl-C prints one traceback and not one a rank; that arguments and results travel by value (a tensor that
ranks silently share would be trained by all of them); that what is told is the cause of a failure, not its echoes.

A rank talks to its parent over one socket pair: `loaded`, `joined`, then `done` or `failed`. The parent answers when
all have joined, so that no rank is through before another is up. When the parent's end closes, the rank ends.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing.connection
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

from weft.environment import is_rank
from weft.errors import RunError, WeftError, one_line
from weft.runtime.process import hang_dump
from weft.runtime.process.child import GO, STOP, Failure, Job, choose_backend, here
from weft.runtime.process.malloc import keep_freed_memory

T = TypeVar("T")

ECHO = 0.8  # seconds to wait for the cause of what looks like an echo; a rank tells its neighbours, then its parent
LOOK = 0.1  # seconds between two looks at whether the ranks are alive, for those whose end the socket does not tell

# How a rank begins. Its death is tied to its parent's before it does anything that takes time: by the kernel on Linux
# (PR_SET_PDEATHSIG), which reaches a rank that is stopped or stuck in C; everywhere by _watch, which does not.
BIRTH = """
import sys
sys.path[:] = {path}
import ctypes, os, signal
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
if os.getppid() != {parent}:
    os._exit(1)
from weft.runtime.process.child import serve
serve({descriptors})
"""

_joins = itertools.count()


def launch(
    fn: Callable[..., T],
    *args: Any,
    ranks: int,
    threads: int | None = None,
    backend: str | None = None,
    timeout: float = 60.0,
    stop: threading.Event | None = None,
) -> list[T]:
    """Run `fn(*args)` on every rank, inside a default process group, with RANK, WORLD_SIZE and LOCAL_RANK set.

    From a plain script, this starts `ranks` processes on this machine and returns their results by rank. `fn` must be
    importable, and the script guarded by `if __name__ == "__main__":`, as its top level runs in every rank. Arguments
    and results are pickled: every rank has its own copy. A rank computes with one thread, unless `threads` or the
    user's OMP_NUM_THREADS says otherwise. The ranks talk over gloo on the loopback interface, or over `backend`; where
    there is a CUDA device for each, over "cuda:nccl,cpu:gloo" (untested: no such machine was at hand).

    Under torchrun, or where a process group is there already, this joins what is there: it runs `fn` as the one rank
    that this process is, and returns a list of that one result. The results of other processes are theirs.

    When a rank fails or is killed, all ranks end at once, and RunError tells which one and why, with its traceback.
    `sys.exit()` in `fn` is a result of None, `sys.exit(1)` a failure. `timeout` is in seconds, for all ranks to start,
    import and meet; it does not limit `fn`. No rank outlives this process; what `fn` starts is its own to end.
    When `stop` is set, `weft.runtime.process.here.stop` is set on every rank: a request that `fn` may follow.
    """
    _check(fn, ranks, threads, timeout)
    if here.loading:
        raise WeftError(
            f"weft.launch was called at the top level of {here.loading}, which every rank runs again; "
            'put the call under if __name__ == "__main__":'
        )
    if here.inside:
        raise WeftError(
            f"weft.launch can't start ranks inside a rank (here: {here.inside}); call it once, from the script"
        )
    if is_rank() or _has_group():
        return [_join(fn, args, ranks, threads, backend, timeout)]
    call = _pickled(fn, args)
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    with _meeting_place() as (place, descriptors):
        job = Job(main=_main_module(), argv=sys.argv, place=place, ranks=ranks, threads=threads, backend=backend)
        return _run(job, call, descriptors, timeout, stop or threading.Event())


# --- before anything starts ---


def _check(fn: Any, ranks: Any, threads: Any, timeout: Any) -> None:
    if not callable(fn):
        raise WeftError(f"weft.launch needs a function to run (got {fn!r}); write weft.launch(train, ranks=4)")
    for name, value in (("ranks", ranks), ("threads", 1 if threads is None else threads)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise WeftError(f"{name} must be a whole number of at least 1 (got {value!r})")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise WeftError(f"timeout must be a number of seconds above 0 (got {timeout!r})")


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    rule = "weft.launch runs fn in new processes, which must be able to import it"
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    if "<lambda>" in name or "<locals>" in name:
        raise WeftError(f"{rule} (got {name}); define it with def, at the top level of a module")
    if name.startswith("__main__.") and _main_module() is None:
        raise WeftError(
            f"{rule} (got {name}, and this __main__ is no file that can be); put it into a module of its own"
        )
    try:
        return pickle.dumps((fn, args))
    except Exception as problem:
        raise WeftError(
            f"weft.launch hands fn and its arguments to new processes by pickle, which can't take them "
            f"({one_line(problem)}); pass plain data, and build the rest inside fn"
        ) from problem


def _main_module() -> tuple[str, str] | None:
    """Where a new process finds the running script, by the rules of multiprocessing: ("module" | "path", where)."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return None if spec.name.rpartition(".")[2] == "__main__" else ("module", spec.name)
    path = getattr(main, "__file__", None)
    return ("path", os.path.abspath(path)) if path and os.path.isfile(path) else None


@contextlib.contextmanager
def _meeting_place() -> Iterator[tuple[str, list[int]]]:
    """The file through which the ranks find each other, and the descriptors that they need to see it.

    On Linux it has no name, so that nothing is left of it even if this process is killed.
    """
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        descriptor = os.memfd_create("weft")
        try:
            yield f"/proc/self/fd/{descriptor}", [descriptor]
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            yield os.path.join(folder, "store"), []


def _loopback() -> str:
    names = [name for _, name in socket.if_nameindex()]
    for name in names:
        if re.fullmatch(r"lo\d*", name):  # lo on Linux, lo0 on macOS and the BSDs
            return name
    raise WeftError(f"weft.launch needs a loopback interface for its ranks to talk over (interfaces: {names}); add one")


# --- the parent ---


class _Child:
    """One rank, as its parent sees it."""

    def __init__(
        self, rank: int, environment: dict[str, str], descriptors: list[int], messages: tuple[bytes, ...]
    ) -> None:
        self.rank = rank
        self.stage = "started"
        self.result: Any = None
        self.failure: Failure | None = None
        self.pipe, theirs = multiprocessing.connection.Pipe()
        path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with theirs:
            inherited = [theirs.fileno(), *descriptors]
            birth = BIRTH.format(path=path, parent=os.getpid(), descriptors=inherited)
            command = [sys.executable, *flags, "-c", birth]
            try:
                self.process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=inherited)
            except OSError as problem:
                raise RunError(f"rank {rank} could not be started: {one_line(problem)}") from problem
        # a large job fills the socket; a rank that never reads it must not hold up the parent
        threading.Thread(target=self.tell, args=messages, daemon=True).start()

    @property
    def reported(self) -> bool:
        return self.stage == "done" or self.failure is not None

    def tell(self, *messages: bytes) -> None:
        with contextlib.suppress(OSError):  # it is gone, and that will be noticed
            for message in messages:
                self.pipe.send_bytes(message)

    def hear(self) -> None:
        """Take one message, or the end of the rank."""
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.gone()
            return
        try:
            self.stage, value = pickle.loads(message)
        except Exception as problem:
            self.fail(f"returned what can't be unpickled here ({one_line(problem)}); return plain data")
        else:
            if self.stage == "failed":
                self.failure = value
            else:
                self.result = value

    def gone(self) -> None:
        """It has ended, or closed its socket, without a report."""
        try:
            self.fail(f"{_ending(self.process.wait(timeout=1))} before fn returned")
        except subprocess.TimeoutExpired:
            self.fail("closed the socket to its parent; fn must leave alone what it has not opened")

    def fail(self, cause: str) -> None:
        self.failure = Failure(rank=self.rank, cause=cause, when=time.monotonic())


def _run(job: Job, call: bytes, descriptors: list[int], timeout: float, stop: threading.Event) -> list[Any]:
    """Start the ranks, wait for all results or the first failure, and leave no process behind."""
    children: list[_Child] = []
    shared = _environment(job)
    try:
        with _no_interrupt():
            for rank in range(job.ranks):
                environment = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                children.append(_Child(rank, environment, descriptors, (pickle.dumps(job), call)))
        _wait(children, timeout, stop)
        _part(children, timeout)
        return [child.result for child in children]
    finally:
        for child in children:
            child.process.kill()  # SIGKILL, which ends a stopped one too
        for child in children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=10)
            child.pipe.close()


@contextlib.contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ranks are born with SIGINT blocked, so that Ctrl-C can't hit them before they ignore it; here it is only late."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _environment(job: Job) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= {"WORLD_SIZE": str(job.ranks), "LOCAL_WORLD_SIZE": str(job.ranks)}
    environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback())
    if job.threads is not None:
        environment["OMP_NUM_THREADS"] = str(job.threads)  # OpenMP reads it once, when torch is imported
    return environment


def _wait(children: list[_Child], timeout: float, stop: threading.Event) -> None:
    """Until every rank has reported its result; raises the cause of the first failure."""
    end = time.monotonic() + timeout
    started = told = False
    while waiting := [child for child in children if not child.reported]:
        ready = multiprocessing.connection.wait([child.pipe for child in waiting], timeout=LOOK)
        for child in waiting:
            if child.pipe in ready:
                child.hear()
            elif child.process.poll() is not None and not child.pipe.poll():
                child.gone()  # its socket lives on in a process that it has started
        if failures := [child.failure for child in children if child.failure is not None]:
            cause = min(failures, key=lambda failure: (failure.echo, failure.when))
            if not cause.echo or time.monotonic() > cause.when + ECHO or all(child.reported for child in children):
                raise cause.error()
        elif not started and all(child.stage in ("joined", "done") for child in children):
            started = True
            for child in children:
                child.tell(GO)
        elif not started and time.monotonic() > end:
            raise _late(children, timeout)
        if started and stop.is_set() and not told:
            told = True
            for child in children:
                child.tell(STOP)


def _late(children: list[_Child], timeout: float) -> RunError:
    late = [child for child in children if child.stage == "started"] or [c for c in children if c.stage == "loaded"]
    for child in late:
        hang_dump.ask(child.rank, child.process.pid)
    names = ", ".join(str(child.rank) for child in late)
    return RunError(
        f"rank{'s' * (len(late) > 1)} {names} did not come up to the process group within {timeout:g} s; stderr has "
        "the stacks; if more time is all that it takes, raise timeout="
    )


def _part(children: list[_Child], timeout: float) -> None:
    """Let ranks that have handed over their results end in their own way; what goes wrong there costs no result."""
    end = time.monotonic() + timeout
    for child in children:
        try:
            if status := child.process.wait(timeout=max(0.0, end - time.monotonic())):
                warnings.warn(
                    f"rank {child.rank}, after fn had returned, {_ending(status)}", RuntimeWarning, stacklevel=4
                )
        except subprocess.TimeoutExpired:
            message = f"rank {child.rank} had not ended {timeout:g} s after all results were there, and was killed"
            warnings.warn(message + " (did fn leave a thread running?)", RuntimeWarning, stacklevel=4)


def _ending(status: int) -> str:
    if status >= 0:
        return f"ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was killed by {name}{' (by somebody, or for want of memory)' if name == 'SIGKILL' else ''}"


# --- a process that is a rank already ---


def _has_group() -> bool:
    dist: Any = sys.modules.get("torch.distributed")  # what is not imported has no group
    return dist is not None and bool(dist.is_available() and dist.is_initialized())


def _start_of_all(store: Any, rank: int, ranks: int, timeout: float) -> Any:
    """Wait for all ranks; a part of the store that this start has for itself.

    torchrun may keep its store when it starts all ranks again, with what the dead ones wrote. So rank 0 gives each
    start a name of its own, which stands there only until all have read it.
    """
    import torch.distributed as dist

    end, name = time.monotonic() + timeout, ""
    if rank == 0:
        name = uuid.uuid4().hex
        store.set("name", name)
    while time.monotonic() < end:
        if rank > 0 and store.check(["name"]) and (now := store.compare_set("name", name, name).decode()) != name:
            name = now
            store.set(f"{name}/up/{rank}", "")
        if rank == 0 and store.check([f"{name}/up/{one}" for one in range(1, ranks)]):
            store.delete_key("name")
            store.set(f"{name}/go", "")
        if name and store.check([f"{name}/go"]):
            return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        time.sleep(0.02)
    late = ", ".join(str(one) for one in range(ranks) if one != rank and not store.check([f"{name}/up/{one}"]))
    raise RunError(
        f"rank {rank} waited {timeout:g} s for others to come up (missing: {late}); if more time is all that "
        "it takes, raise timeout="
    )


def _join(
    fn: Callable[..., T],
    args: tuple[Any, ...],
    ranks: int,
    threads: int | None,
    backend: str | None,
    timeout: float,
) -> T:
    """Run fn as the rank that torchrun, or the caller, has made of this process."""
    import torch
    import torch.distributed as dist

    mine = not dist.is_initialized()
    world = int(os.environ["WORLD_SIZE"]) if mine else dist.get_world_size()
    if world != ranks:
        raise WeftError(
            f"weft.launch joins the ranks that are there, so ranks must equal their number (ranks: {ranks}, "
            f"WORLD_SIZE: {world}); start {ranks} processes with torchrun, or use ranks={world}"
        )
    keep_freed_memory()
    if threads is not None:
        torch.set_num_threads(threads)
    hang_dump.ready()
    if mine:
        wait = timedelta(seconds=min(timeout, 1e6))
        found, rank, _ = next(dist.rendezvous("env://", timeout=wait))  # type: ignore[attr-defined]
        store = _start_of_all(dist.PrefixStore(f"weft/{next(_joins)}", found), rank, ranks, timeout)  # type: ignore[attr-defined]
        local = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        dist.init_process_group(choose_backend(backend, *local), store=store, rank=rank, world_size=ranks)
    result = fn(*args)  # if this fails, the group stays: taking it apart can block, and torchrun ends the process
    if mine and dist.is_initialized():
        dist.destroy_process_group()
    return result
