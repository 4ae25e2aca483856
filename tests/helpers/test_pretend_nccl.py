"""The NCCL stand-in: order, refusals, mismatches, ends."""

import contextlib
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers import pretend
from tests.helpers.pretend import nccl
from tests.helpers.pretend.processes import on_two_ranks


@contextlib.contextmanager
def group(rank: int, path: str) -> Iterator[torch.device]:
    torch.accelerator.set_device_index(rank)
    store = dist.FileStore(path, 2)  # type: ignore[attr-defined]
    timeout = timedelta(hours=7)
    dist.init_process_group("cpu:gloo,pretend:standin", store=store, rank=rank, world_size=2, timeout=timeout)
    try:
        yield torch.device("pretend", rank)
        leave_together(store, rank)
    finally:
        for communicator in nccl.communicators():
            communicator.abort()
        dist.destroy_process_group()
        torch.accelerator.set_device_index(0)


def leave_together(store: Any, rank: int) -> None:
    """A rank that closes its connections while the other still reads from them resets them."""
    store.set(f"leaves:{rank}", "")
    store.wait(["leaves:0", "leaves:1"], timedelta(seconds=30))


def meet() -> None:
    """On the CPU, so that the stand-in has no part in it."""
    dist.all_reduce(torch.zeros(1))


@on_two_ranks
def test_sends_sums_and_broadcasts(rank: int, path: str) -> None:
    controls = pretend.load()
    with group(rank, path) as device:
        message = torch.full((3,), float(rank), device=device)
        controls.reset_counts()
        if rank == 0:
            dist.send(message, 1)
        else:
            dist.recv(message, 0)
        total = torch.full((2,), rank + 1.0, device=device)
        dist.all_reduce(total)
        mean = torch.full((2,), rank + 1.0, device=device, dtype=torch.bfloat16)
        dist.all_reduce(mean, op=dist.ReduceOp.AVG)
        copied = torch.full((2,), rank + 5, device=device)
        dist.broadcast(copied, 1)
        assert controls.counts() == {}  # streams wait, the host does not
        assert message.tolist() == [0.0] * 3
        assert total.tolist() == [3.0] * 2
        assert mean.tolist() == [1.5] * 2
        assert copied.tolist() == [6] * 2
        (communicator,) = nccl.communicators()
        assert [operation.op for operation in communicator.log][1:] == ["all_reduce", "all_reduce", "broadcast"]
        assert communicator.timeout == timedelta(hours=7)
        controls.reset_counts()
        dist.barrier(group=dist.new_group(backend="standin"), device_ids=[rank])
        assert controls.counts() == {"event synchronize": 1}


@on_two_ranks
def test_what_nccl_refuses(rank: int, path: str) -> None:
    with group(rank, path) as device:
        dist.all_reduce(torch.ones(1, device=device))
        communicator = dist.new_group(backend="standin")
        with pytest.raises(RuntimeError, match="cpu"):
            dist.all_reduce(torch.ones(1), group=communicator)
        for tensor, message in (
            (torch.ones(1, device=device, dtype=torch.int16), "no all_reduce for torch.int16"),
            (torch.ones(2, 2, device=device).t(), "contiguous"),
            (torch.ones(1, device="pretend:3"), f"is on {device}, the tensor of all_reduce on pretend:3"),
        ):
            with pytest.raises(RuntimeError, match=message):
                dist.all_reduce(tensor)


@on_two_ranks
def test_ends_that_do_not_match(rank: int, path: str) -> None:
    with group(rank, path) as device:
        tensor = torch.ones(3 + rank, device=device)
        work = dist.isend(tensor, 1) if rank == 0 else dist.irecv(tensor, 0)
        assert work is not None
        work.wait()
        with pytest.raises(RuntimeError) as error:
            tensor + 1
        assert "send of 3 float32" in str(error.value)
        assert "recv of 4 float32" in str(error.value)
        assert not work.is_success()


@on_two_ranks
def test_collectives_in_another_order(rank: int, path: str) -> None:
    with group(rank, path) as device:
        tensors = [torch.ones(size, device=device) for size in (3, 4)]
        for tensor in tensors if rank == 0 else reversed(tensors):
            dist.all_reduce(tensor)
        with pytest.raises(RuntimeError, match="the ranks of a communicator do different things"):
            tensors[0] + 1


