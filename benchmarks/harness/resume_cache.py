"""Parts of a long measurement, stored on disk one by one, so that an interrupted run can resume."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from weft.errors import WeftError
from weft.output import write_text


class ResumeCache:
    """Makes each part once: a part that is stored is read instead. Without a path nothing is stored."""

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
                f"{path} belongs to another form of this benchmark ({first}, not {self._head}); "
                "start over with --overwrite"
            )
        for number, line in enumerate(lines):
            try:
                self._parts |= {(part := json.loads(line))["part"]: part["value"]}
            except json.JSONDecodeError:
                if number + 1 < len(lines):
                    raise WeftError(f"{path}: line {number + 2} is damaged; start over with --overwrite") from None

    def __call__(self, part: str, make: Callable[[], Any]) -> Any:
        """The value of a part, as plain JSON."""
        if part not in self._parts:
            self.log(part)
            self.add(part, make())
        return self._parts[part]

    def recorded(self) -> dict[str, Any]:
        """The results of earlier commands, for a benchmark that adds to them; {} if there are none."""
        path = None if self._path is None else self._path.with_name("results.json")
        return {} if path is None or not path.is_file() else json.loads(path.read_text(encoding="utf-8"))

    def __contains__(self, part: str) -> bool:
        return part in self._parts

    def values(self) -> list[Any]:
        """Those of all parts that are stored."""
        return list(self._parts.values())

    def add(self, part: str, value: Any) -> None:
        """Store a part that was made elsewhere."""
        line = json.dumps({"part": part, "value": value}, allow_nan=False)
        self._parts[part] = json.loads(line)["value"]
        if self._path is not None:
            self._begin(self._path)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
                file.flush()
                os.fsync(file.fileno())

    def _begin(self, path: Path) -> None:
        """Write the parts from before this run, without the incomplete line that a kill may have left."""
        if not self._begun:
            lines = [json.dumps({"part": name, "value": value}) for name, value in list(self._parts.items())[:-1]]
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text(path, "\n".join([self._head, *lines]) + "\n")
            self._begun = True

    def log(self, text: str) -> None:
        """Print progress."""
        print(text, file=sys.stderr, flush=True)
