"""Where an error of a rank happened: its message names rank, chunk, mini-batch and micro-batch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import NoReturn

from weft.errors import Diverged, RunError, WeftError
from weft.runtime.comm import LinkError
from weft.runtime.engine.chunk import Chunk
from weft.runtime.engine.precision import remedy_for_mixed
from weft.schedule import Action, Op


class ErrorLocator:
    """Adds the place to errors of one rank, whose number counts over all replicas."""

    def __init__(self, *, rank: int, microbatches: int, chunks: Mapping[int, Chunk]) -> None:
        self._rank, self._microbatches, self._chunks = rank, microbatches, chunks
        self._located: WeftError | None = None  # the error that ended the run

    @contextlib.contextmanager
    def locating(self, chunk: int, minibatch: int, action: Action | None = None) -> Iterator[None]:
        """Let an error say where it happened; without an action, in an update.

        A pass may have to make an update first, whose error has its own place.
        """
        try:
            yield
        except Exception as problem:
            self.raise_located(problem, chunk, minibatch, action)

    def raise_located(self, problem: Exception, chunk: int, minibatch: int, action: Action | None) -> NoReturn:
        if isinstance(problem, RunError | LinkError) or problem is self._located:
            raise problem
        unit = "update"
        if action is not None and action.op != Op.U:
            unit = f"micro-batch {action.index % self._microbatches}"
        place = f"rank {self._rank}, chunk {chunk}, mini-batch {minibatch}, {unit}"
        place += "" if action is None else f" ({action})"
        if isinstance(problem, WeftError):
            kind = Diverged if isinstance(problem, Diverged) else WeftError
            self._located = kind(f"{place}: {problem}")
            raise self._located from problem
        trained = (tensor for parameters in self._chunks[chunk].sets for tensor in parameters.versions.live)
        remedy = remedy_for_mixed(problem, trained)
        raise RunError(f"{place}: {type(problem).__name__}: {problem}{remedy}") from problem
