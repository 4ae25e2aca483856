"""What Linux says of this process."""

from __future__ import annotations

from pathlib import Path

from weft.errors import WeftError


def status(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise WeftError(f"/proc/self/status has no {field}; this benchmark needs Linux")
