"""What every page of weft's is around its content: one file that needs no other, and asks for none."""

from __future__ import annotations

from html import escape
from importlib.resources import files

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(*, title: str, style: str, script: str, main: str, data: str = "") -> str:
    """A whole page; `style` and `script` are files of this package, `data` what stands before the script."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{_part(style)}</style>
</head>
<body>
<main>
{main}
</main>
{data}<script>
{_part(script)}</script>
</body>
</html>
"""


def _part(name: str) -> str:
    return files("weft.draw").joinpath(name).read_text("utf-8")
