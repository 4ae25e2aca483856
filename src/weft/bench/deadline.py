"""A deadline for what a rank runs: whoever waits for a rank that is stuck ends, where gloo would wait half an hour.

`weft.launch(timeout=)` is about the start of ranks, and weft's own waits have their deadlines; those of torch's
schedules, DDP, FSDP2 and barriers don't.
"""

from __future__ import annotations

import contextlib
import faulthandler
import sys
from collections.abc import Iterator

START = 300.0  # seconds in which the ranks have to be there, on a machine that is busy with other things
BUILD = 400.0  # seconds that nobody needs to build all contenders, on such a machine


@contextlib.contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """End this process, with the stacks of all its threads on stderr, unless the body has ended by then.

    It also ends one that hangs in C, and takes no thread of Python. There is one deadline a process: don't nest.
    """
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
