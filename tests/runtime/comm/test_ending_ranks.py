"""A rank may end without `close`: its peers still get what it has sent, and nobody waits for a peer that is gone."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.helpers.rank_functions import DEADLINE, eventually
from torch import nn

import weft
from weft.runtime.comm import process_transport
from weft.runtime.comm.links import SendLink
from weft.runtime.comm.shared_memory import SharedReceiver, SharedSender, memory_probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory is shared on Linux")

Flag = Callable[[], bool]


def link_with_a_message() -> tuple[SendLink, Callable[[], Any]]:
    """A link whose last message nobody has taken yet, and a function that takes it."""
    sender = SharedSender()
    piece = sender.acquire(5000)
    assert piece is not None
    link: Any = SendLink(None, 0, slots=1, timeout=timedelta(seconds=1), shared_sender=sender)  # type: ignore[arg-type]
    receiver = SharedReceiver(os.getpid())
    return link, lambda: receiver.read(piece.number, piece.size)


def lingering(link: SendLink, is_there: Flag, presence: ExitStack | None = None) -> threading.Thread:
    """A rank that ends, in a thread."""
    arguments = (presence or ExitStack(), [(link, is_there)], DEADLINE)
    thread = threading.Thread(target=process_transport._linger, args=arguments, daemon=True)
    thread.start()
    return thread


def still_waits(thread: threading.Thread) -> bool:
    thread.join(0.05)
    return thread.is_alive()


def ends(thread: threading.Thread) -> bool:
    thread.join(DEADLINE)
    return not thread.is_alive()


def test_a_rank_that_ends_waits_until_its_messages_are_taken() -> None:
    link, take = link_with_a_message()
    thread = lingering(link, lambda: True)
    assert still_waits(thread)
    take()
    assert ends(thread)


def test_it_does_not_wait_for_a_rank_that_is_gone() -> None:
    link, _ = link_with_a_message()
    with memory_probe() as probe:
        thread = lingering(link, probe.is_readable)
        assert still_waits(thread)
    assert ends(thread)


def test_two_ranks_that_end_do_not_wait_for_each_other() -> None:
    with ExitStack() as first, ExitStack() as second:
        probes = [presence.enter_context(memory_probe()) for presence in (first, second)]
        earlier = lingering(link_with_a_message()[0], probes[1].is_readable, first)
        assert still_waits(earlier)
        later = lingering(link_with_a_message()[0], probes[0].is_readable, second)
        assert ends(earlier)
        assert ends(later)


def test_its_wait_has_a_deadline() -> None:
    link, _ = link_with_a_message()
    began = monotonic()
    process_transport._linger(ExitStack(), [(link, lambda: True)], 0.1)
    assert monotonic() - began >= 0.1


def test_a_failed_script_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its peers learn of the failure when the process ends."""
    monkeypatch.setattr(sys, "last_value", ValueError("a mistake"), raising=False)  # as after a traceback
    link, _ = link_with_a_message()
    began = monotonic()
    process_transport._linger(ExitStack(), [(link, lambda: True)], DEADLINE)
    assert monotonic() - began < DEADLINE


# Real ranks


def end_before_the_peer_reads(folder: str, schedule: str, is_flushed: bool) -> float | None:
    """Rank 0 maps the last rank's gradient only when that rank has ended, or waits at its end."""
    ended, waits = Path(folder, "ended"), Path(folder, "waits")
    read, is_taken = SharedReceiver.read, SharedSender.is_taken
    last = dist.get_rank() == dist.get_world_size() - 1

    def late_read(receiver: SharedReceiver, number: int, size: int) -> torch.Tensor:
        eventually(lambda: ended.exists() or waits.exists())
        return read(receiver, number, size)

    def noting(sender: SharedSender) -> bool:
        taken: bool = is_taken.fget(sender)  # type: ignore[attr-defined]
        if not taken:
            waits.touch()
        return taken

    with pytest.MonkeyPatch.context() as patch:
        if last:
            patch.setattr(SharedSender, "is_taken", property(noting))
        else:
            patch.setattr(SharedReceiver, "read", late_read)
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(4)))
        pipe = weft.Pipeline(
            model,
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda params: torch.optim.SGD(params, 0.1),
            schedule=schedule,
            microbatches=2,
        )
        result = pipe.step(torch.randn(32, 256), torch.randn(32, 256))
        if is_flushed:
            result = pipe.flush()
        del pipe, model
        gc.collect()
        if last:
            ended.touch()
        return result.loss


@pytest.mark.parametrize("is_flushed", [True, False])
def test_a_rank_that_ends_early_leaves_its_messages(
    launch: Callable[..., list[Any]], tmp_path: Path, is_flushed: bool
) -> None:
    first, second = launch(end_before_the_peer_reads, str(tmp_path), "1f1b", is_flushed, ranks=2)
    assert first == second is not None
    assert (tmp_path / "waits").exists()
