"""Parts of a long measurement, kept on disk one by one, so that an interrupted one goes on where it was."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.output import write_text


class Keep:
    """Makes parts, each once: one that was kept before is read instead. Without a file nothing is kept."""

    def __init__(self, path: Path | None = None, *, form: dict[str, Any] | None = None, resume: bool = False) -> None:
        self._path = path
        self._parts: dict[str, Any] = {}
        self._head = json.dumps({"form": form}, sort_keys=True)
        self._begun = False
        if path is not None and resume:
            self._read(path)

    def _read(self, path: Path) -> None:
        first, *lines = path.read_text(encoding="utf-8").splitlines() or [""]
        if first != self._head:
            raise WeftError(
                f"{path} was kept by another form of this benchmark ({first}, not {self._head}); "
                "begin anew with --overwrite"
            )
        for number, line in enumerate(lines):
            try:
                self._parts |= {(part := json.loads(line))["part"]: part["value"]}
            except json.JSONDecodeError:
                if number + 1 < len(lines):
                    raise WeftError(f"{path}: line {number + 2} is damaged; begin anew with --overwrite") from None

    def __call__(self, part: str, make: Callable[[], Any]) -> Any:
        """The value of a part, as plain JSON."""
        if part not in self._parts:
            self.say(part)
            self.add(part, make())
        return self._parts[part]

    @property
    def folder(self) -> Path | None:
        """Where the results will be, beside those of other benchmarks; None where nothing is written."""
        return None if self._path is None else self._path.parent

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def add(self, part: str, value: Any) -> None:
        """Keep a part that was made elsewhere."""
        line = json.dumps({"part": part, "value": value}, allow_nan=False)
        self._parts[part] = json.loads(line)["value"]
        if self._path is not None:
            self._begin(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _begin(self, path: Path) -> None:
        """The file as of before this run, without the half of a line that a kill may have left."""
        if not self._begun:
            lines = [json.dumps({"part": name, "value": value}) for name, value in list(self._parts.items())[:-1]]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "\n".join([self._head, *lines]) + "\n")
            self._begun = True

    def say(self, text: str) -> None:
        """Tell how far it is."""
        print(text, file=sys.stderr, flush=True)
