"""Execute all ranks of a window without time, with messages that block as they do in the runtime.

A link (a directed pair of ranks) holds a bounded number of unread messages, its *slots*. A sender waits while its
link is full; a receiver may take any message of its link. How many slots a schedule needs to avoid a deadlock is a
property of the schedule: one for most, more if the links form a ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

from weft.schedule.actions import Op
from weft.schedule.program import Program, Step

Message: TypeAlias = "tuple[str, int, int]"  # pass, receiving chunk, micro-batch
Visit: TypeAlias = Callable[[int, Step], None]

MAX_STEPS = 4_000_000  # a step takes microseconds and several hundred bytes


class DryRun:
    """The ranks of a window of mini-batches and the messages between them."""

    def __init__(self, program: Program, *, minibatches: int) -> None:
        program.check_size(minibatches, MAX_STEPS, doing="checking")
        self.placement = program.schedule.placement
        ranks = range(program.schedule.stages)
        self.steps = [list(program.steps(rank, minibatches=minibatches)) for rank in ranks]

    def run(self, visit: Visit | None = None, *, slots: int | None = None, by_cycle: bool = False) -> dict[int, int]:
        """Run all steps and call `visit` with each. Returns the positions of the ranks that are stuck, if any.

        `by_cycle`: no rank begins a cycle before all ranks have finished the previous one, because a mini-batch
        must be enough to run its cycle.
        """
        self.visit, self.slots, self.fullest = visit, slots, 0
        self.position = [0] * len(self.steps)
        self.links: dict[tuple[int, int], set[Message]] = defaultdict(set)
        self.unsent: dict[int, Message] = {}
        last = max(step.cycle for steps in self.steps for step in steps[-1:])
        for self.cycle in range(last + 1) if by_cycle else [last]:
            while sum(self._advance(rank) for rank in range(len(self.steps))):
                pass  # until no rank can continue
            stuck = {
                rank: position - (rank in self.unsent)  # a rank that can't send is at its last step
                for rank, position in enumerate(self.position)
                if rank in self.unsent or self._next(rank) is not None
            }
            if stuck:
                return stuck
        return {}

    def needed_slots(self) -> int:
        """The smallest number of slots per link with which the window completes."""
        self.run()
        low, high = 1, max(1, self.fullest)
        while low < high:
            middle = (low + high) // 2
            if self.run(slots=middle):
                low = middle + 1
            else:
                high = middle
        return low

    def waits_for(self, rank: int) -> str:
        """What a stuck rank waits for, for error messages."""
        if rank in self.unsent:
            kind, chunk, index = self.unsent[rank]
            return f"to send the {kind} of micro-batch {index} to chunk {chunk}: the link is full ({self.slots} unread)"
        return f"before {self.steps[rank][self.position[rank]].action} for its input"

    def _next(self, rank: int) -> Step | None:
        """The next step of a rank in this cycle."""
        position, steps = self.position[rank], self.steps[rank]
        return steps[position] if position < len(steps) and steps[position].cycle <= self.cycle else None

    def _advance(self, rank: int) -> int:
        """Run a rank as far as possible; returns the number of steps and sends."""
        moved = 0
        while True:
            if rank in self.unsent:
                if not self._send(rank):
                    return moved
                moved += 1
            step = self._next(rank)
            if step is None:
                return moved
            kind, index = pass_of(step), step.action.index
            if step.needs >= 0:
                link = self.links[rank if step.source < 0 else step.source, rank]
                message = (kind, step.action.chunk, index)
                if message not in link:
                    return moved
                link.remove(message)
            if self.visit is not None:
                self.visit(rank, step)
            self.position[rank] += 1
            moved += 1
            if step.feeds >= 0:
                self.unsent[rank] = (kind, step.feeds, index)

    def _send(self, rank: int) -> bool:
        message = self.unsent[rank]
        receiver = self.placement[message[1]]
        link = self.links[rank, receiver]
        if receiver != rank:  # a message within a rank takes no slot
            if len(link) == self.slots:
                return False
            self.fullest = max(self.fullest, len(link) + 1)
        link.add(message)
        del self.unsent[rank]
        return True


def pass_of(step: Step) -> str:
    return "forward" if step.action.op == Op.F else "backward"
