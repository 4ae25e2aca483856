"""Consent to code that a foreign run names.

The `job.toml` of a run may name functions (`file.py:function`), which commands that resume or export the run import. So
the job of another user is not followed without being asked.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping
from pathlib import Path

from weft.errors import WeftError


def check_trust(folder: Path, *files: str, code: Mapping[str, str]) -> None:
    """Refuse a folder of another user, or a file in it, that names code; call it before anything is imported."""
    if not code:
        return
    for path in (folder, *(folder / file for file in files)):
        if (owner := os.stat(path).st_uid) != os.geteuid():
            named = ", ".join(f"{key}={name}" for key, name in code.items())
            raise WeftError(
                f"{path} belongs to {_name(owner)}, not to you ({_name(os.geteuid())}), and names code that would be "
                f"imported: {named}; read that code, and repeat the command with --trust if you trust it"
            )


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return f"user {user}"
