"""Memory shared by two ranks, with both ends in one process; and which processes may share memory."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import weft
from weft.runtime.comm import shared_memory
from weft.runtime.comm.buffers import ALIGNMENT, aligned
from weft.runtime.comm.shared_memory import FREE, HELD, SENT, MemoryProbe, SharedReceiver, SharedSender

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")


def test_a_piece_is_read_where_it_was_written() -> None:
    sender, receiver = SharedSender(), SharedReceiver(os.getpid())
    piece = sender.acquire(1000)
    assert piece is not None
    piece.flat[:1000] = torch.arange(1000) % 251
    came = receiver.read(piece.number, piece.size)
    assert came.data_ptr() % ALIGNMENT == 0
    assert torch.equal(came[:1000], (torch.arange(1000) % 251).to(torch.uint8))
    piece.flat[0] = 77
    assert came[0] == 77


def test_a_piece_is_reused_only_after_its_last_view_is_gone() -> None:
    sender, receiver = SharedSender(), SharedReceiver(os.getpid())
    first = sender.acquire(5000)
    assert first is not None
    assert first.state == SENT
    view = receiver.read(first.number, first.size)[64:128].view(torch.float32)
    receiver.release()
    assert first.state == HELD
    second = sender.acquire(5000)
    assert second is not first
    del view
    assert sender.acquire(5000) not in (first, second)  # not released yet
    receiver.release()
    assert first.state == FREE
    assert sender.acquire(5000) is first


def test_a_free_piece_that_is_too_small_grows_and_is_mapped_again() -> None:
    sender, receiver = SharedSender(), SharedReceiver(os.getpid())
    piece = sender.acquire(100)
    assert piece is not None
    receiver.read(piece.number, piece.size)
    receiver.release()
    assert sender.acquire(100_000) is piece
    piece.flat[99_999] = 5
    assert receiver.read(piece.number, piece.size)[99_999] == 5


def test_the_smallest_piece_that_fits_is_taken() -> None:
    sender = SharedSender()
    pieces = [sender.acquire(size) for size in (3000, 1000, 2000)]
    for piece in pieces:
        assert piece is not None
        piece.state = FREE
    assert sender.acquire(1500) is pieces[2]
    assert sender.acquire(1500) is pieces[0]


def test_bytes_count_until_the_receiver_holds_them() -> None:
    sender, receiver = SharedSender(), SharedReceiver(os.getpid())
    piece = sender.acquire(64_000)
    assert piece is not None
    assert sender.nbytes == 64_000
    view = receiver.read(piece.number, piece.size)
    assert sender.nbytes == 0
    del view
    receiver.release()
    assert sender.nbytes == 64_000


def test_without_memory_there_is_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert SharedSender().acquire(1000) is None


@pytest.mark.parametrize("step", ["os.posix_fallocate", "mmap.mmap"])
def test_a_piece_that_can_not_grow_stays_as_it_was(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """It would claim room that it does not have, and the second large message would crash."""
    sender, receiver = SharedSender(), SharedReceiver(os.getpid())
    piece = sender.acquire(1000)
    assert piece is not None
    piece.state = FREE
    with monkeypatch.context() as patch:
        patch.setattr(step, refuse)
        assert [sender.acquire(100_000) for _ in range(2)] == [None, None]
    assert piece.size == piece.flat.nbytes == aligned(1000)
    assert sender.acquire(1000) is piece
    piece.flat[:1000] = torch.arange(1000) % 251
    assert torch.equal(receiver.read(piece.number, piece.size)[:1000], piece.flat[:1000])
    receiver.release()
    assert sender.acquire(100_000) is piece  # there is memory again
    assert piece.size == piece.flat.nbytes == aligned(100_000)


def refuse(*_: Any) -> Any:
    raise PermissionError("Operation not permitted")


def test_descriptors_close_with_their_sender() -> None:
    sender = SharedSender()
    piece = sender.acquire(1000)
    assert piece is not None
    number = piece.number
    os.fstat(number)
    del piece, sender
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


# Permission to share


def test_a_probe_is_readable_with_permission_on_the_same_host() -> None:
    with shared_memory.memory_probe() as probe:
        assert probe.is_readable()
        assert not dataclasses.replace(probe, token="00" * 16).is_readable()  # another process has that id
        assert not dataclasses.replace(probe, host="elsewhere").is_readable()
        assert not dataclasses.replace(probe, pid=2**22 + 1).is_readable()
    assert not probe.is_readable()


def test_an_environment_variable_forbids_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_memory.memory_probe() as probe:
        monkeypatch.setenv(shared_memory.SHARED_MEMORY_SWITCH, "0")
        assert not probe.is_readable()
    with shared_memory.memory_probe() as nothing:
        assert nothing == MemoryProbe(host=shared_memory.host(), pid=os.getpid())
    monkeypatch.delenv(shared_memory.SHARED_MEMORY_SWITCH)
    assert not nothing.is_readable()


@pytest.mark.parametrize("how", ["refused", "missing"])
def test_a_process_without_anonymous_memory_shares_none(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """A sandbox refuses the call, or this Python was built for a system without it."""
    if how == "refused":
        monkeypatch.setattr(os, "memfd_create", refuse)
    else:
        monkeypatch.delattr(os, "memfd_create")
    with shared_memory.memory_probe() as probe:
        assert probe == MemoryProbe(host=shared_memory.host(), pid=os.getpid())
        assert not probe.is_readable()


# Real ranks


def trained() -> list[tuple[bool, bool, list[list[float]]]]:
    """With and without shared memory, and where memory or pipes are refused: whether they were used, and the weights
    after updates."""
    found = []
    create, make_pipe = os.memfd_create, os.pipe2
    for switch, refused in (("1", ""), ("0", ""), ("1", "memory"), ("1", "pipes")):
        os.environ[shared_memory.SHARED_MEMORY_SWITCH] = switch
        if dist.get_rank() == 0:
            os.memfd_create = refuse if refused == "memory" else create  # type: ignore[assignment]
            os.pipe2 = refuse if refused == "pipes" else make_pipe
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        schedule = weft.schedule("wpipe", stages=2, microbatches=4)
        pipe = weft.Pipeline(
            model,
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, 0.1),
            schedule=schedule,
        )
        for _ in range(4):
            pipe.step(torch.randn(128, 64), torch.randn(128, 64))
        pipe.flush()
        (link,) = pipe._assembly.transport._outgoing.values()  # type: ignore[attr-defined]
        used = link._shared_sender is not None and link._shared_sender.nbytes > 0
        weights = [tensor.flatten().tolist() for tensor in pipe.state_dict().values()]
        found.append((used, link._pipe is not None, weights))
        pipe.close()
    os.memfd_create, os.pipe2 = create, make_pipe
    return found


def test_ranks_of_one_host_share_memory_and_compute_the_same(launch: Callable[..., list[Any]]) -> None:
    """A rank that may not make memory or pipes may still open those of the other; what is missing, gloo does."""
    for rank, results in enumerate(launch(trained, ranks=2)):
        with_it, without, no_memory, no_pipes = ((used, piped) for used, piped, _ in results)
        assert (with_it, without) == ((True, True), (False, False))
        assert (no_memory, no_pipes) == ((rank == 1, rank == 1), (True, rank == 1))
        assert all(weights == results[0][2] for _, _, weights in results)
