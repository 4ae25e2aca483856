"""The README stays short and shows what it claims to show; its commands, snippets and links: see test_docs.py."""

from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")


def test_it_is_short() -> None:
    assert len(README.splitlines()) <= 120


def test_the_two_commands_set_everything_up() -> None:
    assert [line.split()[1] for line in README.splitlines() if line.startswith("make ")] == ["train", "test"]


def test_the_picture_names_the_command_that_draws_it() -> None:
    """tests/test_cli.py runs the command and compares."""
    assert "(docs/wpipe.svg)" in README
    assert "`weft draw wpipe --stages 4 --microbatches 4 --until 18.5 -o wpipe.svg`" in README
