"""How often the host waits for its device in a step, once a run is in full swing."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tests.helpers import pretend
from tests.helpers.device_runs import ROWS, Case, batch, pipeline

from weft.runtime.device import pauses
from weft.runtime.engine.waiting import Waits
from weft.runtime.engine.worker import Worker

WARM_UP, COUNTED = 3, 4  # steps
Step = Callable[[int], object]


@dataclass(kw_only=True)
class Counted:
    """Waits of all ranks in some steps, by kind, and where they were."""

    kinds: Counter[str] = field(default_factory=Counter)
    traces: list[str] = field(default_factory=list, repr=False)

    @property
    def total(self) -> int:
        return self.kinds.total()

    @property
    def where(self) -> str:
        """For the message of a failed assertion."""
        return "\n".join([str(dict(self.kinds)), *dict.fromkeys(self.traces)])


@contextlib.contextmanager
def counting_waits() -> Iterator[Counted]:
    """Count calls that block, and what a worker polls for because the device has not got there yet."""
    controls, counted = pretend.load(), Counted()
    wait_for_device = Worker.wait_for_device

    def noted(self: Worker, ready: Callable[[], bool], what: str) -> Waits:
        counted.kinds["device"] += not ready()
        yield from wait_for_device(self, ready, what)

    controls.reset_counts()
    with mock.patch.object(Worker, "wait_for_device", noted), controls.tracing():
        yield counted
    counted.kinds.update({kind: count for kind, count in controls.counts().items() if kind != "poll"})
    counted.kinds = +counted.kinds
    counted.traces = [trace for trace in controls.traces() if not trace.startswith("poll")]


def steady_waits(step: Step) -> Counted:
    """Waits of `COUNTED` steps of a run; what a step computes is complete after about half of one."""
    controls = pretend.load()
    for number in range(WARM_UP):
        step(number)
    before = controls.launches()
    step(WARM_UP)
    controls.set_lag((controls.launches() - before) // 2)
    step(WARM_UP + 1)
    with counting_waits() as counted, short_pauses():
        for number in range(COUNTED):
            step(WARM_UP + 2 + number)
    controls.set_lag(0)
    return counted


def short_pauses() -> contextlib.AbstractContextManager[Any]:
    """Look at a device again at once: a lag counts looks, not time."""
    return mock.patch.object(pauses, "LONGEST", pauses.FIRST)


def waits_of(case: Case, **options: Any) -> Counted:
    """Of a case on virtual ranks, whose inputs and targets are ordinary host memory; `options` of the pipeline."""
    with pipeline(case, "pretend:0", **options) as pipe:
        return steady_waits(lambda number: pipe.step(*batch(case.model, number, case.replicas * ROWS)))
