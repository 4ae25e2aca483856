"""Start local ranks and watch them: what torchrun does, without a command line.

Each rank is a fresh interpreter, as with multiprocessing's "spawn". In addition, and from the first instruction on: a
rank dies with its parent, even while it imports; Ctrl-C prints one traceback, not one per rank; arguments and results
are copied (ranks that silently shared a tensor would all train it); the error is the cause of a failure, not one of its
consequences on other ranks.

A rank talks to its parent over one socket pair: `importing`, `loaded`, `joined`, then `done` or `failed`, and its
status twice a second. The parent answers `go` when all have joined, so that no rank ends before another is up. When the
parent's end closes, the rank exits. A rank that is stopped, and one whose status does not change within the limit of
its phase, are named and ended: nobody else may be waiting for them.
"""

from __future__ import annotations

import contextlib
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
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from weft.errors import RunError, WeftError, one_line
from weft.runtime.process import hang_dump
from weft.runtime.process.child import GO, STOP, Failure, RankSpec
from weft.runtime.process.device_variables import set_device_variables
from weft.runtime.process.liveness import PAUSED, Report
from weft.runtime.process.malloc import set_malloc_variables

CAUSE_WAIT = 0.8  # seconds to wait for the cause of a secondary failure; a rank informs its neighbours, then its parent
POLL = 0.1  # seconds between checks that ranks are alive, for those whose death does not close their socket
STUCK_MARGIN = 5.0  # seconds for a rank, or one that waits for it, to report first why it does not move
LONG_SILENCE = 30.0  # seconds in which one call of a C library may keep the threads of a rank from reporting
EXIT_SILENCE = 10.0  # seconds for a rank to exit once its threads have ended, or to continue if it is stopped
EXIT_LIMIT = 60.0  # seconds for the threads that fn has left behind

