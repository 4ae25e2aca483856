"""How the processes of a benchmark end, whatever happens: at a deadline, and with their parent.

`weft.launch(timeout=)` is about the start of ranks, and weft's own waits have their deadlines; those of torch's
schedules, DDP, FSDP2 and barriers have none: gloo would wait half an hour.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Iterator

START_TIMEOUT = 300.0  # seconds for all ranks to start, on a busy machine
BUILD_TIMEOUT = 400.0  # seconds to build all contenders, on a busy machine


@contextlib.contextmanager
def exit_after(seconds: float) -> Iterator[None]:
    """End this process, with the stacks of all its threads on stderr, unless the body returns in time.

    Works for a process that hangs in C, and needs no Python thread. A process has one such deadline: don't nest.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def exit_with_parent(parent: int) -> None:
    """Tie this process to the one that started it, of this process ID: the kernel kills this one when that ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)
