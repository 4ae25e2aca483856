"""Messages between processes: one link for each directed pair of ranks.

A message is one flat buffer:

    header (64 bytes) | description, if the receiver does not know it yet | tensors, each aligned

Over gloo, the receiver keeps a number of receives posted ahead, each as large as the largest message so far. A message
that fits is sent as it is. For a larger one, a header alone takes its place, the message follows under another tag, and
later receives are posted with the new size. Both ends track these sizes, so shapes that do not change cost nothing.
A description (`descriptions.py`) is sent once.

Between ranks of one host that can share memory, tensors that are not small are in a piece of it (`shared_memory.py`),
and the header names the piece: threads of gloo would copy them twice more, on cores that compute. What is left, the
header mostly, goes through a pipe (`pipes.py`), and over gloo only if it is large.

Tensors on a device go over the link's own communicator (`device_links.py`); the header and tensors on the CPU go as
above. Where a device has no such communicator, its tensors are copied to the host and back.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft import faults
from weft.errors import PeerError
from weft.runtime.comm.buffers import ALIGNMENT, Pool, aligned, check_announced, damaged_message
from weft.runtime.comm.descriptions import Layout, ReceivedDescriptions, SentDescriptions
from weft.runtime.comm.device_links import Arrival, DeviceReceiver, DeviceSender
from weft.runtime.comm.messages import NO_LOSS, Message
from weft.runtime.comm.pipes import CAPACITY, PipeReader, PipeWriter
from weft.runtime.comm.shared_memory import Piece, SharedReceiver, SharedSender
from weft.runtime.device import HostCopy, mark, new_stream, on_stream

# op, chunk, index, loss, number of the description, its bytes, bytes of the message, piece of shared memory, its bytes
HEADER = struct.Struct("<bxhxxxxqdiiqqq8x")
NO_PIECE = -1
FIRST_CAPACITY = 4096  # bytes of the first receives; messages up to this size always fit
ABORT, LARGE = -1, -2  # instead of an op
TAG, LARGE_TAG = 0, 1
PAUSE = 0.002  # seconds between two looks at shared memory, at the end of a sender
SHORTEST_WAIT, LONGEST_SEND = 0.001, 5.0  # seconds for a send to complete, at the end of a sender


class LinkError(RuntimeError):
    """Something could not be sent, received or added up: the other rank has died, or a timeout passed."""


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
        device_sender: DeviceSender | None = None,
        pipe: PipeWriter | None = None,
    ) -> None:
        self._group, self._target, self._timeout, self._pipe = group, target, timeout, pipe
        self._shared_sender, self.device_sender = shared_sender, device_sender
        self._pool = Pool()
        self._sends: deque[Sequence[Work]] = deque()  # of each message
        self._max_sends = slots + 1
        self._capacities = deque([FIRST_CAPACITY] * slots)  # of the receives that the other end has posted
        self._capacity = FIRST_CAPACITY
        self._descriptions = SentDescriptions()
        self._fault = faults.site("send")

    @property
    def nbytes(self) -> int:
        senders = [sender for sender in (self._shared_sender, self.device_sender) if sender is not None]
        return self._pool.nbytes + sum(sender.nbytes for sender in senders)

    def send(self, message: Message) -> None:
        """Send without waiting, unless the link is full."""
        while len(self._sends) >= self._max_sends:
            self._finish(self._timeout)
        tensors, loss = message.tensors, message.loss
        if isinstance(loss, Tensor):
            tensors, loss = [*tensors, loss], NO_LOSS
        number, text = self._descriptions.describe(message, tensors)
        on_device = [tensor for tensor in tensors if not tensor.is_cpu]
        if on_device and self.device_sender is None:
            tensors, on_device = self._on_host(tensors), []
        elif on_device:
            tensors = [tensor for tensor in tensors if tensor.is_cpu]
        start, total = HEADER.size + aligned(len(text)), _size(tensors)
        piece = self._piece(total) if start + total > FIRST_CAPACITY else None
        size = start + (total if piece is None else 0)
        shared = (NO_PIECE, 0) if piece is None else (piece.number, piece.size)
        head = HEADER.pack(*message.key, loss, number, len(text), size, *shared) + text
        if piece is not None:
            _write(tensors, piece.flat, 0)
            tensors = []
        if self.device_sender is not None:  # the data first: nobody waits for it, and the header may
            self.device_sender.send(_size(on_device), lambda flat: _write(on_device, flat, 0))
        if self._pipe is not None and not tensors and size <= CAPACITY:
            if self._fault is not None:
                self._fault()
            with link_errors():
                self._pipe.write(head.ljust(size, b"\0"), self._timeout)
        else:
            flat = self._flat(head, size)
            _write(tensors, flat, start)
            self._post(flat, size)

    def _flat(self, head: bytes, size: int) -> Tensor:
        """The memory of a message that begins like this."""
        flat = self._pool.acquire(size)
        flat.numpy().data[: len(head)] = head
        return flat

    def _on_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copy = HostCopy(tensors)
        with link_errors():
            copy.wait(self._timeout.total_seconds())
        return copy.tensors

    def _piece(self, size: int) -> Piece | None:
        return None if self._shared_sender is None else self._shared_sender.acquire(size)

    def abort(self, reason: str, timeout: timedelta) -> Work:
        """Inform the other end that this rank failed; waits only if a pipe is full."""
        text = reason.encode()[: FIRST_CAPACITY - 2 * ALIGNMENT]
        head = HEADER.pack(ABORT, 0, 0, 0.0, 0, len(text), FIRST_CAPACITY, NO_PIECE, 0) + text
        return self._put(self._flat(head, FIRST_CAPACITY), timeout=timeout)

    def linger(self, end: float, is_there: Callable[[], bool]) -> None:
        """Wait until all that was sent is taken, or the other end is gone, but not beyond a moment."""
        with contextlib.suppress(LinkError):
            while self._sends:
                self._finish(timedelta(seconds=max(SHORTEST_WAIT, min(LONGEST_SEND, end - time.monotonic()))))
        shared = self._shared_sender
        while shared is not None and not shared.is_taken and is_there() and time.monotonic() < end:
            time.sleep(PAUSE)

    def _post(self, flat: Tensor, size: int) -> None:
        works: list[Work] = []
        self._sends.append(works)
        fits = size <= (CAPACITY if self._pipe is not None else self._capacities.popleft())
        if not fits:
            header = self._flat(HEADER.pack(LARGE, 0, 0, 0.0, 0, 0, size, NO_PIECE, 0), ALIGNMENT)
            works.append(self._put(header, timeout=self._timeout))
            self._capacity = max(self._capacity, size)
        if self._fault is not None:
            self._fault()
        works.append(self._put(flat, timeout=self._timeout) if fits else self._isend(flat, LARGE_TAG))
        if self._pipe is None:
            self._capacities.append(self._capacity)

    def _put(self, flat: Tensor, *, timeout: timedelta) -> Work:
        """Send what the next receive has room for."""
        if self._pipe is None:
            return self._isend(flat, TAG)
        with link_errors():
            self._pipe.write(flat.numpy().data, timeout)
        return Work(lambda: None, flat)

    def _isend(self, flat: Tensor, tag: int) -> Work:
        return Work(lambda: dist.isend(flat, self._target, group=self._group, tag=tag), flat)

    def _finish(self, timeout: timedelta) -> None:
        for work in self._sends.popleft():
            work.wait(timeout)


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
        device_receiver: DeviceReceiver | None = None,
        pipe: PipeReader | None = None,
    ) -> None:
        self._group, self._source, self._device, self._pipe = group, source, device, pipe
        self._shared_receiver, self.device_receiver = shared_receiver, device_receiver
        self._stream = new_stream(device)
        self._pool = Pool()
        self._capacity = FIRST_CAPACITY
        self._descriptions = ReceivedDescriptions(source)
        self._fault = faults.site("receive")
        posted = slots if pipe is None else 0
        self._posted: deque[Work] = deque(self._irecv(FIRST_CAPACITY, TAG) for _ in range(posted))

    @property
    def nbytes(self) -> int:
        on_device = 0 if self.device_receiver is None else self.device_receiver.nbytes
        return self._pool.free_bytes + sum(work.flat.nbytes for work in self._posted) + on_device

    def receive(self, timeout: timedelta) -> Message:
        """Wait for the next message."""
        flat, memory = self._posted_message(timeout) if self._pipe is None else self._piped_message(self._pipe, timeout)
        start = HEADER.size
        op, chunk, index, loss, number, text_size, size, piece, piece_size = HEADER.unpack_from(memory)
        if self._fault is not None:
            self._fault()
        if op == LARGE:
            check_announced(size, f"rank {self._source}'s message", least=start)
            self._capacity = max(self._capacity, size)
            large = self._irecv(size, LARGE_TAG)
            large.wait(timeout)
            flat, memory = large.flat, large.flat.numpy().data
            op, chunk, index, loss, number, text_size, size, piece, piece_size = HEADER.unpack_from(memory)
        if not 0 <= text_size <= size - start <= len(memory) - start:
            raise damaged_message(
                self._source, f"{size} bytes in a buffer of {len(memory)}, with a description of {text_size}"
            )
        text = bytes(memory[start : start + text_size])
        if op == ABORT:
            raise PeerError(text.decode(errors="replace"))
        if self._pipe is None:
            self._posted.append(self._irecv(self._capacity, TAG))
        layout = self._descriptions.layout(number, text)
        start += aligned(text_size)
        room = size - start
        if piece != NO_PIECE:
            flat, start, room = self._read_piece(piece, piece_size), 0, piece_size
        elif flat is None:
            flat = self._pool.acquire(len(memory))
            flat.numpy().data[:] = memory
        arrival, needed = None, layout.nbytes
        if self.device_receiver is not None:
            arrival = self.device_receiver.receive(layout.device_nbytes)
            needed -= layout.device_nbytes
        if needed > room:
            raise damaged_message(self._source, f"tensors of {needed} bytes in {room}")
        tensors, device_start = [], 0
        for dtype, shape, nbytes, on_device in layout.tensors:
            if on_device and arrival is not None:
                tensors.append(_view(arrival.tensors[0], device_start, nbytes, dtype, shape))
                device_start += aligned(nbytes)
            else:
                tensors.append(_view(flat, start, nbytes, dtype, shape))
                start += aligned(nbytes)
        if arrival is None and layout.device_nbytes:
            tensors, arrival = self._on_device(tensors, layout)
        value: float | Tensor = tensors.pop() if layout.has_loss else loss
        return Message((op, chunk, index), tensors, layout.skeleton, layout.grads[: len(tensors)], value, arrival)

    def _posted_message(self, timeout: timedelta) -> tuple[Tensor, memoryview]:
        self._posted[0].wait(timeout)
        flat = self._posted.popleft().flat
        return flat, flat.numpy().data

    def _piped_message(self, pipe: PipeReader, timeout: timedelta) -> tuple[None, bytes]:
        """Few messages have tensors here, which need memory of their own."""
        with link_errors():
            return None, pipe.read(timeout)

    def _on_device(self, tensors: Sequence[Tensor], layout: Layout) -> tuple[list[Tensor], Arrival]:
        """Tensors that came through host memory, moved to the device where they belong."""
        with on_stream(self._stream):
            moved = [
                tensor.to(self._device) if on_device else tensor
                for tensor, (*_, on_device) in zip(tensors, layout.tensors, strict=True)
            ]
            return moved, Arrival(mark(self._device), [tensor for tensor in moved if not tensor.is_cpu])

    def _read_piece(self, number: int, size: int) -> Tensor:
        if self._shared_receiver is None:
            raise damaged_message(self._source, "tensors in shared memory, and these ranks share none")
        check_announced(size, f"rank {self._source}'s piece of shared memory")
        self._shared_receiver.release()
        try:
            return self._shared_receiver.read(number, size)
        except (FileNotFoundError, ProcessLookupError) as problem:  # it has died
            raise LinkError(str(problem)) from problem
        except ValueError as problem:
            raise damaged_message(self._source, f"tensors in {size} bytes of shared memory ({problem})") from problem

    def _irecv(self, size: int, tag: int) -> Work:
        flat = self._pool.acquire(size)
        return Work(lambda: dist.irecv(flat, self._source, group=self._group, tag=tag), flat)


class Work:
    """A send or receive in progress, with its memory; what went through a pipe is done."""

    def __init__(self, begin: Callable[[], dist.Work | None], flat: Tensor) -> None:
        self.flat = flat
        with link_errors():
            self._work = begin()

    def wait(self, timeout: timedelta) -> None:
        if self._work is not None:
            with link_errors():
                self._work.wait(timeout)


class link_errors:
    """A context that raises what goes wrong with a connection as a LinkError; a generator would take longer."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, problem: BaseException | None, trace: Any) -> None:
        if isinstance(problem, RuntimeError | TimeoutError | ConnectionError):
            raise LinkError(str(problem)) from problem


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(aligned(tensor.nbytes) for tensor in tensors)


def _write(tensors: Sequence[Tensor], flat: Tensor, start: int) -> None:
    for tensor in tensors:
        _view(flat, start, tensor.nbytes, tensor.dtype, tensor.shape).copy_(tensor.detach())
        start += aligned(tensor.nbytes)


def _view(flat: Tensor, start: int, nbytes: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return flat[start : start + nbytes].view(dtype).view(shape)