# How a rank starts. Its death is tied to its parent's before it does anything that takes time: on Linux by the kernel
# (PR_SET_PDEATHSIG), which also kills a rank that is stopped or stuck in C; everywhere by `child._listen`.
BOOTSTRAP = """
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


@dataclass(frozen=True, kw_only=True)
class Limits:
    """In seconds."""

    start: float  # for a rank to import and meet the others
    silence: float  # without a sign of life


def run_ranks(
    call: bytes,
    *,
    main: tuple[str, str] | None,
    ranks: int,
    threads: int | None,
    backend: str | None,
    limits: Limits,
    stop: threading.Event | None,
) -> list[Any]:
    """Run a pickled call on every rank and return the results; raises the cause of the first failure.

    No process is left behind.
    """
    processes: list[_RankProcess] = []
    with _store_file() as (store_path, descriptors):
        spec = RankSpec(main=main, argv=sys.argv, store_path=store_path, ranks=ranks, threads=threads, backend=backend)
        shared_environment = _environment(ranks, threads)
        try:
            with _interrupts_blocked():
                for rank in range(ranks):
                    environment = {**shared_environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                    processes.append(_RankProcess(rank, environment, descriptors, (pickle.dumps(spec), call)))
            _Watch(processes, limits, stop or threading.Event()).wait_for_results()
            _wait_for_exit(processes)
            return [process.result for process in processes]
        finally:
            for process in processes:
                process.popen.kill()  # SIGKILL, which ends a stopped process too
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.popen.wait(timeout=10)
                process.pipe.close()


class _RankProcess:
    """The process of a rank, as its parent sees it."""

    def __init__(
        self, rank: int, environment: dict[str, str], descriptors: list[int], messages: tuple[bytes, ...]
    ) -> None:
        self.rank = rank
        self.stage = "started"
        self.begun = self.heard = time.monotonic()  # when it began to import, and when it last sent anything
        self.status: Report | None = None
        self.result: Any = None
        self.failure: Failure | None = None
        self.pipe, child_pipe = multiprocessing.connection.Pipe()
        path = [entry or os.getcwd() for entry in sys.path if isinstance(entry, str)]
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        with child_pipe:
            inherited = [child_pipe.fileno(), *descriptors]
            program = BOOTSTRAP.format(path=path, parent=os.getpid(), descriptors=inherited)
            command = [sys.executable, *flags, "-c", program]
            try:
                self.popen = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, pass_fds=inherited)
            except OSError as problem:
                raise RunError(f"rank {rank} could not be started: {one_line(problem)}") from problem
        # a large call fills the socket; a rank that never reads it must not block the parent
        threading.Thread(target=self.send, args=messages, daemon=True).start()

    @property
    def reported(self) -> bool:
        return self.stage == "done" or self.failure is not None

    def send(self, *messages: bytes) -> None:
        with contextlib.suppress(OSError):  # the rank has died, which is noticed elsewhere
            for message in messages:
                self.pipe.send_bytes(message)

    def receive(self) -> None:
        """Read one message, or the end of the rank."""
        try:
            message = self.pipe.recv_bytes()
        except (EOFError, OSError):
            self.ended()
            return
        self.heard = time.monotonic()
        try:
            stage, value = pickle.loads(message)
        except Exception as problem:
            self.stage = "done"
            self.fail(f"returned a result that can't be unpickled here ({one_line(problem)}); return plain data")
            return
        if stage == "status":
            self.status = value
            return
        self.stage = stage
        if stage == "importing":
            self.begun = self.heard
        elif stage == "failed":
            self.failure = value
        else:
            self.result = value

    def ended(self) -> None:
        """It has ended, or closed its socket, without a report."""
        try:
            code = self.popen.wait(timeout=1)
            self.fail(_describe_exit(code) + (" before fn returned" if code >= 0 else ""))
        except subprocess.TimeoutExpired:
            self.fail("closed the socket to its parent; fn must not close descriptors that it has not opened")

    def fail(self, cause: str) -> None:
        self.failure = Failure(rank=self.rank, cause=cause, when=time.monotonic())


# --- before the ranks start ---


@contextlib.contextmanager
def _store_file() -> Iterator[tuple[str, list[int]]]:
    """The file through which the ranks find each other, and the descriptors that they need to open it.

    On Linux it has no name, so that nothing is left of it even if this process is killed.
    """
    descriptor = -1
    if hasattr(os, "memfd_create") and os.path.isdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # a sandbox may refuse it
            descriptor = os.memfd_create("weft")
    if descriptor >= 0:
        try:
            yield f"/proc/self/fd/{descriptor}", [descriptor]
        finally:
            os.close(descriptor)
    else:
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            yield os.path.join(folder, "store"), []


def _environment(ranks: int, threads: int | None) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("MASTER_ADDR", "MASTER_PORT")}
    environment |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    environment |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback_interface())
    set_device_variables(environment)
    set_malloc_variables(environment)
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)  # OpenMP reads it once, when torch is imported
    return environment


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    for name in names:
        if re.fullmatch(r"lo\d*", name):  # lo on Linux, lo0 on macOS and the BSDs
            return name
    raise WeftError(f"the ranks of weft.launch communicate over a loopback interface (interfaces: {names}); add one")


@contextlib.contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Ranks start with SIGINT blocked, so that Ctrl-C can't hit them before they ignore it; here it is only delayed."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- while they run ---


class _Watch:
    """The wait for all results, while any rank may fail, stop, or not move."""

    def __init__(self, processes: list[_RankProcess], limits: Limits, stop: threading.Event) -> None:
        self._processes, self._limits, self._stop = processes, limits, stop
        self._going = self._stop_sent = False
        self._looked = time.monotonic()

    def wait_for_results(self) -> None:
        """Until every rank has reported its result; raises the cause of the first failure."""
        while waiting := [process for process in self._processes if not process.reported]:
            _receive_reports(waiting)
            self._raise_failure()
            self._forgive_pause()
            if self._going:
                for process in waiting:
                    self._check_alive(process)
                self._forward_stop()
            else:
                self._check_start()
        self._raise_failure()

    def _raise_failure(self) -> None:
        failures = [process.failure for process in self._processes if process.failure is not None]
        if failures:
            cause = min(failures, key=lambda failure: (failure.secondary, failure.when))
            waited = time.monotonic() > cause.when + CAUSE_WAIT or all(process.reported for process in self._processes)
            if waited or not cause.secondary:
                raise cause.error()

    def _forgive_pause(self) -> None:
        """If this process was stopped itself (Ctrl-Z), nobody has missed a heartbeat."""
        now = time.monotonic()
        if now - self._looked > PAUSED:
            for process in self._processes:
                process.heard = now
        self._looked = now

    def _check_start(self) -> None:
        if all(process.stage in ("joined", "done") for process in self._processes):
            self._going = True
            for process in self._processes:
                process.send(GO)
            return
        if self._stop.is_set():
            raise RunError("the ranks were asked to stop before all of them had started")
        late = [process for process in self._processes if process.stage in ("started", "importing")]
        late = late or [process for process in self._processes if process.stage == "loaded"]
        if time.monotonic() > max(process.begun for process in self._processes) + self._limits.start:
            raise _start_timeout(late, self._limits.start)

    def _check_alive(self, process: _RankProcess) -> None:
        """Fail a rank that is stopped, or that does not move within the limit of its phase."""
        status, now = process.status, time.monotonic()
        where = "" if status is None else f"; it was in: {status}"
        silence = now - process.heard
        if silence > self._limits.silence and hang_dump.is_stopped(process.popen.pid):
            process.fail(f"gave no sign of life for {silence:.0f} s and was killed: it is stopped (SIGSTOP){where}")
        if status is None or status.limit is None:
            return  # it may do what it likes, also without a turn for its other threads
        if silence > max(status.limit, LONG_SILENCE) + STUCK_MARGIN:
            hang_dump.request_stacks(process.rank, process.popen.pid)
            process.fail(
                f"gave no sign of life for {silence:.0f} s and was killed: it runs, but its threads do not{where}"
            )
        elif status.unmoved > status.limit + STUCK_MARGIN:
            hang_dump.request_stacks(process.rank, process.popen.pid)
            process.fail(
                f"is alive, has not moved for {status.unmoved:.0f} s and was killed (limit: {status.limit:g} s{where})"
                "; see its stacks on stderr, and raise the deadline if it really takes that long"
            )

    def _forward_stop(self) -> None:
        if self._stop.is_set() and not self._stop_sent:
            self._stop_sent = True
            for process in self._processes:
                process.send(STOP)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.popen.pid, signal.SIGCONT)  # a stopped rank could not follow the request


def _receive_reports(waiting: list[_RankProcess]) -> None:
    """Read what ranks have sent, and notice those that have ended."""
    ready = multiprocessing.connection.wait([process.pipe for process in waiting], timeout=POLL)
    for process in waiting:
        if process.pipe in ready:
            process.receive()
        elif process.popen.poll() is not None and not process.pipe.poll():
            process.ended()  # a process that it has started still holds its socket


def _start_timeout(late: list[_RankProcess], timeout: float) -> RunError:
    for process in late:
        hang_dump.request_stacks(process.rank, process.popen.pid)
    names = ", ".join(str(process.rank) for process in late)
    return RunError(
        f"rank{'s' * (len(late) > 1)} {names} did not join the process group within {timeout:g} s (see the stacks on "
        "stderr); if ranks only need more time, raise timeout= (in a job: schedule.timeout)"
    )


def _wait_for_exit(processes: list[_RankProcess]) -> None:
    """Let ranks that have sent their results exit normally; a failure here only warns, since no result is lost."""
    end = time.monotonic() + EXIT_LIMIT
    for process in processes:
        problem = ""
        while process.popen.poll() is None and not problem:
            now = time.monotonic()
            with contextlib.suppress(EOFError, OSError):
                if process.pipe.poll(POLL):
                    process.pipe.recv_bytes()  # a heartbeat
                    process.heard = now
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(timeout=0.01)
            if now > end:
                problem = f"was still running {EXIT_LIMIT:g} s after fn had returned, and was killed (did fn leave a "
                problem += "thread running?)"
            elif now > process.heard + EXIT_SILENCE:
                stopped = " (it is stopped)" if hang_dump.is_stopped(process.popen.pid) else ""
                problem = f"had not exited {EXIT_SILENCE:g} s after fn had returned, and was killed{stopped}"
        if not problem and (code := process.popen.poll()):
            problem = f"{_describe_exit(code)} after fn had returned"
        if problem:
            warnings.warn(f"rank {process.rank} {problem}", RuntimeWarning, stacklevel=4)


def _describe_exit(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}{' (by a user, or because memory ran out)' if name == 'SIGKILL' else ''}"
