"""Memory that two ranks of one host share: a message is copied once, and no other thread is woken.

The sender has pieces of anonymous memory (memfd), each for one message at a time; the header of a message names its
piece. The receiver maps a piece when it first sees it, and reads messages in place. When nothing references a piece any
more, the receiver marks it free: in the first byte of the piece, which the sender checks before it reuses the piece.
Nobody waits: if no piece is free and large enough, one is added or grown. No piece has a name, so none is left behind.
A piece ends with its sender, so a sender that ends waits until its pieces are mapped, or nobody is there to map them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import os
import secrets
import socket
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.runtime.comm.buffers import ALIGNMENT, aligned, is_held

SHARED_MEMORY_SWITCH = "WEFT_SHARED_MEMORY"  # environment variable; "0": this rank shares no memory
FREE, SENT, HELD = 0, 1, 2  # the first byte of a piece
TOKEN_BYTES = 16

Bytes: TypeAlias = "npt.NDArray[np.uint8]"


class Piece:
    """A piece of the sender's memory; its first `ALIGNMENT` bytes hold its state."""

    def __init__(self, size: int) -> None:
        self.number = os.memfd_create("weft", os.MFD_CLOEXEC)  # also its file descriptor
        weakref.finalize(self, os.close, self.number)
        self.grow(size)

    def grow(self, size: int) -> None:
        """Make room for this many bytes; OSError if there is not enough memory, and then the piece is as it was."""
        larger = aligned(size)
        os.posix_fallocate(self.number, 0, ALIGNMENT + larger)
        whole = _map(self.number, ALIGNMENT + larger)
        self._state = whole[:1].data
        self.flat = torch.from_numpy(whole[ALIGNMENT:])
        self.size = larger

    @property
    def state(self) -> int:
        return self._state[0]

    @state.setter
    def state(self, state: int) -> None:
        self._state[0] = state


class SharedSender:
    """The sender's pieces of memory for one link."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def acquire(self, size: int) -> Piece | None:
        """A free piece for a message of this size; None if there is no memory for it."""
        free = [piece for piece in self._pieces if piece.state == FREE]
        large = [piece for piece in free if piece.size >= size]
        try:
            if large:
                chosen = min(large, key=_size)
            elif free:
                chosen = free[0]
                chosen.grow(size)
            else:
                chosen = Piece(size)
                self._pieces.append(chosen)
        except OSError:
            return None
        chosen.state = SENT
        return chosen

    @property
    def nbytes(self) -> int:
        """Of pieces that no micro-batch of the receiver holds."""
        return sum(piece.size for piece in self._pieces if piece.state != HELD)

    @property
    def is_taken(self) -> bool:
        """Whether the receiver has mapped all that was sent."""
        return all(piece.state != SENT for piece in self._pieces)


class SharedReceiver:
    """The receiver's view of a sender's memory."""

    def __init__(self, sender_pid: int) -> None:
        self._sender_pid = sender_pid
        self._pieces: dict[int, list[Bytes]] = {}  # by number: the state, and the memory for messages

    def read(self, number: int, size: int) -> Tensor:
        """The memory of a piece; once all views of it are gone, `release` frees it."""
        piece = self._pieces.get(number)
        if piece is None or piece[1].nbytes < size:
            descriptor = os.open(f"/proc/{self._sender_pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            try:
                whole = _map(descriptor, ALIGNMENT + size)
            finally:
                os.close(descriptor)
            piece = self._pieces[number] = [whole[:ALIGNMENT], whole[ALIGNMENT:]]
        piece[0][0] = HELD
        return torch.from_numpy(piece[1])

    def release(self) -> None:
        """Free all pieces that nothing here references any more."""
        for piece in self._pieces.values():
            if piece[0][0] == HELD and not is_held(piece, 1):
                piece[0][0] = FREE


_size = attrgetter("size")


def _map(descriptor: int, size: int) -> Bytes:
    return np.frombuffer(mmap.mmap(descriptor, size), np.uint8)


# Which ranks can share memory


@dataclass(frozen=True, kw_only=True)
class MemoryProbe:
    """A token in a rank's memory, for other ranks to read: whether they can share memory with it, and it is there."""

    host: str
    pid: int
    number: int = -1  # of its file descriptor; -1: this rank shares no memory
    token: str = ""

    def is_readable(self) -> bool:
        """Whether this process can share memory with that one: same host, and permission to open its memory."""
        if self.number < 0 or self.host != host() or not is_enabled():
            return False
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/fd/{self.number}").read_bytes() == bytes.fromhex(self.token)
        return False


@contextlib.contextmanager
def memory_probe() -> Iterator[MemoryProbe]:
    """A probe of this process, readable inside the `with` block."""
    probe = MemoryProbe(host=host(), pid=os.getpid())
    with contextlib.ExitStack() as stack:
        if is_enabled():
            with contextlib.suppress(OSError, AttributeError):  # a sandbox may refuse memfd, some Pythons lack it
                descriptor = os.memfd_create("weft", os.MFD_CLOEXEC)
                file = stack.enter_context(open(descriptor, "wb", buffering=0))
                token = secrets.token_bytes(TOKEN_BYTES)
                file.write(token)
                probe = dataclasses.replace(probe, number=descriptor, token=token.hex())
        yield probe


def host() -> str:
    """The same for all ranks of one host: its name and its network namespace, which differs between containers."""
    network = ""
    with contextlib.suppress(OSError):
        network = os.readlink("/proc/self/ns/net")
    return f"{socket.gethostname()} {network}".strip()


def is_enabled() -> bool:
    return sys.platform == "linux" and os.environ.get(SHARED_MEMORY_SWITCH, "1") != "0"
