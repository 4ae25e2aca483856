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
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from weft.errors import PeerError
from weft.runtime.comm import gather_json
from weft.runtime.process import this_rank

LAG = 4  # mini-batches: ranks of one pipeline are never further apart
PATIENCE = 10  # times the deadline, for what takes one rank long and another none: opening the data


class Peers:
    """This process among those of the run; without a process group it is alone."""

    def __init__(self, *, deadline: float) -> None:
        self._group: Any = None
        self._deadline, patience = timedelta(seconds=deadline), timedelta(seconds=PATIENCE * deadline)
        self.rank, self.world = 0, 1
        if dist.is_initialized():
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._group = dist.new_group(list(range(self.world)), backend="gloo", timeout=patience)
        self._told: deque[tuple[Any, list[torch.Tensor]]] = deque()

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and shows."""
        return self.rank == 0

    def everyone(self, data: Any) -> list[Any]:
        """What each process has to say, by rank; all come to this call."""
        return [data] if self._group is None else gather_json(data, self._group, run=self._collective)

    def tell(self, numbers: Sequence[float]) -> list[list[float]] | None:
        """Hand in this mini-batch's numbers; those of all processes from `LAG` mini-batches ago, once there are."""
        mine = torch.tensor(numbers, dtype=torch.float64)
        if self._group is None:
            self._told.append((None, [mine]))
        else:
            theirs = [torch.empty_like(mine) for _ in range(self.world)]
            self._told.append((dist.all_gather(theirs, mine, group=self._group, async_op=True), theirs))
        return self._oldest() if len(self._told) > LAG else None

    def rest(self) -> list[list[list[float]]]:
        """What was handed in and not looked at yet, in order."""
        return [self._oldest() for _ in range(len(self._told))]

    def _oldest(self) -> list[list[float]]:
        work, found = self._told.popleft()
        if work is not None:
            self._collective(lambda: work.wait(self._deadline))
        return [one.tolist() for one in found]

    def _collective(self, operation: Callable[[], object]) -> None:
        try:
            operation()
        except RuntimeError as problem:
            raise PeerError(
                f"rank {self.rank} lost another rank, or waited too long ({str(problem).splitlines()[0][:200]}); "
                f"if one really takes that long, raise schedule.deadline ({self._deadline.total_seconds():g} s)"
            ) from None


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
