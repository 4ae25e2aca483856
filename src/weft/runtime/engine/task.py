"""An action with what it means for the parameters of its chunk.

A chunk's own parameters follow the schedule's program. Tied parameters follow one with the same rows at other delays,
because all their holders update them together. So one action may read different versions of different sets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from weft.runtime.engine.chunk import Chunk
from weft.runtime.weights import Leaves, ParameterSet
from weft.schedule import Program, Row, Step, Weights, prediction_of


class SetStep(NamedTuple):
    """A step as one parameter set of its chunk sees it."""

    parameters: ParameterSet
    step: Step
    policy: Weights

    @property
    def ready(self) -> bool:
        """Whether the version that the step reads exists."""
        return self.parameters.versions.newest >= self.step.version

    def read(self) -> Leaves:
        """The weights that a pass reads: a version, or a prediction beyond it, which the first reader makes."""
        if not self.step.ahead:
            return self.parameters.versions.read(self.step.version)
        key = prediction_of(self.step, self.policy)
        if self.step.predicts:
            assert self.parameters.versions.newest == self.step.version
            self.parameters.predict(key, self.step.ahead)
        return self.parameters.predicted(key)

    def release(self) -> None:
        """Let go of the version and the prediction, if they are not read again."""
        if self.step.dies:
            self.parameters.versions.release(self.step.version)
        if self.step.forgets:
            self.parameters.forget(prediction_of(self.step, self.policy))


class Task(NamedTuple):
    """One action of a rank: the step of its chunk, and of each parameter set in it."""

    step: Step
    chunk: Chunk
    sets: Sequence[SetStep]

    def weights(self) -> list[Leaves]:
        return [set_step.read() for set_step in self.sets]

    @property
    def predicts(self) -> bool:
        return any(set_step.step.predicts for set_step in self.sets)


class TaskList:
    """A rank's tasks of every cycle. `set_programs` has, for each chunk, the program that each of its sets follows."""

    def __init__(
        self,
        programs: Sequence[Program],
        set_programs: Mapping[int, Sequence[int]],
        chunks: Mapping[int, Chunk],
        *,
        rank: int,
    ) -> None:
        self._lines: list[tuple[Sequence[Row], Chunk, list[tuple[ParameterSet, int, Weights]]]] = []
        for rows in zip(*(program.rows(rank) for program in programs), strict=True):
            chunk = chunks[rows[0].first.action.chunk]
            sets = [
                (parameters, program, programs[program].schedule.weights)
                for parameters, program in zip(chunk.sets, set_programs[chunk.number], strict=True)
            ]
            self._lines.append((rows, chunk, sets))

    def cycle(self, cycle: int, *, minibatches: int | None) -> Iterator[Task]:
        for rows, chunk, sets in self._lines:
            if rows[0].is_in(cycle, minibatches):
                steps = [row.step(cycle) for row in rows]
                set_steps = [SetStep(parameters, steps[program], policy) for parameters, program, policy in sets]
                yield Task(steps[0], chunk, set_steps)
