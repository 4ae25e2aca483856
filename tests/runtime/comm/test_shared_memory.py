"""Memory that two ranks share, seen from one process that is both of them; and who may share."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import weft
from weft.runtime.comm import shared_memory
from weft.runtime.comm.buffers import ALIGNMENT
from weft.runtime.comm.shared_memory import FREE, HELD, SENT, Offer, SharedReceiver, SharedSender

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")


def test_a_piece_is_read_where_it_was_written() -> None:
    lender, borrower = SharedSender(), SharedReceiver(os.getpid())
    piece = lender.take(1000)
    assert piece is not None
    piece.flat[:1000] = torch.arange(1000) % 251
    came = borrower.take(piece.number, piece.size)
    assert came.data_ptr() % ALIGNMENT == 0
    assert torch.equal(came[:1000], (torch.arange(1000) % 251).to(torch.uint8))
    piece.flat[0] = 77
    assert came[0] == 77


def test_a_piece_is_taken_again_when_its_last_view_is_gone_and_not_before() -> None:
    lender, borrower = SharedSender(), SharedReceiver(os.getpid())
    first = lender.take(5000)
    assert first is not None
    assert first.state == SENT
    view = borrower.take(first.number, first.size)[64:128].view(torch.float32)
    borrower.give_back()
    assert first.state == HELD
    second = lender.take(5000)
    assert second is not first
    del view
    assert lender.take(5000) not in (first, second)  # nobody has given it back yet
    borrower.give_back()
    assert first.state == FREE
    assert lender.take(5000) is first


def test_a_free_piece_that_is_too_small_grows_and_is_mapped_anew() -> None:
    lender, borrower = SharedSender(), SharedReceiver(os.getpid())
    piece = lender.take(100)
    assert piece is not None
    borrower.take(piece.number, piece.size)
    borrower.give_back()
    assert lender.take(100_000) is piece
    piece.flat[99_999] = 5
    assert borrower.take(piece.number, piece.size)[99_999] == 5


def test_the_smallest_piece_that_fits_is_taken() -> None:
    lender = SharedSender()
    pieces = [lender.take(size) for size in (3000, 1000, 2000)]
    for piece in pieces:
        assert piece is not None
        piece.state = FREE
    assert lender.take(1500) is pieces[2]
    assert lender.take(1500) is pieces[0]


def test_bytes_are_told_until_the_borrower_holds_them() -> None:
    lender, borrower = SharedSender(), SharedReceiver(os.getpid())
    piece = lender.take(64_000)
    assert piece is not None
    assert lender.nbytes == 64_000
    view = borrower.take(piece.number, piece.size)
    assert lender.nbytes == 0
    del view
    borrower.give_back()
    assert lender.nbytes == 64_000


def test_without_memory_there_is_no_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert SharedSender().take(1000) is None


def test_descriptors_go_with_their_lender() -> None:
    lender = SharedSender()
    piece = lender.take(1000)
    assert piece is not None
    number = piece.number
    os.fstat(number)
    del piece, lender
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(number)


# Who may share


def test_an_offer_can_be_read_by_whoever_may_open_it() -> None:
    with shared_memory.offered() as offer:
        assert offer.readable()
        assert not dataclasses.replace(offer, token="00" * 16).readable()  # another process has that number
        assert not dataclasses.replace(offer, host="elsewhere").readable()
        assert not dataclasses.replace(offer, pid=2**22 + 1).readable()
    assert not offer.readable()


def test_an_environment_can_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with shared_memory.offered() as offer:
        monkeypatch.setenv(shared_memory.SWITCH, "0")
        assert not offer.readable()
    with shared_memory.offered() as nothing:
        assert nothing == Offer(host=shared_memory.host(), pid=os.getpid())
    monkeypatch.delenv(shared_memory.SWITCH)
    assert not nothing.readable()


# On real ranks


def trained() -> list[tuple[bool, list[list[float]]]]:
    """With memory that is shared and without: whether it was, and the weights after some updates."""
    found = []
    for switch in ("1", "0"):
        os.environ[shared_memory.SWITCH] = switch
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        schedule = weft.schedule("wpipe", stages=2, microbatches=4)
        pipe = weft.Pipeline(
            model, loss_fn=nn.functional.mse_loss, optimizer=lambda some: torch.optim.SGD(some, 0.1), schedule=schedule
        )
        for _ in range(4):
            pipe.step(torch.randn(128, 64), torch.randn(128, 64))
        pipe.flush()
        (link,) = pipe._transport._outgoing.values()  # type: ignore[attr-defined]
        used = link._lender is not None and link._lender.nbytes > 0
        found.append((used, [one.flatten().tolist() for one in pipe.state_dict().values()]))
        pipe.close()
    return found


def test_ranks_of_one_host_share_memory_and_compute_the_same(launch: Callable[..., list[Any]]) -> None:
    for (with_it, first), (without, second) in launch(trained, ranks=2):
        assert (with_it, without) == (True, False)
        assert first == second
