"""A hang that explains itself.

When a wait passes its deadline, the reason is usually on another rank. So every rank handles one signal by writing the
stacks of all its threads, from C, whatever it is doing: computing, sleeping, blocked in a message or stopped. The rank
whose wait timed out sends this signal to all ranks of its host, one after the other, and prints their stacks.

Stacks go to an anonymous file of each process, which others of the same user open through /proc. stderr may be a pipe
that nobody reads, or a terminal after Ctrl-S: a rank that wrote there from C would hang beyond every deadline. Only the
rank that asks writes to its stderr, and gives up when that is blocked. On systems other than Linux, and where no such
file can be made, ranks write to stderr themselves.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from weft.runtime.process.liveness import status
from weft.streams import write_bounded

if sys.platform == "linux":
    SIGNAL: int = signal.SIGRTMIN + 7  # a real-time signal that nothing else uses
else:
    SIGNAL = signal.SIGUSR2

ANSWER_TIMEOUT = 5.0  # seconds for a process to write its stacks
PAUSE = 0.1  # seconds to wait instead where it can't be seen whether it is done
LOCK_TIMEOUT = 30.0  # seconds to wait for another rank to finish its dump
WRITE_TIMEOUT = 1.0  # seconds for stderr to take a text

_stderr_is_blocked = threading.Event()


def enable() -> None:
    """From now on this process writes its stacks on request."""
    faulthandler.register(SIGNAL, file=_own_file(), all_threads=True, chain=False)


def dump(peers: Mapping[int, tuple[str, int]], *, rank: int, reason: str) -> None:
    """Print why this rank waits, its stacks, and those of its peers (rank -> hostname, pid). Never raises.

    A stopped peer is continued, since it can't answer otherwise. Deadlines pass on many ranks at once: the first rank
    asks all, and the others only wait until it is done.
    """
    with contextlib.suppress(Exception), status.during("dump stacks"):  # which has no limit
        own_file = _own_file()
        hostname = socket.gethostname()
        others = {peer: address for peer, address in sorted(peers.items()) if peer != rank}
        local_pids = [pid for host, pid in others.values() if host == hostname]
        _write(f"rank {rank} (pid {os.getpid()}) on {hostname}: {reason}")
        with _lock([os.getpid(), *local_pids]) as is_first:
            if not is_first:
                _write(f"rank {rank}: another rank of this host has just dumped all stacks, see above")
                return
            _write(f"stacks of rank {rank} (pid {os.getpid()}):")
            with _printed(os.getpid()):
                faulthandler.dump_traceback(file=own_file, all_threads=True)
            for peer, (host, pid) in others.items():
                if host == hostname:
                    request_stacks(peer, pid)
                else:
                    _write(f"rank {peer} (pid {pid}) is on another host, {host}: no stacks from there")


def request_stacks(rank: int, pid: int) -> None:
    """Print the stacks of a process of this host, or why there are none. Never raises."""
    try:
        status = _status(pid)
        state = status.get("State", "")
        if state[:1] in ("Z", "X"):
            raise ProcessLookupError
        if status and not _has_signal(status, "SigCgt"):  # not handled: the signal would kill it
            _write(f"rank {rank} (pid {pid}) has no stack dump enabled: it is starting up, or not a rank of weft")
            return
        stopped = ", which was stopped and now continues" if state[:1] == "T" else ""
        _write(f"stacks of rank {rank} (pid {pid}{stopped}):")
        with _printed(pid) as file:
            answered = _ask(pid, file, has_proc=bool(status))
        if not answered:
            _write(f"rank {rank} (pid {pid}) has not answered within {ANSWER_TIMEOUT:g} s (state: {state})")
    except ProcessLookupError:
        _write(f"rank {rank} (pid {pid}) has ended")
    except Exception as problem:
        _write(f"the stacks of rank {rank} (pid {pid}) can't be requested: {problem}")


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped; False where that can't be seen."""
    try:
        return _status(pid).get("State", "")[:1] in ("T", "t")
    except ProcessLookupError:
        return False


def _ask(pid: int, file: int | None, *, has_proc: bool) -> bool:
    """Let a process write its stacks, to this file if it has one; whether it has done so in time."""
    blocking_before = _blocking_threads(pid) if has_proc else set()
    _send_signal(pid)
    os.kill(pid, signal.SIGCONT)  # afterwards, so that a stopped process handles our signal first
    if not has_proc:
        time.sleep(PAUSE)
        return True
    end, done_checks = time.monotonic() + ANSWER_TIMEOUT, 0
    while done_checks < 2:  # in a row: for a moment, a signal is neither pending nor being handled
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
        pending = any(_has_signal(_status(pid), field) for field in ("SigPnd", "ShdPnd"))
        pending |= file is not None and not os.fstat(file).st_size
        done_checks = 0 if pending or _blocking_threads(pid) - blocking_before else done_checks + 1
    return True