@on_two_ranks
def test_a_send_is_complete_when_its_receive_runs(rank: int, path: str) -> None:
    controls = pretend.load()
    with group(rank, path) as device:
        tensor = torch.full((3,), float(rank), device=device)
        if rank == 0:
            work = dist.isend(tensor, 1)
            assert work is not None
            meet()
            assert not work.is_completed()
            assert [operation.op for operation in nccl.communicators()[0].outstanding] == ["send"]
            tensor + 1  # reads what the send reads, and has not waited for it
            with pytest.raises(RuntimeError, match="is not ordered after the read by nccl:send"):
                tensor.add_(1)
            meet()
            work.wait()
            tensor.add_(1)
            assert work.is_completed()
        else:
            meet()
            meet()
            work = dist.irecv(tensor, 0)
            assert work is not None
            with pytest.raises(RuntimeError, match="is not ordered after the write by nccl:recv"):
                tensor + 1
            work.wait()
            assert tensor.tolist() == [0.0] * 3
        controls.reset_errors()


@on_two_ranks
def test_an_operation_waits_for_the_stream_of_its_call(rank: int, path: str) -> None:
    controls = pretend.load()
    with group(rank, path) as device:
        side = torch.Stream(device=device)
        tensor = torch.ones(3, device=device)
        gate = controls.Gate("compute")
        if rank == 0:
            controls.block_stream(torch.accelerator.current_stream(), gate)
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        meet()
        assert not work.is_completed()
        with side:
            torch.ones(3, device=device)  # another stream goes on
        meet()
        gate.open()
        work.wait()
        assert tensor.tolist() == [2.0] * 3


@on_two_ranks
def test_an_operation_that_never_completes_is_aborted(rank: int, path: str) -> None:
    controls = pretend.load()
    with group(rank, path) as device:
        nccl.behave(nccl.Behaviour(never_completes=lambda operation: operation.op == "all_reduce"))
        tensor = torch.ones(3, device=device)
        broadcast = dist.broadcast(tensor, 0, async_op=True)
        work = dist.all_reduce(tensor, async_op=True)
        assert broadcast is not None
        assert work is not None
        broadcast.wait()
        assert not work.is_completed()
        work.wait()
        controls.set_gate_limit(0.05)
        with pytest.raises(RuntimeError, match=r"stayed closed: all_reduce \(SUM\) of 3 float32"):
            tensor + 1
        began = time.monotonic()
        torch.distributed.distributed_c10d._abort_process_group()
        assert time.monotonic() - began < 5
        (communicator,) = nccl.communicators()
        assert communicator.is_aborted
        assert not [thread for thread in threading.enumerate() if thread.name.startswith(communicator.name + ":")]
        assert work.is_completed()
        tensor + 1
        with pytest.raises(RuntimeError, match="aborted"):
            communicator.start("barrier", [], [], -1, None)
        store = dist.FileStore(path + "2", 2)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=rank, world_size=2)


@on_two_ranks
def test_an_operation_whose_peer_is_gone_hangs_until_it_is_aborted(rank: int, path: str) -> None:
    with group(rank, path) as device:
        tensor = torch.ones(3, device=device)
        dist.all_reduce(tensor)
        assert tensor.tolist() == [2.0] * 3
        (communicator,) = nccl.communicators()
        meet()
        if rank == 1:
            communicator.abort()
        meet()
        if rank == 0:
            work = dist.all_reduce(tensor, async_op=True)
            assert work is not None
            assert not communicator.is_aborted
            assert not work.is_completed()
            communicator.abort()
            assert work.is_completed()
            assert not work.is_success()


@on_two_ranks
def test_a_delay_keeps_the_order(rank: int, path: str) -> None:
    with group(rank, path) as device:
        late = threading.Event()
        nccl.behave(nccl.Behaviour(delay=lambda operation: None if operation.number else assert_set(late)))
        tensors = [torch.full((2,), float(index), device=device) for index in range(3)]
        works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
        assert not any(work.is_completed() for work in works if work is not None)
        late.set()
        for work in works:
            assert work is not None
            work.wait()
        assert [tensor.tolist() for tensor in tensors] == [[0.0] * 2, [2.0] * 2, [4.0] * 2]
        (communicator,) = nccl.communicators()
        assert [operation.number for operation in communicator.log] == [0, 1, 2]


def assert_set(event: threading.Event) -> None:
    assert event.wait(10)
