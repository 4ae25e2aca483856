"""The tensors of messages between devices, over a communicator (NCCL) that belongs to one link.

Tensors of a message are one flat buffer of bytes, so every dtype can travel, and a message is one operation. Both ends
work on a side stream: the compute stream neither waits for a peer nor holds a message up.

A schedule repeats itself: message n is as large as message n - period, one mini-batch before it. So once two
mini-batches had the same sizes, the receiver posts the receive of the next message before that is announced, and data
can move as soon as it is computed. (Not earlier: a receive occupies the device until it is served, and what is new to
the device, as a first update is, may have to wait for that.) Both ends track these sizes, since the two ends of an
operation must have the same size. A smaller message is padded. For a larger one the sender first serves the receive
that was posted, and the message follows in an operation of its own. After a flush no receive is left posted.

What a message is comes in its header, over gloo (`links.py`). Hosts run ahead of their devices, so a header does too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from weft.runtime.device import mark, new_stream, on_stream, record_use, wait_for_mark


class Arrival(NamedTuple):
    """When the tensors of a message are there: in the stream of its link."""

    mark: torch.Event | None
    tensors: Sequence[Tensor]  # that own the memory

    def wait(self) -> None:
        """Let the current stream wait for it, and keep its memory for that stream."""
        device = self.tensors[0].device
        wait_for_mark(self.mark, device)
        record_use(self.tensors, device)


class _Sizes:
    """The size of the receive that is posted for the next message, as both ends know it; 0: none is posted."""

    def __init__(self, period: int) -> None:
        self._recent = deque([0] * 2 * period, maxlen=2 * period)
        self.posted = 0

    def clear(self) -> None:
        """Nothing is posted any more, and the next mini-batch may have other sizes."""
        self._recent.extend([0] * len(self._recent))
        self.posted = 0

    def append(self, size: int) -> None:
        """A message had this size."""
        self._recent.append(size)
        before, last = self._recent[0], self._recent[len(self._recent) // 2]
        self.posted = last if last == before else 0


class DeviceSender:
    """The sending end."""

    def __init__(self, group: dist.ProcessGroup, target: int, *, device: torch.device, period: int) -> None:
        self._group, self._target, self._device = group, target, device
        self._stream = new_stream(device)
        self._sizes = _Sizes(period)
        self._sends: deque[tuple[Any, Tensor]] = deque()  # operations under way, with their memory

    @property
    def nbytes(self) -> int:
        """Bytes of messages that have not been received yet."""
        self._drop_completed()
        return sum(flat.nbytes for _, flat in self._sends)

    def send(self, size: int, write: Callable[[Tensor], None]) -> None:
        """Send `size` bytes, which `write` puts into a flat buffer in the current stream. Nobody waits."""
        self._drop_completed()
        posted = self._sizes.posted
        self._sizes.append(size)
        if posted and size > posted:
            self._send(torch.empty(posted, dtype=torch.uint8, device=self._device))
            posted = 0
        if posted or size:
            flat = torch.empty(posted or size, dtype=torch.uint8, device=self._device)
            write(flat)
            self._send(flat)

    def settle(self) -> None:
        """Serve the receive that is posted, so that none is left."""
        if self._sizes.posted:
            self._send(torch.empty(self._sizes.posted, dtype=torch.uint8, device=self._device))
        self._sizes.clear()

    @property
    def under_way(self) -> int:
        """Operations that the receiver has not served yet."""
        self._drop_completed()
        return len(self._sends)

    def _send(self, flat: Tensor) -> None:
        written = mark(self._device)
        with on_stream(self._stream):
            wait_for_mark(written, self._device)
            self._sends.append((dist.isend(flat, self._target, group=self._group), flat))

    def _drop_completed(self) -> None:
        while self._sends and self._sends[0][0].is_completed():
            self._sends.popleft()


class DeviceReceiver:
    """The receiving end."""

    def __init__(self, group: dist.ProcessGroup, source: int, *, device: torch.device, period: int) -> None:
        self._group, self._source, self._device = group, source, device
        self._stream = new_stream(device)
        self._sizes = _Sizes(period)
        self._posted: Arrival | None = None
        self._newest: torch.Event | None = None  # the mark of the newest operation that the sender serves for sure

    @property
    def is_late(self) -> bool:
        """Whether a message was announced, or a receive is to be served, and is not there yet."""
        return self._newest is not None and not self._newest.query()

    @property
    def nbytes(self) -> int:
        """Bytes of the receive that is posted."""
        return 0 if self._posted is None else self._posted.tensors[0].nbytes

    def receive(self, size: int) -> Arrival | None:
        """The flat buffer of the next message, which has `size` bytes, as soon as its header is read."""
        arrival = self._irecv(size) if size > self._sizes.posted else self._posted
        self._sizes.append(size)
        self._posted = self._irecv(self._sizes.posted) if self._sizes.posted else None
        if arrival is None or not size:
            return None
        self._newest = arrival.mark
        return arrival

    def settle(self) -> None:
        """Leave no receive posted; the sender serves it."""
        if self._posted is not None:
            self._newest, self._posted = self._posted.mark, None
        self._sizes.clear()

    def _irecv(self, size: int) -> Arrival:
        with on_stream(self._stream):
            flat = torch.empty(size, dtype=torch.uint8, device=self._device)
            work = dist.irecv(flat, self._source, group=self._group)
            assert work is not None
            work.wait()  # the side stream waits, not the host
            return Arrival(mark(self._device), [flat])
