"""Messages between processes, over gloo: one link for each directed pair of ranks.

A message is one flat buffer, sent in one piece:

    header (64 bytes) | description, if it is new to the receiver | tensors, each aligned

The receiver keeps a number of receives posted ahead, each as large as the largest message so far. Messages that fit
need nothing else, whatever their shapes; a larger one is announced in its place by a header alone, follows on
a line of its own, and makes the receives that are posted from then on larger. Both ends count along, so shapes that
do not change cost nothing. Descriptions (dtypes, shapes, nesting) are sent once and then go by number.

Between ranks of one host that can share memory, tensors that are not small are in a piece of it (`shared.py`), and the
header tells in which: threads of gloo would copy them twice more, on cores that compute.

With CUDA the header goes over gloo all the same, for the host reads it; tensors go over a NCCL communicator of the
link's own, whose stream no other link can block.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import PeerError
from weft.runtime.comm.buffers import ALIGNMENT, Pool, aligned
from weft.runtime.comm.messages import Message
from weft.runtime.comm.shared_memory import Piece, SharedReceiver, SharedSender
from weft.runtime.tree import from_json

# op, chunk, index, loss, description's number, its bytes, bytes of all, piece of shared memory (or NO_PIECE), its bytes
HEADER = struct.Struct("<bxhxxxxqdiiqqq")
NO_PIECE = -1
FIRST = 4096  # bytes of the first receives, and so the least that always fits
ABORT, LARGER = -1, -2  # instead of an op
LINE, WIDE = 0, 1  # tags
MOST_DESCRIPTIONS = 256

Description: TypeAlias = "tuple[Any, ...]"  # skeleton, then (dtype, shape, wants a gradient) of each tensor


class LinkError(RuntimeError):
    """A message could not be sent or received: the other end is gone, or too late."""


class SendLink:
    """The sending end of a link."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        target: int,
        *,
        slots: int,
        wait: timedelta,
        lender: SharedSender | None = None,
        nccl: Any = None,
    ) -> None:
        self._group, self._target, self._wait, self._lender, self._nccl = group, target, wait, lender, nccl
        self._pool = Pool()
        self._sends: deque[tuple[Any, ...]] = deque()  # works, and what they send
        self._most = slots + 1
        self._capacities = deque([FIRST] * slots)  # of the receives that are posted at the other end
        self._capacity = FIRST
        self._descriptions: dict[Description, int] = {}
        self._next_description = 0

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes + (0 if self._lender is None else self._lender.nbytes)

    def send(self, message: Message) -> None:
        """Send without waiting, unless the link is full."""
        while len(self._sends) >= self._most:
            self._finish()
        tensors = message.tensors
        number, text = self._describe(message)
        start = aligned(HEADER.size) + aligned(len(text))
        sizes = [0 if self._nccl is not None else aligned(tensor.nbytes) for tensor in tensors]
        piece = self._piece(sum(sizes))
        size = start + (sum(sizes) if piece is None else 0)
        flat = self._pool.take(size)
        shared = (NO_PIECE, 0) if piece is None else (piece.number, piece.size)
        HEADER.pack_into(flat.numpy().data, 0, *message.key, message.loss, number, len(text), size, *shared)
        if text:
            flat[aligned(HEADER.size) :][: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if self._nccl is None:
            room, start = (flat, start) if piece is None else (piece.flat, 0)
            for tensor, taken in zip(tensors, sizes, strict=True):
                _view(room, start, tensor.dtype, tensor.shape).copy_(tensor.detach())
                start += taken
        self._post(flat, size)
        if self._nccl is not None:
            payload = [tensor.detach().contiguous() for tensor in tensors]
            works = [dist.isend(tensor, self._target, group=self._nccl) for tensor in payload]
            self._sends[-1] = (*self._sends[-1], *works, *payload)

    def _piece(self, size: int) -> Piece | None:
        return None if self._lender is None or size < FIRST else self._lender.take(size)

    def abort(self, reason: str) -> Work:
        """Tell the other end that this rank failed."""
        text = reason.encode()[: FIRST - 2 * ALIGNMENT]
        flat = torch.zeros(FIRST, dtype=torch.uint8)
        HEADER.pack_into(flat.numpy().data, 0, ABORT, 0, 0, 0.0, 0, len(text), FIRST, NO_PIECE, 0)
        flat[aligned(HEADER.size) :][: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return self._isend(flat, LINE)

    def _describe(self, message: Message) -> tuple[int, bytes]:
        """The number of a message's description, and its text where the receiver does not know it yet."""
        description = (
            message.skeleton,
            *((str(t.dtype)[6:], tuple(t.shape), g) for t, g in zip(message.tensors, message.grads, strict=True)),
        )
        number = self._descriptions.get(description)
        if number is not None:
            return number, b""
        if len(self._descriptions) == MOST_DESCRIPTIONS:
            self._descriptions.clear()
        number = self._descriptions[description] = self._next_description % (2 * MOST_DESCRIPTIONS)
        self._next_description += 1
        return number, json.dumps(description).encode()

    def _post(self, flat: Tensor, size: int) -> None:
        if size <= self._capacities.popleft():
            self._sends.append((self._isend(flat, LINE),))
        else:
            head = self._pool.take(ALIGNMENT)
            HEADER.pack_into(head.numpy().data, 0, LARGER, 0, 0, 0.0, 0, 0, size, NO_PIECE, 0)
            self._sends.append((self._isend(head, LINE), self._isend(flat, WIDE)))
            self._capacity = max(self._capacity, size)
        self._capacities.append(self._capacity)

    def _isend(self, flat: Tensor, tag: int) -> Work:
        return Work(lambda: dist.isend(flat, self._target, group=self._group, tag=tag), flat)

    def _finish(self) -> None:
        for work in self._sends.popleft():
            if not isinstance(work, Tensor):
                work.wait(self._wait)


class ReceiveLink:
    """The receiving end of a link."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        *,
        slots: int,
        device: torch.device,
        borrower: SharedReceiver | None = None,
        nccl: Any = None,
    ) -> None:
        self._group, self._source, self._device, self._borrower, self._nccl = group, source, device, borrower, nccl
        self._pool = Pool()
        self._capacity = FIRST
        self._descriptions: dict[int, Description] = {}
        self._posted: deque[Work] = deque(self._irecv(FIRST, LINE) for _ in range(slots))

    @property
    def nbytes(self) -> int:
        return self._pool.unused_bytes + sum(work.flat.nbytes for work in self._posted)

    def receive(self, wait: timedelta) -> Message:
        """Wait for the next message, whatever it is."""
        posted = self._posted[0]
        posted.wait(wait)
        self._posted.popleft()
        flat = posted.flat
        op, chunk, index, loss, number, described, size, piece, room = HEADER.unpack_from(flat.numpy().data)
        if op == LARGER:
            wide = self._irecv(size, WIDE)
            wide.wait(wait)
            flat = wide.flat
            op, chunk, index, loss, number, described, _, piece, room = HEADER.unpack_from(flat.numpy().data)
            self._capacity = max(self._capacity, size)
        start = aligned(HEADER.size)
        text = flat[start : start + described].numpy().tobytes()
        if op == ABORT:
            raise PeerError(text.decode(errors="replace"))
        self._posted.append(self._irecv(self._capacity, LINE))
        if text:
            self._descriptions[number] = from_json(json.loads(text))
        skeleton, *parts = self._descriptions[number]
        start += aligned(described)
        if piece != NO_PIECE:
            assert self._borrower is not None
            self._borrower.give_back()
            flat, start = self._borrower.take(piece, room), 0
        tensors = []
        for name, shape, _ in parts:
            dtype = getattr(torch, name)
            if self._nccl is not None:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
                work = dist.irecv(tensor, self._source, group=self._nccl)
                assert work is not None
                work.wait()  # lets the stream wait, not the host
            else:
                tensor = _view(flat, start, dtype, shape)
                start += aligned(tensor.nbytes)
            tensors.append(tensor)
        return Message((op, chunk, index), tensors, skeleton, [grad for *_, grad in parts], loss)

    def _irecv(self, size: int, tag: int) -> Work:
        flat = self._pool.take(size)
        return Work(lambda: dist.irecv(flat, self._source, group=self._group, tag=tag), flat)


class Work:
    """A send or receive under way, with its memory."""

    def __init__(self, begin: Callable[[], dist.Work | None], flat: Tensor) -> None:
        self.flat = flat
        with _losing():
            self._work = begin()

    def wait(self, longest: timedelta) -> None:
        assert self._work is not None
        with _losing():
            self._work.wait(longest)


@contextlib.contextmanager
def _losing() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        raise LinkError(str(problem)) from problem


def _view(flat: Tensor, start: int, dtype: torch.dtype, shape: Any) -> Tensor:
    count = 1
    for size in shape:
        count *= size
    return flat[start : start + count * dtype.itemsize].view(dtype).view(shape)
