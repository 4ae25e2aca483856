"""Messages between processes, over gloo: one link for each directed pair of ranks.

A message is one flat buffer:

    header (64 bytes) | description, if the receiver does not know it yet | tensors, each aligned

The receiver keeps a number of receives posted ahead, each as large as the largest message so far. A message that fits
is sent as it is. For a larger one, a header alone takes its place, the message follows under another tag, and later
receives are posted with the new size. Both ends track these sizes, so shapes that do not change cost nothing.
Descriptions (dtypes, shapes, nesting) are sent once and then referred to by number.

Between ranks of one host that can share memory, tensors that are not small are in a piece of it (`shared_memory.py`),
and the header names the piece: threads of gloo would copy them twice more, on cores that compute.

With CUDA the header still goes over gloo, since the host reads it; tensors go over a NCCL communicator that belongs to
the link, so that no other link can block its stream.
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from weft import faults
from weft.errors import PeerError, RunError, one_line
from weft.runtime.comm.buffers import ALIGNMENT, DAMAGED, Pool, aligned, check_announced
from weft.runtime.comm.messages import Message
from weft.runtime.comm.shared_memory import Piece, SharedReceiver, SharedSender
from weft.runtime.tree import from_json

# op, chunk, index, loss, number of the description, its bytes, bytes of the message, piece of shared memory, its bytes
HEADER = struct.Struct("<bxhxxxxqdiiqqq")
NO_PIECE = -1
FIRST_CAPACITY = 4096  # bytes of the first receives; messages up to this size always fit
ABORT, LARGE = -1, -2  # instead of an op
TAG, LARGE_TAG = 0, 1
MAX_DESCRIPTIONS = 256

Description: TypeAlias = "tuple[Any, ...]"  # skeleton, then (dtype, shape, needs a gradient) of each tensor


class LinkError(RuntimeError):
    """Something could not be sent, received or added up: the other rank has died, or a timeout passed."""


class Layout(NamedTuple):
    """A description as its receiver needs it."""

    skeleton: Any
    tensors: list[tuple[torch.dtype, tuple[int, ...], int]]  # dtype, shape, bytes
    grads: tuple[bool, ...]
    nbytes: int  # of all tensors, each aligned


class SendLink:
    """The sending end of a link."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        target: int,
        *,
        slots: int,
        timeout: timedelta,
        shared_sender: SharedSender | None = None,
        nccl: Any = None,
    ) -> None:
        self._group, self._target, self._timeout, self._nccl = group, target, timeout, nccl
        self._shared_sender = shared_sender
        self._pool = Pool()
        self._sends: deque[Sequence[Any]] = deque()  # each: works, and the tensors that they send
        self._max_sends = slots + 1
        self._capacities = deque([FIRST_CAPACITY] * slots)  # of the receives that the other end has posted
        self._capacity = FIRST_CAPACITY
        self._descriptions: dict[Description, int] = {}
        self._next_description = 0
        self._fault = faults.site("send")

    @property
    def nbytes(self) -> int:
        return self._pool.nbytes + (0 if self._shared_sender is None else self._shared_sender.nbytes)

    def send(self, message: Message) -> None:
        """Send without waiting, unless the link is full."""
        while len(self._sends) >= self._max_sends:
            self._finish()
        tensors = message.tensors
        number, text = self._describe(message)
        start = aligned(HEADER.size) + aligned(len(text))
        sizes = [0 if self._nccl is not None else aligned(tensor.nbytes) for tensor in tensors]
        piece = self._piece(sum(sizes))
        size = start + (sum(sizes) if piece is None else 0)
        flat = self._pool.acquire(size)
        shared = (NO_PIECE, 0) if piece is None else (piece.number, piece.size)
        HEADER.pack_into(flat.numpy().data, 0, *message.key, message.loss, number, len(text), size, *shared)
        if text:
            flat[aligned(HEADER.size) :][: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        if self._nccl is None:
            target, start = (flat, start) if piece is None else (piece.flat, 0)
            for tensor, tensor_size in zip(tensors, sizes, strict=True):
                _view(target, start, tensor.nbytes, tensor.dtype, tensor.shape).copy_(tensor.detach())
                start += tensor_size
        self._post(flat, size)
        if self._nccl is not None:
            payload = [tensor.detach().contiguous() for tensor in tensors]
            works = [dist.isend(tensor, self._target, group=self._nccl) for tensor in payload]
            self._sends[-1] = (*self._sends[-1], *works, *payload)

    def _piece(self, size: int) -> Piece | None:
        if self._shared_sender is None or size < FIRST_CAPACITY:
            return None
        return self._shared_sender.acquire(size)

    def abort(self, reason: str) -> Work:
        """Inform the other end that this rank failed."""
        text = reason.encode()[: FIRST_CAPACITY - 2 * ALIGNMENT]
        flat = torch.zeros(FIRST_CAPACITY, dtype=torch.uint8)
        HEADER.pack_into(flat.numpy().data, 0, ABORT, 0, 0, 0.0, 0, len(text), FIRST_CAPACITY, NO_PIECE, 0)
        flat[aligned(HEADER.size) :][: len(text)].copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        return self._isend(flat, TAG)

    def _describe(self, message: Message) -> tuple[int, bytes]:
        """The number of a message's description, and its text if the receiver does not know it yet."""
        description = (
            message.skeleton,
            *(
                (str(tensor.dtype)[6:], tuple(tensor.shape), grad)
                for tensor, grad in zip(message.tensors, message.grads, strict=True)
            ),
        )
        number = self._descriptions.get(description)
        if number is not None:
            return number, b""
        if len(self._descriptions) == MAX_DESCRIPTIONS:
            self._descriptions.clear()
        number = self._descriptions[description] = self._next_description % (2 * MAX_DESCRIPTIONS)
        self._next_description += 1
        return number, json.dumps(description).encode()

    def _post(self, flat: Tensor, size: int) -> None:
        tag = TAG
        works: list[Work] = []
        self._sends.append(works)
        if size > self._capacities.popleft():
            header = self._pool.acquire(ALIGNMENT)
            HEADER.pack_into(header.numpy().data, 0, LARGE, 0, 0, 0.0, 0, 0, size, NO_PIECE, 0)
            works.append(self._isend(header, TAG))
            self._capacity = max(self._capacity, size)
            tag = LARGE_TAG
        if self._fault is not None:
            self._fault()
        works.append(self._isend(flat, tag))
        self._capacities.append(self._capacity)

    def _isend(self, flat: Tensor, tag: int) -> Work:
        return Work(lambda: dist.isend(flat, self._target, group=self._group, tag=tag), flat)

    def _finish(self) -> None:
        for work in self._sends.popleft():
            if not isinstance(work, Tensor):
                work.wait(self._timeout)


class ReceiveLink:
    """The receiving end of a link."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        source: int,
        *,
        slots: int,
        device: torch.device,
        shared_receiver: SharedReceiver | None = None,
        nccl: Any = None,
    ) -> None:
        self._group, self._source, self._device, self._nccl = group, source, device, nccl
        self._shared_receiver = shared_receiver
        self._pool = Pool()
        self._capacity = FIRST_CAPACITY
        self._descriptions: dict[int, Layout] = {}
        self._fault = faults.site("receive")
        self._posted: deque[Work] = deque(self._irecv(FIRST_CAPACITY, TAG) for _ in range(slots))

    @property
    def nbytes(self) -> int:
        return self._pool.free_bytes + sum(work.flat.nbytes for work in self._posted)

    def receive(self, timeout: timedelta) -> Message:
        """Wait for the next message."""
        posted = self._posted[0]
        posted.wait(timeout)
        self._posted.popleft()
        flat = posted.flat
        op, chunk, index, loss, number, text_size, size, piece, piece_size = HEADER.unpack_from(flat.numpy().data)
        if self._fault is not None:
            self._fault()
        start = aligned(HEADER.size)
        if op == LARGE:
            check_announced(size, f"rank {self._source}'s message", least=start)
            self._capacity = max(self._capacity, size)
            large = self._irecv(size, LARGE_TAG)
            large.wait(timeout)
            flat = large.flat
            op, chunk, index, loss, number, text_size, size, piece, piece_size = HEADER.unpack_from(flat.numpy().data)
        if not 0 <= text_size <= size - start <= flat.nbytes - start:
            raise self._damaged(f"{size} bytes in a buffer of {flat.nbytes}, with a description of {text_size}")
        text = flat[start : start + text_size].numpy().tobytes()
        if op == ABORT:
            raise PeerError(text.decode(errors="replace"))
        self._posted.append(self._irecv(self._capacity, TAG))
        layout = self._layout(number, text)
        start += aligned(text_size)
        room = size - start
        if piece != NO_PIECE:
            flat, start, room = self._read_piece(piece, piece_size), 0, piece_size
        if self._nccl is None and layout.nbytes > room:
            raise self._damaged(f"tensors of {layout.nbytes} bytes in {room}")
        tensors = []
        for dtype, shape, nbytes in layout.tensors:
            if self._nccl is not None:
                tensor = torch.empty(shape, dtype=dtype, device=self._device)
                work = dist.irecv(tensor, self._source, group=self._nccl)
                assert work is not None
                work.wait()  # the stream waits, not the host
            else:
                tensor = _view(flat, start, nbytes, dtype, shape)
                start += aligned(nbytes)
            tensors.append(tensor)
        return Message((op, chunk, index), tensors, layout.skeleton, layout.grads, loss)

    def _layout(self, number: int, text: bytes) -> Layout:
        """The description with this number, which a text, if there is one, replaces."""
        if text:
            try:
                layout = _read_description(text)
            except Exception as problem:
                raise self._damaged(f"a description that can't be read ({one_line(problem)})") from problem
            check_announced(layout.nbytes, f"rank {self._source}'s message")
            self._descriptions[number] = layout
        if number not in self._descriptions:
            raise self._damaged(f"description {number}, which was never sent")
        return self._descriptions[number]

    def _read_piece(self, number: int, size: int) -> Tensor:
        if self._shared_receiver is None:
            raise self._damaged("tensors in shared memory, and these ranks share none")
        check_announced(size, f"rank {self._source}'s piece of shared memory")
        self._shared_receiver.release()
        try:
            return self._shared_receiver.read(number, size)
        except (FileNotFoundError, ProcessLookupError) as problem:  # it has died
            raise LinkError(str(problem)) from problem
        except ValueError as problem:
            raise self._damaged(f"tensors in {size} bytes of shared memory ({problem})") from problem

    def _damaged(self, has: str) -> RunError:
        return RunError(f"rank {self._source}'s message has {has}; {DAMAGED}")

    def _irecv(self, size: int, tag: int) -> Work:
        flat = self._pool.acquire(size)
        return Work(lambda: dist.irecv(flat, self._source, group=self._group, tag=tag), flat)


class Work:
    """A send or receive in progress, with its memory."""

    def __init__(self, begin: Callable[[], dist.Work | None], flat: Tensor) -> None:
        self.flat = flat
        with link_errors():
            self._work = begin()

    def wait(self, timeout: timedelta) -> None:
        assert self._work is not None
        with link_errors():
            self._work.wait(timeout)


@contextlib.contextmanager
def link_errors() -> Iterator[None]:
    try:
        yield
    except RuntimeError as problem:
        raise LinkError(str(problem)) from problem


def _read_description(text: bytes) -> Layout:
    skeleton, *parts = from_json(json.loads(text))
    tensors = []
    for name, shape, _ in parts:
        dtype = getattr(torch, name)
        if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"no tensor has dtype {name} and shape {shape}")
        tensors.append((dtype, shape, prod(shape) * dtype.itemsize))
    grads = tuple(bool(grad) for *_, grad in parts)
    return Layout(skeleton, tensors, grads, sum(aligned(nbytes) for *_, nbytes in tensors))


def _view(flat: Tensor, start: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return flat[start : start + nbytes].view(dtype).view(shape)
