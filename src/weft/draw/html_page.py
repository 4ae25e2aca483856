"""The frame of every HTML page: one self-contained file that loads nothing."""

from __future__ import annotations

from html import escape
from importlib.resources import files

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(*, title: str, style: str, script: str, main: str, data: str = "") -> str:
    """A complete page. `style` and `script` are files of this package; `data` is inserted before the script."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{_asset(style)}</style>
</head>
<body>
<main>
{main}
</main>
{data}<script>
{_asset(script)}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("weft.draw").joinpath(name).read_text("utf-8")
