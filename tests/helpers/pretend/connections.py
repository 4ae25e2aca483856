"""Sockets between the ranks of a communicator of the NCCL stand-in. Closing them ends every wait at once."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import socket
import struct
import threading
from typing import Any, NoReturn


class Ended(Exception):
    """The communicator was aborted or shut down."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Header:
    """What a rank is about to do."""

    rank: int
    op: str
    size: int  # bytes
    what: object  # all ranks of a collective have the same
    text: str

    def check(self, other: Header) -> None:
        """The two belong together, or an error that names both."""
        if "send" in (self.op, other.op) or "recv" in (self.op, other.op):
            fits = {self.op, other.op} == {"send", "recv"} and self.size == other.size
        else:
            fits = self.what == other.what
        if not fits:
            raise ValueError(
                f"the ranks of a communicator do different things: rank {self.rank}: {self.text}, {self.size} bytes; "
                f"rank {other.rank}: {other.text}, {other.size} bytes"
            )


class Connections:
    """One for each pair of ranks and lane, made when it is first used. The lower rank connects to the higher one."""

    def __init__(self, store: Any, rank: int) -> None:
        self._store = store
        self._rank = rank
        self._ended = threading.Event()
        self._changed = threading.Condition()
        self._open: dict[tuple[int, str], Connection] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        store.set(f"address {rank}", str(self._listener.getsockname()[1]))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                accepted, _ = self._listener.accept()
                connection = Connection(accepted, self)
                peer, lane = connection.receive()
                self._add(peer, lane, connection)

    def _add(self, peer: int, lane: str, connection: Connection) -> None:
        with self._changed:
            self._open[peer, lane] = connection
            self._changed.notify_all()
        if self._ended.is_set():
            connection.close()

    def to(self, peer: int, lane: str) -> Connection:
        """Waits until the peer is there."""
        key = (peer, lane)
        if key not in self._open and self._rank < peer:
            while not self._store.check([f"address {peer}"]):
                if self._ended.wait(0.002):
                    raise Ended
            port = int(self._store.get(f"address {peer}"))
            connection = Connection(socket.create_connection(("127.0.0.1", port)), self)
            connection.send((self._rank, lane))
            self._add(peer, lane, connection)
        with self._changed:
            self._changed.wait_for(lambda: key in self._open or self._ended.is_set())
        self.check()
        return self._open[key]

    def check(self) -> None:
        if self._ended.is_set():
            raise Ended

    def wait_for_end(self) -> NoReturn:
        """A peer has died, or never comes: NCCL would wait for it."""
        self._ended.wait()
        raise Ended

    def close(self) -> None:
        self._ended.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._changed:
            for connection in self._open.values():
                connection.close()
            self._changed.notify_all()


class Connection:
    """Objects and bytes in order. When the peer closes it, a call waits for the end of the communicator."""

    def __init__(self, connected: socket.socket, owner: Connections) -> None:
        self._socket = connected
        self._owner = owner
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any) -> None:
        data = pickle.dumps(message)
        self.send_bytes(memoryview(struct.pack("<q", len(data)) + data))

    def receive(self) -> Any:
        size = bytearray(8)
        self.receive_bytes(memoryview(size))
        data = bytearray(struct.unpack("<q", size)[0])
        self.receive_bytes(memoryview(data))
        return pickle.loads(data)

    def send_bytes(self, data: memoryview) -> None:
        try:
            self._socket.sendall(data)
        except OSError:
            self._owner.wait_for_end()

    def receive_bytes(self, target: memoryview) -> None:
        while target:
            try:
                count = self._socket.recv_into(target)
            except OSError:
                count = 0
            if count == 0:
                self._owner.wait_for_end()
            target = target[count:]

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
