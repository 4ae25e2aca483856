"""Memory that two ranks of one host share: what is handed over is copied once, and no thread but theirs is woken.

A lender has pieces of anonymous memory (memfd), each for one message at a time; the header of a message tells which. A
borrower maps a piece when it first hears of it, reads messages where they are, and gives a piece back when nothing
holds on to it any more: a byte in the piece itself, which the lender looks at before it takes the piece again. Nobody
waits: where none is free, or large enough, there is one more. Nothing has a name, so nothing is left behind.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.runtime.comm.buffers import ALIGNMENT, aligned, is_held

SWITCH = "WEFT_SHARED_MEMORY"  # "0" in the environment of a rank: it shares none
FREE, SENT, HELD = 0, 1, 2  # what the first byte of a piece says
TOKEN = 16  # bytes

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


def host() -> str:
    """What ranks of one host have in common: its name, and its network, of which a container may have its own."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {network}".strip()


class Piece:
    """A piece of memory of a lender; its first `ALIGNMENT` bytes are the state's."""

    def __init__(self, size: int) -> None:
        self.number = os.memfd_create("weft", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.number)
        self.grow(size)

    def grow(self, size: int) -> None:
        """Let it hold so many bytes; OSError if there is not so much memory."""
        self.size = aligned(size)
        os.posix_fallocate(self.number, 0, ALIGNMENT + self.size)
        self._bytes = _mapped(self.number, ALIGNMENT + self.size)
        self.flat = torch.from_numpy(self._bytes[ALIGNMENT:])

    @property
    def state(self) -> int:
        return int(self._bytes[0])

    @state.setter
    def state(self, state: int) -> None:
        self._bytes[0] = state


class SharedSender:
    """The sender's pieces of memory for one link."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def take(self, size: int) -> Piece | None:
        """A piece that nobody reads, for a message of this size; None if there is no memory for it."""
        free = [piece for piece in self._pieces if piece.state == FREE]
        large = [piece for piece in free if piece.size >= size]
        try:
            if large:
                piece = min(large, key=lambda one: one.size)
            elif free:
                piece = free[0]
                piece.grow(size)
            else:
                piece = Piece(size)
                self._pieces.append(piece)
        except OSError:
            return None
        piece.state = SENT
        return piece

    @property
    def nbytes(self) -> int:
        """Of pieces that no micro-batch of the borrower's holds."""
        return sum(piece.size for piece in self._pieces if piece.state != HELD)


class SharedReceiver:
    """The receiver's view of a lender's memory."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._pieces: dict[int, list[Bytes]] = {}  # by number: the state, and what a message may be in

    def take(self, number: int, size: int) -> Tensor:
        """What is in a piece; it is given back when all views of it are gone."""
        piece = self._pieces.get(number)
        if piece is None or piece[1].nbytes < size:
            descriptor = os.open(f"/proc/{self._pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                whole = _mapped(descriptor, ALIGNMENT + size)
            finally:
                os.close(descriptor)
            piece = self._pieces[number] = [whole[:ALIGNMENT], whole[ALIGNMENT:]]
        piece[0][0] = HELD
        return torch.from_numpy(piece[1])

    def give_back(self) -> None:
        """Let the lender have what nothing here holds any more."""
        for piece in self._pieces.values():
            if piece[0][0] == HELD and not is_held(piece, 1):
                piece[0][0] = FREE


def _mapped(descriptor: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


# Who can read whose memory


@dataclass(frozen=True, kw_only=True)
class Offer:
    """What a rank tells all others, so that they can try to read its memory."""

    host: str
    pid: int
    number: int = -1
    token: str = ""

    def readable(self) -> bool:
        """Whether this process can share memory with that one: the same host, and the right to open it."""
        if self.number < 0 or self.host != host() or not wanted():
            return False
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/fd/{self.number}").read_bytes() == bytes.fromhex(self.token)
        return False


@contextlib.contextmanager
def offered() -> Iterator[Offer]:
    """An offer for as long as others try it."""
    me = Offer(host=host(), pid=os.getpid())
    if not wanted():
        yield me
        return
    token = secrets.token_bytes(TOKEN)
    with open(os.memfd_create("weft", os.MFD_CLOEXEC), "wb", buffering=0) as file:
        file.write(token)
        yield Offer(host=me.host, pid=me.pid, number=file.fileno(), token=token.hex())


def wanted() -> bool:
    """Whether memory can and may be shared here."""
    return sys.platform == "linux" and os.environ.get(SWITCH, "1") != "0"
