"""One owner of a run's folder at a time.

The lock is an flock on the file `lock` in the folder, whose text says who holds it. The kernel frees it when its holder
ends, however that happens. On NFS, Linux turns it into a lock of the server, which holds between machines. A file
system without locks is reported, and the run goes on without one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from weft.errors import WeftError
from weft.output import warn

LOCK = "lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[tuple[int, int]]:
    """Own an existing folder inside the block, or raise a WeftError that names its owner; what identifies the lock."""
    file = folder / LOCK
    handle = _open(file)
    _held.add(handle)
    try:
        _write_holder(handle)
        found = os.fstat(handle)
        yield found.st_dev, found.st_ino
    finally:
        _held.remove(handle)
        os.close(handle)


_held: set[int] = set()  # by this process


def _close_held() -> None:
    """In a forked process, which would hold the lock beyond the end of its parent."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_held)


def _open(file: Path) -> int:
    """A descriptor of the lock file that holds the lock."""
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as problem:
            raise WeftError(
                f"{file} can't be written: {problem.strerror}; a run needs a folder that you may write"
            ) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as problem:
            if problem.errno in NO_LOCKS:
                warn(
                    f"{file.parent} is on a file system without locks ({problem.strerror}): nothing keeps a second run "
                    "out of it"
                )
                return handle
            holder = _holder(handle)
            os.close(handle)
            if problem.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise WeftError(f"{file} can't be locked: {problem.strerror}; check the file system") from None
            raise WeftError(
                f"{file.parent} belongs to another run at the moment ({holder}); wait for its end, stop it, or choose "
                "another name (--set name=...)"
            ) from None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), os.stat(file)):
                return handle
        os.close(handle)  # its holder has deleted the folder meanwhile: lock the new file
        file.parent.mkdir(parents=True, exist_ok=True)


def _write_holder(handle: int) -> None:
    since = datetime.now(UTC).isoformat(timespec="seconds")
    text = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": since}) + "\n"
    with contextlib.suppress(OSError):  # a full disk: the lock holds without a name
        os.ftruncate(handle, 0)
        os.pwrite(handle, text.encode(), 0)


def _holder(handle: int) -> str:
    try:
        held = json.loads(os.pread(handle, 4096, 0))
        return f"pid {held['pid']} on {held['host']}, since {held['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "its holder has not written its name"
