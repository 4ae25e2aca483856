"""Files that are either whole or not there."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from weft.errors import WeftError


def write_text(path: str | Path, text: str) -> None:
    """Write a file beside its place, then rename it, so that nobody ever sees half of it."""
    path = Path(path)
    beside: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        beside = Path(name)
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.chmod(0o666 & ~_umask())
        os.replace(beside, path)
    except OSError as problem:
        raise WeftError(f"{path} can't be written: {problem.strerror}; name a file in a folder that exists") from None
    finally:
        if beside is not None:
            beside.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