def _send_signal(pid: int) -> None:
    """To the main thread, where libc can: any thread may handle a signal that is sent to the whole process, and then
    the main thread of a stopped process has continued before its stack is printed."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None) if sys.platform == "linux" else None
    if tgkill is None:
        os.kill(pid, SIGNAL)
    elif tgkill(pid, pid, SIGNAL):
        raise OSError(ctypes.get_errno(), f"no signal could be sent to {pid}")


# Output


@contextlib.contextmanager
def _printed(pid: int) -> Iterator[int | None]:
    """Print what a process writes to its file inside the block; before that, empty it, so that it never grows."""
    file = _open_file(pid)
    if file is None:  # it writes to stderr
        yield None
        return
    try:
        os.ftruncate(file, 0)
        yield file
        _print(os.pread(file, os.fstat(file).st_size, 0))
    finally:
        os.close(file)


def _write(text: str) -> None:
    _print(f"weft: {text}\n".encode(errors="backslashreplace"))


def _print(text: bytes) -> None:
    """To stderr, unless it was blocked before."""
    if not _stderr_is_blocked.is_set() and not write_bounded(2, text, WRITE_TIMEOUT):
        _stderr_is_blocked.set()


# The file of a process, which has its id in the name: a forked process inherits that of its parent


def _own_file() -> int:
    """The descriptor to which this process writes its stacks: its file, made here if there is none, else stderr."""
    with contextlib.suppress(OSError):
        if sys.platform == "linux" and _find_file(os.getpid()) is None:
            _make_file(_file_name(os.getpid()))
        found = _find_file(os.getpid())
        return 2 if found is None else found
    return 2


def _make_file(name: str) -> None:
    """Its descriptor stays open as long as this process. Writers append, since readers empty the file."""
    try:
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    except (OSError, AttributeError):  # a sandbox may refuse it, some Pythons lack it
        with tempfile.TemporaryDirectory(prefix="weft-") as folder:
            descriptor = os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_APPEND)


def _open_file(pid: int) -> int | None:
    """Open the file of a process; None if it has none."""
    found = _find_file(pid)
    return None if found is None else os.open(f"/proc/{pid}/fd/{found}", os.O_RDWR)


def _find_file(pid: int) -> int | None:
    """The number of its descriptor in that process."""
    with contextlib.suppress(FileNotFoundError):  # the process has ended, or the system has no /proc
        for number in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):  # closed in between
                if os.readlink(f"/proc/{pid}/fd/{number}").endswith(f"{_file_name(pid)} (deleted)"):
                    return int(number)
    return None


def _file_name(pid: int) -> str:
    return f"weft-stacks-{pid}"


# The state of a process


def _status(pid: int | str) -> dict[str, str]:
    """/proc/PID/status on Linux; empty on other systems."""
    if sys.platform != "linux":
        return {}
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except FileNotFoundError:
        raise ProcessLookupError from None


def _blocking_threads(pid: int) -> set[str]:
    """The threads that block the signal now, as a thread does while it writes the stacks."""
    threads: set[str] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        names = os.listdir(f"/proc/{pid}/task")
        threads = {name for name in names if _has_signal(_status(f"{pid}/task/{name}"), "SigBlk")}
    return threads


def _has_signal(status: dict[str, str], field: str) -> bool:
    return bool(int(status.get(field, "0"), 16) >> (SIGNAL - 1) & 1)


@contextlib.contextmanager
def _lock(pids: Iterable[int]) -> Iterator[bool]:
    """Yields whether the lock was free; if another process held it, waits until that is done.

    It is a lock on the file of the first of these processes, which no other user can open, and the kernel frees it when
    its owner dies. Without any file there is no lock.
    """
    file = None
    for pid in sorted(pids):
        with contextlib.suppress(OSError):
            if file is None:
                file = _open_file(pid)
    if file is None:
        yield True
        return
    try:
        end = time.monotonic() + LOCK_TIMEOUT
        was_free = True
        while time.monotonic() < end:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                was_free = False
                time.sleep(0.02)
        yield was_free
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)  # a process that was forked meanwhile has the file, too
        os.close(file)
