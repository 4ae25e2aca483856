"""The options of coming updates, such as their learning rates: from a second scheduler that runs ahead."""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from typing import Any, TypeAlias

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from weft.runtime.update.host_numbers import on_device
from weft.runtime.update.makers import SchedulerMaker
from weft.runtime.update.shadow import shadow_optimizer

Groups: TypeAlias = "list[dict[str, Any]]"  # the options of every parameter group, in one update
SCHEDULED = ("lr", "momentum", "betas")  # options that schedulers change


class RatesAhead:
    """Runs a scheduler of the same kind as the real one on a shadow of the optimizer, whose options are on the host."""

    def __init__(self, optimizer: Optimizer, make: SchedulerMaker, scheduler: LRScheduler) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._shadow = shadow_optimizer(optimizer)
        for group in self._shadow.param_groups:
            group["lr"] = _on_host(group.get("initial_lr", group["lr"]))  # what the real scheduler started with
        self._shadow._opt_called = True  # type: ignore[attr-defined]  # or the scheduler warns of a missing update
        self._ahead = make(self._shadow)
        for group, real in zip(self._shadow.param_groups, optimizer.param_groups, strict=True):
            group["lr"] = _on_host(real["lr"])  # a scheduler with a `last_epoch` continues from here
        self._coming = deque([self._options()])

    def scheduled(self, updates: int) -> list[Groups]:
        """The scheduled options of the coming updates."""
        self._reach(updates)
        return [self._coming[update] for update in range(updates)]

    def options(self, updates: int) -> list[Groups]:
        """All options of the coming updates."""
        groups = self._optimizer.param_groups
        return [
            [group | scheduled for group, scheduled in zip(groups, update, strict=True)]
            for update in self.scheduled(updates)
        ]

    def advance(self) -> None:
        """An update was made."""
        self._reach(2)
        self._coming.popleft()

    def load(self) -> None:
        """Go to where the real scheduler is."""
        for group, real in zip(self._shadow.param_groups, self._optimizer.param_groups, strict=True):
            group |= {name: _on_host(value) for name, value in real.items() if name != "params"}
        self._ahead.load_state_dict(copy.deepcopy(self._scheduler.state_dict()))
        self._coming = deque([self._options()])

    def _reach(self, updates: int) -> None:
        while len(self._coming) < updates:
            with contextlib.suppress(ValueError):  # a schedule that has ended raises: its last rates stay
                self._ahead.step()
            self._coming.append(self._options())

    def _options(self) -> Groups:
        return [
            {name: copy.deepcopy(group[name]) for name in SCHEDULED if name in group}
            for group in self._shadow.param_groups
        ]


def _on_host(value: Any) -> Any:
    """A copy of an option; of a tensor on a device, on the host, where later reads wait for nothing."""
    return value.detach().cpu() if on_device(value) else copy.deepcopy(value)
