"""Copies between host and device that block nothing: `HostCopy` and `Uploads`.

A lag makes copies late, so memory that is read or overwritten too early shows.
"""

import re
from unittest import mock

import pytest
import torch
from tests.helpers import pretend
from tests.helpers.pretend.processes import in_process
from torch import Tensor

from weft.runtime.device import HostCopy, Uploads, uploads

NAME = "pretend:0"
LAG = 20


def launch(count: int) -> None:
    """Other work, which takes time."""
    tensor = torch.zeros(1, device=NAME)
    for _ in range(count):
        tensor.add_(1)


# From the device


@in_process
def test_a_copy_is_there_when_the_device_has_made_it() -> None:
    controls = pretend.load()
    controls.set_lag(LAG)
    controls.reset_counts()
    source = torch.arange(6.0, device=NAME).reshape(2, 3).requires_grad_()
    copy = HostCopy([source, torch.tensor(7.0)])
    assert not copy.ready
    launch(LAG)
    assert copy.ready
    first, second = copy.tensors
    assert first.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (first.is_pinned(), first.requires_grad, second.item()) == (True, False, 7)
    assert copy.numbers() == [0, 1, 2, 3, 4, 5, 7]
    assert controls.waits() == 0


@in_process
def test_a_copy_is_in_the_order_of_the_stream() -> None:
    """Later writes do not change it, and the source may be freed."""
    pretend.load().set_lag(LAG)
    source = torch.ones(3, device=NAME)
    before = HostCopy([source])
    source.add_(1)
    after = HostCopy([source])
    del source
    launch(2 * LAG)
    assert (before.numbers(), after.numbers()) == ([1, 1, 1], [2, 2, 2])


@in_process
def test_reading_before_it_is_there_is_an_error() -> None:
    """Otherwise the host would read what is in the memory by then."""
    pretend.load().set_lag(LAG)
    copy = HostCopy([torch.ones(2, device=NAME)])
    for read in (lambda: copy.tensors, copy.numbers):
        with pytest.raises(AssertionError, match="before the device has written it"):
            read()
    with mock.patch.object(HostCopy, "ready", True):
        assert copy.tensors[0].isnan().all()
    copy.wait(10)
    assert copy.numbers() == [1, 1]


@in_process
def test_waiting_has_a_deadline() -> None:
    controls = pretend.load()
    controls.set_lag(10**9)
    copy = HostCopy([torch.ones(2, device=NAME)])
    message = "timed out after 0.05 s: a device has not computed what was copied from it"
    with pytest.raises(TimeoutError, match=re.escape(message)):
        copy.wait(0.05)
    assert controls.waits() == 0  # it looks again and again, and blocks in no call that has no deadline
    controls.set_lag(0)
    copy.wait(0.05)
    assert copy.numbers() == [1, 1]


def test_tensors_of_the_host_are_taken_as_they_are() -> None:
    tensor = torch.ones(2)
    copy = HostCopy([tensor])
    assert copy.ready
    assert copy.tensors[0] is tensor
    copy.wait(0)
    assert HostCopy([]).numbers() == []


@in_process
def test_a_device_without_streams_is_read_at_once() -> None:
    controls = pretend.load()
    controls.reset_counts()
    with mock.patch("weft.runtime.device.host_copy.has_streams", return_value=False):
        copy = HostCopy([torch.ones(2, device=NAME)])
    assert controls.counts() == {"copy to host": 1}
    assert copy.numbers() == [1, 1]


# To the device


def moved(tensors: list[Tensor], *, copy: bool = False) -> list[Tensor]:
    return Uploads(torch.device(NAME)).move(tensors, copy=copy)


@in_process
def test_uploads_block_nothing() -> None:
    controls = pretend.load()
    controls.set_lag(LAG)
    controls.reset_counts()
    given = [torch.arange(6.0).reshape(2, 3).T, torch.tensor(True), torch.ones(2, dtype=torch.int16)]
    arrived = moved([*given, torch.full((2,), 5.0).requires_grad_()])
    assert not any(tensor.requires_grad for tensor in arrived)
    doubled = [tensor * 2 for tensor in arrived]  # in the current stream, which waits for them
    assert controls.counts() == {}
    assert [str(tensor.device) for tensor in arrived] == [NAME] * 4
    del arrived
    launch(LAG)
    for tensor, expected in zip(doubled, [*given, torch.full((2,), 5.0)], strict=True):
        assert torch.equal(tensor.cpu(), expected * 2)


@pytest.mark.parametrize("pinned", [False, True])
@in_process
def test_the_caller_may_overwrite_its_batch(pinned: bool) -> None:
    """Even one that is pinned, from which a copy could start directly."""
    controls = pretend.load()
    controls.set_lag(LAG)
    batch = torch.ones(3).pin_memory() if pinned else torch.ones(3)
    (arrived,) = moved([batch])
    batch.zero_()
    launch(2 * LAG)
    assert arrived.tolist() == [1.0] * 3
    assert controls.errors() == []


@in_process
def test_what_is_on_the_device_is_copied_only_if_it_must() -> None:
    pretend.load()
    batch = torch.ones(3, device=NAME)
    same, other = moved([batch])[0], moved([batch], copy=True)[0]
    others = moved([torch.ones(3, device="pretend:1"), torch.ones(1), torch.zeros(0, 3)])
    batch.zero_()
    assert (same.tolist(), other.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert {str(tensor.device) for tensor in others} == {NAME}
    assert [tensor.numel() for tensor in others] == [3, 1, 0]


def test_on_the_cpu_nothing_is_moved() -> None:
    batch = torch.ones(3, requires_grad=True)
    uploads = Uploads(torch.device("cpu"))
    (same,), (other,) = (uploads.move([batch], copy=copy) for copy in (False, True))
    assert same.data_ptr() == batch.data_ptr() != other.data_ptr()
    assert not same.requires_grad


# Controls


@in_process
def test_use_before_the_arrival_is_noticed() -> None:
    pretend.load().set_lag(LAG)
    with mock.patch.object(uploads, "wait_for_mark"):
        (arrived,) = moved([torch.ones(3)])
    with pytest.raises(RuntimeError, match="not ordered after"):
        arrived + 1


@in_process
def test_memory_that_is_freed_too_early_is_noticed() -> None:
    pretend.load().set_lag(LAG)
    with mock.patch.object(uploads, "record_use") as recorded:
        (arrived,) = moved([torch.ones(3)])
    recorded.reset_mock()  # which holds the tensor
    arrived + 1
    del arrived
    with pytest.raises(RuntimeError, match="is freed after"):
        launch(1)
