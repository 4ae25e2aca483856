"""A hang that explains itself.

When a wait passes its deadline, the reason is usually on another rank. So every rank handles one signal by printing the
stacks of all its threads, from C, whatever it is doing: computing, sleeping, blocked in a message or stopped. The rank
whose wait timed out sends this signal to all ranks of its host, one after the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping

if sys.platform == "linux":
    SIGNAL: int = signal.SIGRTMIN + 7  # a real-time signal that nothing else uses
else:
    SIGNAL = signal.SIGUSR2

ANSWER_TIMEOUT = 5.0  # seconds for a process to write its stacks
PAUSE = 0.1  # seconds to wait instead where it can't be seen whether it is done
LOCK_TIMEOUT = 30.0  # seconds to wait for another rank to finish its dump


def enable() -> None:
    """From now on this process prints its stacks on request."""
    faulthandler.register(SIGNAL, file=2, all_threads=True, chain=False)


def dump(peers: Mapping[int, tuple[str, int]], *, rank: int, reason: str) -> None:
    """Print why this rank waits, its stacks, and those of its peers (rank -> hostname, pid). Never raises.

    A stopped peer is continued, since it can't answer otherwise. Deadlines pass on many ranks at once: the first rank
    asks all, and the others only wait until it is done.
    """
    with contextlib.suppress(Exception):
        hostname = socket.gethostname()
        others = {peer: address for peer, address in sorted(peers.items()) if peer != rank}
        local_pids = [pid for host, pid in others.values() if host == hostname]
        _write(f"rank {rank} (pid {os.getpid()}) on {hostname}: {reason}")
        with _lock(min([os.getpid(), *local_pids])) as is_first:
            if not is_first:
                _write(f"rank {rank}: another rank of this host has just dumped all stacks, see above")
                return
            _write(f"stacks of rank {rank} (pid {os.getpid()}):")
            faulthandler.dump_traceback(file=2, all_threads=True)
            for peer, (host, pid) in others.items():
                if host == hostname:
                    request_stacks(peer, pid)
                else:
                    _write(f"rank {peer} (pid {pid}) is on another host, {host}: no stacks from there")


def request_stacks(rank: int, pid: int) -> None:
    """Make a process of this host print its stacks, or print why it can't. Never raises."""
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
        blocking_before = _blocking_threads(pid)
        _send_signal(pid)
        os.kill(pid, signal.SIGCONT)  # afterwards, so that a stopped process handles our signal first
        if not status:
            time.sleep(PAUSE)
            return
        end, done_checks = time.monotonic() + ANSWER_TIMEOUT, 0
        while done_checks < 2:  # in a row: for a moment, a signal is neither pending nor being handled
            if time.monotonic() > end:
                _write(f"rank {rank} (pid {pid}) has not answered within {ANSWER_TIMEOUT:g} s (state: {state})")
                return
            time.sleep(0.01)
            pending = any(_has_signal(_status(pid), field) for field in ("SigPnd", "ShdPnd"))
            done_checks = 0 if pending or _blocking_threads(pid) - blocking_before else done_checks + 1
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


def _send_signal(pid: int) -> None:
    """To the main thread, where libc can: any thread may handle a signal that is sent to the whole process, and then
    the main thread of a stopped process has continued before its stack is printed."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None) if sys.platform == "linux" else None
    if tgkill is None:
        os.kill(pid, SIGNAL)
    elif tgkill(pid, pid, SIGNAL):
        raise OSError(ctypes.get_errno(), f"no signal could be sent to {pid}")


def _write(text: str) -> None:
    """To the descriptor that faulthandler writes to, unbuffered, so that lines and stacks keep their order."""
    with contextlib.suppress(OSError):
        os.write(2, f"weft: {text}\n".encode(errors="backslashreplace"))


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
def _lock(key: int) -> Iterator[bool]:
    """Yields whether the lock was free; if another process held it, waits until that is done.

    The lock is an abstract socket name, which the kernel frees when its owner dies (Linux only).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        end = time.monotonic() + LOCK_TIMEOUT
        was_free = True
        while sys.platform == "linux" and time.monotonic() < end:
            try:
                lock.bind(f"\0weft-stacks-{key}")
                break
            except OSError:
                was_free = False
                time.sleep(0.02)
        yield was_free
