"""Checks for the ranks of `tests/doctor/test_ranks.py`, which import this file."""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any
from unittest import mock

import torch.distributed as dist

from weft.doctor import messages, oracle
from weft.doctor.checks import Broken, Found, NotHere
from weft.doctor.ranks import Place, moment_file


def good(place: Place) -> Found:
    return f"{place.stages} stages", {"processes": place.collectives.world}


def broken_on_last(place: Place) -> Found:
    if place.rank == place.collectives.world - 1:
        raise Broken("it is broken")
    return "fine", {}


def not_here(place: Place) -> Found:
    raise NotHere("it is elsewhere")


def raising_on_last(place: Place) -> Found:
    if place.rank == place.collectives.world - 1:
        raise ValueError("no such value")
    return "fine", {}


def hanging(place: Place) -> Found:
    """In C, with the lock of the interpreter: no other thread could end it."""
    ctypes.PyDLL(None).sleep(600)
    return "fine", {}


# A rank's death


def surviving(place: Place) -> Found:
    """A rank that should die, and does not."""
    with mock.patch.object(os, "kill"):
        from weft.doctor.training import kill_a_rank

        return kill_a_rank(place)


def exiting(place: Place) -> Found:
    """A rank that dies in another way than by a signal."""
    if place.rank == 1:
        moment_file(place.folder).write_text(str(time.monotonic()))
        os._exit(3)
    time.sleep(60)
    return "fine", {}


# Messages and memory that are not what they should be


def lossy(place: Place) -> Found:
    receive = dist.recv

    def receive_zeros(tensor: Any, *args: Any, **options: Any) -> None:
        receive(tensor, *args, **options)
        tensor.zero_()

    with mock.patch.object(dist, "recv", receive_zeros):
        return messages.messages(place)


def without_memfd(place: Place) -> Found:
    """On one rank, as in a sandbox."""
    if place.rank == 0:
        return messages.shared_memory(place)
    with mock.patch.object(os, "memfd_create", side_effect=PermissionError):
        return messages.shared_memory(place)


def strange_memory(place: Place) -> Found:
    with mock.patch.object(messages, "_fill", return_value=1.0):
        return messages.shared_memory(place)


def switched_off(place: Place) -> Found:
    with mock.patch.dict(os.environ, {"WEFT_SHARED_MEMORY": "0"}):
        return messages.shared_memory(place)


def on_time(chunk: int, microbatch: int) -> oracle.Reads:
    """The law of the synchronous methods."""
    return oracle.Reads(0)
