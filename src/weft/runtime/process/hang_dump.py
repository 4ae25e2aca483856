"""A hang that explains itself.

When a wait passes its deadline, the rank that waited seldom knows why: the reason is where another rank stands. So
every rank listens to one signal that makes it print the stacks of all its threads, from C, whatever it is doing:
computing, asleep, blocked in a message or stopped. The rank that waited asks all ranks of its host, one by one.
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
    SIGNAL: int = signal.SIGRTMIN + 7  # a real-time signal, which nothing else uses
else:
    SIGNAL = signal.SIGUSR2

ANSWER = 5.0  # seconds that a process gets to write its stacks
PAUSE = 0.1  # seconds for the same where it can't be seen whether it is done
TURN = 30.0  # seconds to let another rank finish its round


def ready() -> None:
    """From now on this process prints its stacks when it is asked to."""
    faulthandler.register(SIGNAL, file=2, all_threads=True, chain=False)


def dump(peers: Mapping[int, tuple[str, int]], *, rank: int, reason: str) -> None:
    """Print why this rank waits, its stacks, and those of its peers (rank -> hostname, pid). Never raises.

    A stopped peer is let go on, since it can't answer otherwise. Deadlines pass on many ranks at once: the first one
    asks all, and those that come while it does so only wait until it is done.
    """
    with contextlib.suppress(Exception):
        here = socket.gethostname()
        others = {peer: place for peer, place in sorted(peers.items()) if peer != rank}
        near = [pid for host, pid in others.values() if host == here]
        _say(f"rank {rank} (pid {os.getpid()}) on {here}: {reason}")
        with _turn(min([os.getpid(), *near])) as mine:
            if not mine:
                _say(f"rank {rank}: another rank has just asked all ranks of this host, see its stacks")
                return
            _say(f"stacks of rank {rank} (pid {os.getpid()}):")
            faulthandler.dump_traceback(file=2, all_threads=True)
            for peer, (host, pid) in others.items():
                if host == here:
                    ask(peer, pid)
                else:
                    _say(
                        f"rank {peer} (pid {pid}) is on another host, {host}: its stacks can't be asked for from {here}"
                    )


def ask(rank: int, pid: int) -> None:
    """Make one process of this host print its stacks, or tell why it can't. Never raises."""
    try:
        status = _status(pid)
        state = status.get("State", "")
        if state[:1] in ("Z", "X"):
            raise ProcessLookupError
        if status and not _holds(status, "SigCgt"):  # the signal would end it
            _say(f"rank {rank} (pid {pid}) does not listen: it is starting up, or not a rank of weft")
            return
        _say(f"stacks of rank {rank} (pid {pid}{', which was stopped and goes on now' if state[:1] == 'T' else ''}):")
        deaf = _blocking(pid)
        _signal(pid)
        os.kill(pid, signal.SIGCONT)  # afterwards, so that the signal is the first thing that a stopped one sees
        if not status:
            time.sleep(PAUSE)
            return
        end, seen = time.monotonic() + ANSWER, 0
        while seen < 2:  # in a row, since between pending and taken a signal is nowhere
            if time.monotonic() > end:
                _say(f"rank {rank} (pid {pid}) has not answered within {ANSWER:g} s (state: {state})")
                return
            time.sleep(0.01)
            pending = any(_holds(_status(pid), which) for which in ("SigPnd", "ShdPnd"))
            seen = 0 if pending or _blocking(pid) - deaf else seen + 1
    except ProcessLookupError:
        _say(f"rank {rank} (pid {pid}) is gone")
    except Exception as problem:
        _say(f"rank {rank} (pid {pid}) can't be asked: {problem}")


def _signal(pid: int) -> None:
    """To the main thread, where Linux's libc can: of a process's own signals any thread may be the taker, while a main
    thread that was stopped already goes on."""
    tgkill = getattr(ctypes.CDLL(None, use_errno=True), "tgkill", None) if sys.platform == "linux" else None
    if tgkill is None:
        os.kill(pid, SIGNAL)
    elif tgkill(pid, pid, SIGNAL):
        raise OSError(ctypes.get_errno(), f"no signal could be sent to {pid}")


def _say(text: str) -> None:
    """Straight to where faulthandler writes, so that lines and stacks keep their order."""
    with contextlib.suppress(OSError):
        os.write(2, f"weft: {text}\n".encode(errors="backslashreplace"))


def _status(pid: int | str) -> dict[str, str]:
    """What Linux tells about a process; nothing on other systems."""
    if sys.platform != "linux":
        return {}
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return {name: value.strip() for name, _, value in (line.partition(":") for line in file)}
    except FileNotFoundError:
        raise ProcessLookupError from None


def _blocking(pid: int) -> set[str]:
    """The threads that do not take the signal now; one that writes the stacks does not, until it is done."""
    threads: set[str] = set()
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        threads = {one for one in os.listdir(f"/proc/{pid}/task") if _holds(_status(f"{pid}/task/{one}"), "SigBlk")}
    return threads


def _holds(status: dict[str, str], which: str) -> bool:
    return bool(int(status.get(which, "0"), 16) >> (SIGNAL - 1) & 1)


@contextlib.contextmanager
def _turn(key: int) -> Iterator[bool]:
    """Whether nobody else was at it; if somebody was, come back when they are done.

    The lock is a name that the kernel forgets with its owner (an abstract socket, Linux only).
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock:
        end = time.monotonic() + TURN
        free = True
        while sys.platform == "linux" and time.monotonic() < end:
            try:
                lock.bind(f"\0weft-stacks-{key}")
                break
            except OSError:
                free = False
                time.sleep(0.02)
        yield free
