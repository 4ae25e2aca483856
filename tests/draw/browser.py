"""A headless browser for tests of the pages."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --hide-scrollbars --enable-logging=stderr --dump-dom"
)


def dump_dom(page: Path, *options: str) -> str:
    """The document after its scripts have run. Fails if the page writes to the console."""
    command = [str(BROWSER), *OPTIONS.split(), *options, f"--user-data-dir={page.parent / 'user'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in done.stderr
    return done.stdout
