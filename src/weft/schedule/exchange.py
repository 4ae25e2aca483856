"""All ranks of a window, run without time, with messages that block as they do in the runtime.

A link (a directed pair of ranks) holds a bounded number of unread messages, its *slots*. A sender whose link
is full waits; a receiver may take any message that its link holds. How many slots a schedule needs so that
nobody waits for ever is a property of the schedule: one for most, more where the links form a ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

from weft.schedule.actions import Op
from weft.schedule.lower import Program, Step

Message: TypeAlias = "tuple[str, int, int]"  # pass, chunk that takes it, micro-batch


class Exchange:
    def __init__(self, program: Program, *, minibatches: int) -> None:
        self.program, self.placement = program, program.schedule.placement
        self.minibatches = minibatches
        ranks = range(program.schedule.stages)
        self.steps = [list(program.steps(rank, minibatches=minibatches)) for rank in ranks]
        self.needs, self.feeds = program.needs.tolist(), program.feeds.tolist()

    def run(self, visit: Callable[[int, Step], None], *, slots: int | None = None) -> dict[int, int]:
        """Run all steps; `visit` sees each one. Returns the place of every rank that is stuck: none, if well."""
        self.slots, self.fullest = slots, 0
        self.at = [0] * len(self.steps)
        self.links: dict[tuple[int, int], set[Message]] = defaultdict(set)
        self.unsent: dict[int, Message] = {}
        moved = True
        while moved:
            moved = False
            for rank in range(len(self.steps)):
                while self._step(rank, visit):
                    moved = True
        return {rank: at for rank, at in enumerate(self.at) if at < len(self.steps[rank]) or rank in self.unsent}

    def needed_slots(self) -> int:
        """The fewest slots a link with which the window runs to its end."""
        self.run(lambda rank, step: None)
        low, high = 1, max(1, self.fullest)
        while low < high:
            middle = (low + high) // 2
            if self.run(lambda rank, step: None, slots=middle):
                low = middle + 1
            else:
                high = middle
        return low

    def waits_for(self, rank: int) -> str:
        """What a stuck rank waits for, in words."""
        if rank in self.unsent:
            kind, chunk, index = self.unsent[rank]
            return f"to send the {kind} of micro-batch {index} to chunk {chunk}: the link's {self.slots} slots are full"
        return f"before {self.steps[rank][self.at[rank]].action} for its input"

    def _step(self, rank: int, visit: Callable[[int, Step], None]) -> bool:
        """Run a rank's next action, if it can be run."""
        if (rank in self.unsent and not self._send(rank)) or self.at[rank] == len(self.steps[rank]):
            return False
        step = self.steps[rank][self.at[rank]]
        op, chunk, index = step.action
        kind = pass_of(step)
        if self.needs[op][chunk] >= 0:
            link = self.links[rank if step.source < 0 else step.source, rank]
            if (kind, chunk, index) not in link:
                return False
            link.remove((kind, chunk, index))
        visit(rank, step)
        self.at[rank] += 1
        if self.feeds[op][chunk] >= 0:
            self.unsent[rank] = (kind, self.feeds[op][chunk], index)
            self._send(rank)
        return True

    def _send(self, rank: int) -> bool:
        message = self.unsent[rank]
        to = self.placement[message[1]]
        link = self.links[rank, to]
        if to != rank:  # what stays on the rank takes no slot
            if len(link) == self.slots:
                return False
            self.fullest = max(self.fullest, len(link) + 1)
        link.add(message)
        del self.unsent[rank]
        return True


def pass_of(step: Step) -> str:
    return "forward" if step.action.op == Op.F else "backward"
