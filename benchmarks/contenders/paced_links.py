"""Links that take time: a message between two ranks arrives a hop later than it was sent, on weft's own transport.

Ranks of one machine share a clock, so each message carries the moment at which it was sent. Whoever takes it waits for
the rest of the hop. Messages overlap with work and with each other, as on a link with latency and no other limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch

from weft.runtime.comm.links import ReceiveLink, SendLink
from weft.runtime.comm.messages import Message


@contextmanager
def paced_links(hop: float) -> Iterator[None]:
    """Within it, every message of this process takes at least `hop` seconds."""
    send, receive = SendLink.send, ReceiveLink.receive

    def stamped_send(self: SendLink, message: Message) -> None:
        moment = torch.tensor([time.monotonic()], dtype=torch.float64)
        tensors, grads = [*message.tensors, moment], [*message.grads, False]
        send(self, Message(message.key, tensors, message.skeleton, grads, message.loss))

    def paced_receive(self: ReceiveLink, timeout: timedelta) -> Message:
        message = receive(self, timeout)
        *tensors, moment = message.tensors
        time.sleep(max(0.0, float(moment) + hop - time.monotonic()))
        return Message(message.key, tensors, message.skeleton, message.grads[:-1], message.loss, message.arrival)

    with (
        mock.patch.object(SendLink, "send", stamped_send),
        mock.patch.object(ReceiveLink, "receive", paced_receive),
    ):
        yield
