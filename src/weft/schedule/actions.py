"""Actions, the one thing that schedules are made of.

An action is written `2F0`: chunk 2, forward, micro-batch 0. Many actions at once are *rows*, a numpy table
with the columns `op`, `chunk` and `index`, so that a schedule of 16 million actions is built in a second.
`F`, `B`, `I`, `W` and `U` make rows from numbers or arrays; `+` is `join`, taking turns is `alternate`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from weft.errors import WeftError


class Op(IntEnum):
    """What an action does."""

    F = 0  # forward
    B = 1  # backward, input and weight gradient together
    I = 2  # backward, input gradient only
    W = 3  # backward, weight gradient only
    U = 4  # update of the chunk's weights; its index counts mini-batches


NONE = -1  # the op of a row that only fills up a table

ANY_BACKWARD = (Op.B, Op.I, Op.W)
BACKWARDS = (Op.B, Op.I)  # what needs the gradient of the chunk behind, and hands one on
RETIRING = (Op.B, Op.W)  # what completes a micro-batch's gradient and lets its activations go

ROW = np.dtype([("op", np.int8), ("chunk", np.int16), ("index", np.int32)])
Rows: TypeAlias = npt.NDArray[np.void]
Indices: TypeAlias = "int | range | Iterable[int] | npt.NDArray[np.integer]"

_TEXT = re.compile(r"(\d+)([FBIWU])(-?\d+)")


class Action(NamedTuple):
    """One action. `index` counts micro-batches over the whole run; of an update, mini-batches."""

    op: Op
    chunk: int
    index: int  # type: ignore[assignment]  # nobody looks for values in an action

    def __str__(self) -> str:
        return f"{self.chunk}{self.op.name}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise WeftError(
                f"an action is written as chunk, one of F B I W U, micro-batch, such as 2F0 (got {text.strip()!r}); "
                "communication is derived, so files hold compute and updates only"
            )
        chunk, op, index = int(match[1]), Op[match[2]], int(match[3])
        _check_range(np.array([chunk]), np.array([index]))
        return cls(op, chunk, index)


def rows(op: Op, chunk: Indices, index: Indices) -> Rows:
    """Rows of one op; `chunk` and `index` are numbers or equally long sequences."""
    chunks, indices = np.broadcast_arrays(_integers(chunk), _integers(index))
    _check_range(chunks, indices)
    table = np.empty(indices.size, ROW)
    table["op"], table["chunk"], table["index"] = op, chunks.ravel(), indices.ravel()
    return table


def F(chunk: Indices, index: Indices) -> Rows:
    return rows(Op.F, chunk, index)


def B(chunk: Indices, index: Indices) -> Rows:
    return rows(Op.B, chunk, index)


def I(chunk: Indices, index: Indices) -> Rows:
    return rows(Op.I, chunk, index)


def W(chunk: Indices, index: Indices) -> Rows:
    return rows(Op.W, chunk, index)


def U(chunk: Indices, minibatch: Indices) -> Rows:
    return rows(Op.U, chunk, minibatch)


def as_rows(actions: Rows | str | Iterable[Action | str]) -> Rows:
    """Rows from rows, from a text such as `"0F0 0B0"`, or from any sequence of actions or their texts."""
    if isinstance(actions, np.ndarray) and actions.dtype == ROW:
        return actions
    if isinstance(actions, str):
        actions = actions.split()
    rows = [action.item() if isinstance(action, np.void) else tuple(_action(action)) for action in actions]
    return np.array(rows, ROW)


def _action(action: Action | str) -> Action:
    return action if isinstance(action, Action) else Action.parse(str(action))


def actions(table: Rows) -> list[Action]:
    return [Action(Op(op), chunk, index) for op, chunk, index in table.tolist()]


def join(*parts: Rows) -> Rows:
    return np.concatenate(parts)


def alternate(*parts: Rows) -> Rows:
    """One row of each part in turn."""
    if len({part.size for part in parts}) != 1:
        sizes = ", ".join(str(part.size) for part in parts)
        raise WeftError(f"alternate needs parts of equal length (lengths: {sizes}); join what is left over")
    table = np.empty(len(parts) * parts[0].size, ROW)
    for offset, part in enumerate(parts):
        table[offset :: len(parts)] = part
    return table


def pair_up(forwards: Rows, backwards: Rows, warmup: int) -> Rows:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, forwards.size)
    paired = forwards.size - warmup
    return join(forwards[:warmup], alternate(forwards[warmup:], backwards[:paired]), backwards[paired:])


def is_any(op: npt.NDArray[np.int8], of: tuple[Op, ...]) -> npt.NDArray[np.bool_]:
    """Which ops are among `of`."""
    among: npt.NDArray[np.bool_] = np.logical_or.reduce([op == one for one in of])
    return among


def _check_range(chunk: npt.NDArray[Any], index: npt.NDArray[Any]) -> None:
    """Refuse what the columns of a row can't hold."""
    most, far = int(np.iinfo(np.int16).max), int(np.iinfo(np.int32).max)
    if chunk.size and not (chunk.min() >= 0 and chunk.max() <= most):
        raise WeftError(f"an action's chunk is 0 to {most} (got {chunk.max() if chunk.min() >= 0 else chunk.min()})")
    if index.size and not abs(index).max() <= far:
        raise WeftError(f"an action's micro-batch is {far} at the most (got {abs(index).max()})")


def _integers(values: Indices) -> npt.NDArray[np.int64]:
    if isinstance(values, Iterable) and not isinstance(values, np.ndarray | range):
        values = list(values)
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise WeftError(f"chunks and micro-batches are whole numbers (got {values!r})")
    return array.astype(np.int64)
