"""Requests to stop: SIGTERM and Ctrl-C set an event, on ranks and in the process that starts them.

The first signal is a request: the run finishes what it is doing and saves. The second ends the process at once.
"""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import threading
from collections.abc import Iterator
from typing import Any

from weft.errors import RunError
from weft.runtime.process import this_rank
from weft.streams import unblocked_output


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """On a rank: an event that is set when the run is asked to stop.

    Ranks that `weft train` has started learn that from it, but a batch system may send SIGTERM to all processes.
    """
    stop = this_rank.stop if this_rank.name else threading.Event()
    signals = (signal.SIGTERM,) if this_rank.name else (signal.SIGTERM, signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in signals if main}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def request(number: int, frame: Any) -> None:
        stop.set()
        restore()

    for number in before:
        signal.signal(number, request)
    try:
        yield stop
    finally:
        restore()


@contextlib.contextmanager
def stop_within(grace: float) -> Iterator[threading.Event]:
    """In the process that starts ranks: an event that the first signal sets; the run then has `grace` seconds."""
    stop = threading.Event()

    def request(number: int, frame: Any) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        signal.alarm(math.ceil(grace))
        message = f"stopping: finishing and saving, within {grace:g} s; once more to quit at once"
        with contextlib.suppress(Exception):  # a stream that the caller has replaced may refuse a signal handler
            print(f"weft: {message}", file=sys.stderr)

    def expire(number: int, frame: Any) -> None:
        raise RunError(
            f"the run did not stop within checkpoint.grace ({grace:g} s) and was killed; its last checkpoint is intact"
        )

    handlers = {signal.SIGTERM: request, signal.SIGINT: request, signal.SIGALRM: expire}
    with unblocked_output():  # a signal handler must not wait, nor interrupt a stream that can't be re-entered
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield stop
        finally:
            signal.alarm(0)
            for number, handler in before.items():
                signal.signal(number, handler)
