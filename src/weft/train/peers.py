"""The processes of a run among each other: what they agree on, and what they tell each other in passing.

In passing means without a stall: after every mini-batch each process hands in a few numbers and looks at those of
`LAG` mini-batches ago, which have come in behind the pipeline's back. So all learn of a wish to stop at the same
mini-batch, notice when they are not fed the same samples, and know each other's figures for the display.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from weft.runtime.comm import Collectives
from weft.runtime.process import this_rank

LAG = 4  # mini-batches: ranks of one pipeline are never further apart
PATIENCE = 10  # times the deadline, for what takes one rank long and another none: opening the data


class Peers:
    """This process among those of the run; without a process group it is alone."""

    def __init__(self, *, deadline: float) -> None:
        self._patience = PATIENCE * deadline
        self._collectives = Collectives(deadline=deadline, longest=self._patience, option="schedule.deadline")
        self.rank, self.world = self._collectives.rank, self._collectives.world
        self._told: deque[Callable[[], list[list[float]]]] = deque()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    def everyone(self, data: Any) -> list[Any]:
        """What each process has to say, by rank; all come to this call."""
        return self._collectives.all_gather(data, purpose="open the data", deadline=self._patience)

    def tell(self, numbers: Sequence[float]) -> list[list[float]] | None:
        """Hand in this mini-batch's numbers; those of all processes from `LAG` mini-batches ago, once there are."""
        self._told.append(self._collectives.start_all_gather(numbers, purpose="compare mini-batches"))
        return self._told.popleft()() if len(self._told) > LAG else None

    def rest(self) -> list[list[list[float]]]:
        """What was handed in and not looked at yet, in order."""
        return [self._told.popleft()() for _ in range(len(self._told))]


@contextlib.contextmanager
def stop_wish() -> Iterator[threading.Event]:
    """An event that is set when the run is asked to end: by `weft train`'s own process, or by SIGTERM and SIGINT.

    Who ends a job may send SIGTERM to all of its processes, so ranks that `weft train` has started take it too. The
    second signal is not caught any more, and ends the process at once.
    """
    stop = this_rank.stop if this_rank.name else threading.Event()
    numbers = (signal.SIGTERM,) if this_rank.name else (signal.SIGTERM, signal.SIGINT)
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if main}

    def wish(number: int, frame: Any) -> None:
        stop.set()
        for one, handler in before.items():
            signal.signal(one, handler)

    for number in before:
        signal.signal(number, wish)
    try:
        yield stop
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
