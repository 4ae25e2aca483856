"""Files that are either whole or not there."""

from __future__ import annotations

import os
from pathlib import Path

from weft.errors import WeftError


def write_text(path: str | Path, text: str) -> None:
    """Write a file beside its place, then rename it, so that nobody ever sees half of it."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(beside, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as problem:
        raise WeftError(f"{path} can't be written: {problem.strerror}; name a file in a folder that exists") from None
    finally:
        beside.unlink(missing_ok=True)
