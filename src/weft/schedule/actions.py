"""Actions, the elements of a schedule.

An action is written `2F0`: chunk 2, forward, micro-batch 0. Many actions together are *rows*, a numpy table
with the columns `op`, `chunk` and `index`: a schedule of 16 million actions is built in a second.
`F`, `B`, `I`, `W` and `U` make rows from numbers or arrays; `join` concatenates rows, `alternate` interleaves them.
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


NONE = -1  # the op of a padding row

ANY_BACKWARD = (Op.B, Op.I, Op.W)
BACKWARDS = (Op.B, Op.I)  # take a gradient from the next chunk and send one to the previous chunk
RETIRING = (Op.B, Op.W)  # complete a micro-batch's gradient and free its activations

ROW = np.dtype([("op", np.int8), ("chunk", np.int16), ("index", np.int32)])
Rows: TypeAlias = npt.NDArray[np.void]
Indices: TypeAlias = "int | range | Iterable[int] | npt.NDArray[np.integer]"

_TEXT = re.compile(r"(\d+)([FBIWU])(-?\d+)")


class Action(NamedTuple):
    """One action. `index` counts micro-batches over the whole run; for an update, it counts mini-batches."""

    op: Op
    chunk: int
    index: int  # type: ignore[assignment]  # hides tuple.index, which actions do not need

    def __str__(self) -> str:
        return f"{self.chunk}{self.op.name}{self.index}"

    @classmethod
    def parse(cls, text: str) -> Action:
        match = _TEXT.fullmatch(text.strip())
        if match is None:
            raise WeftError(
                f"an action is written as chunk, one of F B I W U, micro-batch, such as 2F0 (got {text.strip()!r}); "
                "sends and receives are derived, so files contain compute and updates only"
            )
        chunk, op, index = int(match[1]), Op[match[2]], int(match[3])
        _check_range(np.array([chunk]), np.array([index]))
        return cls(op, chunk, index)


def rows(op: Op, chunk: Indices, index: Indices) -> Rows:
    """Rows of one op; `chunk` and `index` are numbers or sequences of equal length."""
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
    """Convert rows, a string such as `"0F0 0B0"`, or a sequence of actions or strings to rows."""
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
    """Interleave parts of equal length: one row of each in turn."""
    if len({part.size for part in parts}) != 1:
        sizes = ", ".join(str(part.size) for part in parts)
        raise WeftError(f"alternate needs parts of equal length (lengths: {sizes}); join the remaining rows")
    table = np.empty(len(parts) * parts[0].size, ROW)
    for offset, part in enumerate(parts):
        table[offset :: len(parts)] = part
    return table


def pair_up(forwards: Rows, backwards: Rows, warmup: int) -> Rows:
    """`warmup` forwards, then a forward and a backward in turn, then the remaining backwards."""
    warmup = min(warmup, forwards.size)
    paired = forwards.size - warmup
    return join(forwards[:warmup], alternate(forwards[warmup:], backwards[:paired]), backwards[paired:])


def is_any(op: npt.NDArray[np.int8], of: tuple[Op, ...]) -> npt.NDArray[np.bool_]:
    """A mask of the entries of `op` that are one of `of`."""
    mask: npt.NDArray[np.bool_] = np.logical_or.reduce([op == member for member in of])
    return mask


def _check_range(chunk: npt.NDArray[Any], index: npt.NDArray[Any]) -> None:
    """Reject values that do not fit the columns of a row."""
    max_chunk, max_index = int(np.iinfo(np.int16).max), int(np.iinfo(np.int32).max)
    if chunk.size and not (chunk.min() >= 0 and chunk.max() <= max_chunk):
        wrong = chunk.max() if chunk.min() >= 0 else chunk.min()
        raise WeftError(f"an action's chunk must be 0 to {max_chunk} (got {wrong})")
    if index.size and not abs(index).max() <= max_index:
        raise WeftError(f"an action's micro-batch must be at most {max_index} (got {abs(index).max()})")


def _integers(values: Indices) -> npt.NDArray[np.int64]:
    if isinstance(values, Iterable) and not isinstance(values, np.ndarray | range):
        values = list(values)
    array = np.asarray(values)
    if array.size and array.dtype.kind not in "iu":
        raise WeftError(f"chunks and micro-batches must be whole numbers (got {values!r})")
    return array.astype(np.int64)
