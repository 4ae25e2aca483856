"""Links that take time: a message between two ranks arrives a hop later than it was sent, on weft's own transport.

Ranks of one machine share a clock, so each message carries the moment at which it was sent. Whoever takes it waits for
the rest of the hop. Messages overlap with work and with each other, as on a link with latency and no other limit.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from weft.runtime.comm import Message, ProcessTransport, Send


@contextmanager
def paced_links(hop: float) -> Iterator[None]:
    """Within it, every message of this process takes at least `hop` seconds."""
    sender, receive = ProcessTransport.sender, ProcessTransport.receive

    def stamping_sender(self: ProcessTransport, rank: int) -> Send:
        send = sender(self, rank)

        def stamped_send(target: int, message: Message) -> None:
            moment = torch.tensor([time.monotonic()], dtype=torch.float64)
            tensors, grads = [*message.tensors, moment], [*message.grads, False]
            send(target, Message(message.key, tensors, message.skeleton, grads, message.loss))

        return stamped_send

    def paced_receive(self: ProcessTransport, source: int, awaited: str) -> None:
        receive(self, source, awaited)
        inbox = self.inbox(0)
        message = inbox[next(reversed(inbox))]  # the newest
        moment, message.grads = message.tensors.pop(), message.grads[:-1]
        time.sleep(max(0.0, float(moment) + hop - time.monotonic()))

    with (
        mock.patch.object(ProcessTransport, "sender", stamping_sender),
        mock.patch.object(ProcessTransport, "receive", paced_receive),
    ):
        yield
