"""Sizes of receives that are posted ahead: both ends must know them alike, whatever is sent."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.runtime.comm.device_links import DeviceReceiver, DeviceSender, _Sizes

SIZES = st.sampled_from([0, 64, 128, 640])


def test_a_receive_is_posted_once_two_mini_batches_had_the_same_sizes() -> None:
    sizes = _Sizes(period=3)
    posted = []
    for size in [64, 128, 640] * 3:
        posted.append(sizes.posted)
        sizes.append(size)
    assert posted == [0, 0, 0, 0, 0, 0, 64, 128, 640]


def test_a_new_size_is_posted_after_it_has_come_twice() -> None:
    sizes = _Sizes(period=1)
    posted = []
    for size in [64, 64, 64, 128, 128, 128, 0, 0]:
        posted.append(sizes.posted)
        sizes.append(size)
    assert posted == [0, 0, 64, 64, 0, 128, 128, 0]


def test_nothing_is_posted_after_a_flush() -> None:
    sizes = _Sizes(period=2)
    for size in [64, 128] * 4:
        sizes.append(size)
    assert sizes.posted == 64
    sizes.clear()
    for size in [64, 128, 64]:
        assert sizes.posted == 0
        sizes.append(size)


@given(period=st.integers(1, 4), sent=st.lists(SIZES, max_size=30), flushes=st.sets(st.integers(0, 30)))
def test_operations_of_both_ends_match(period: int, sent: list[int], flushes: set[int]) -> None:
    """In order and in size, as a communicator needs them; the receiver also gets each message whole."""
    sends: list[int] = []
    receives: list[int] = []

    def operation(log: list[int]) -> Any:
        def start(flat: Tensor, *_: Any, **__: Any) -> Any:
            log.append(flat.numel())
            return mock.Mock(is_completed=lambda: True)

        return start

    with mock.patch.object(dist, "isend", operation(sends)), mock.patch.object(dist, "irecv", operation(receives)):
        cpu, group = torch.device("cpu"), mock.Mock()
        sender = DeviceSender(group, 1, device=cpu, period=period)
        receiver = DeviceReceiver(group, 0, device=cpu, period=period)
        for number, size in enumerate(sent):
            if number in flushes:
                sender.settle()
                receiver.settle()
            written: list[int] = []
            sender.send(size, lambda flat, written=written: written.append(flat.numel()))  # type: ignore[misc]
            arrival = receiver.receive(size)
            assert (arrival is None) == (size == 0)
            assert arrival is None or arrival.tensors[0].numel() == written[0] >= size
        sender.settle()
        receiver.settle()
    assert sends == receives
