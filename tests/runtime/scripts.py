"""Scripts as users write them, run in a folder, and nothing of them is left.

Every process that a script starts carries a mark in its environment, by which the last of them is found.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.runtime.jobs import DEADLINE, eventually

SOON = 10.0  # seconds; weft means 2, a busy machine may take longer
PATIENCE = 900.0  # seconds, for what computes for half a minute where nothing else does
MARK = "WEFT_TEST_MARK"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def said(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


class Starter:
    """The process that scripts are forked from."""

    def __init__(self) -> None:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [sys.executable, str(HERE / "starter.py")]
        self.process = subprocess.Popen(command, env=clean, stdin=subprocess.PIPE, text=True)

    def start(self, *, calls: bool = False, **order: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"calls": calls, **order}), file=self.process.stdin, flush=True)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE)


class Script:
    """One that was started, as `subprocess.Popen` would have it."""

    def __init__(self, folder: Path) -> None:
        self._ended = folder / "ended"
        self.pid = int(eventually(lambda: _read(folder / "started")))

    def poll(self) -> int | None:
        code = _read(self._ended)
        return int(code) if code else None

    def wait(self, seconds: float = DEADLINE) -> int:
        eventually(lambda: self.poll() is not None, seconds)
        return int(_read(self._ended))

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Scripts:
    """Runs a script in a folder, and ends whatever it has left."""

    def __init__(self, folder: Path, starter: Starter) -> None:
        self.folder = folder
        self.starter = starter
        self.mark = uuid.uuid4().hex
        self.script: Script | None = None
        (folder / "tmp").mkdir()
        clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
        self.environment = {**clean, MARK: self.mark, "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(HERE)}

    def start(
        self,
        text: str,
        *arguments: str,
        under: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Script:
        """As `python script.py arguments`, or `python -m …` with the script under a module."""
        assert self.script is None, "one script a folder"
        path = self.folder / "script.py"
        path.write_text(text)
        self.starter.start(
            folder=str(self.folder),
            command=[*under, str(path), *arguments],
            module=under[0] if under else "",
            environment={**self.environment, **(environment or {})},
        )
        self.script = Script(self.folder)
        return self.script

    def launch(self, fn: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """`weft.launch`, on ranks that are forked from a process which has torch loaded.

        For tests of what ranks do; how they begin and end is tested with new interpreters (test_launch.py).
        """
        assert self.script is None, "one script a folder"
        (self.folder / "call").write_bytes(pickle.dumps((fn, args, ranks)))
        environment = {**self.environment, "PYTHONPATH": str(ROOT)}
        self.starter.start(calls=True, folder=str(self.folder), root=str(ROOT), environment=environment)
        self.script = Script(self.folder)
        self.script.wait(PATIENCE)
        done = self.finish(self.script)
        assert done.code == 0, done.err
        results: list[Any] = pickle.loads((self.folder / "result").read_bytes())
        return results

    def finish(self, script: Script) -> Done:
        """Wait for its end and for that of all it has started; nothing may be left in the temporary folder either."""
        code = script.wait()
        eventually(lambda: not self.alive(), SOON)
        assert not list((self.folder / "tmp").iterdir())
        return self.done(code)

    def done(self, code: int) -> Done:
        return Done(code, (self.folder / "out").read_text(), (self.folder / "err").read_text())

    def run(self, text: str, *, environment: Mapping[str, str] | None = None) -> Done:
        return self.finish(self.start(text, environment=environment))

    def alive(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended, or is not ours
                continue
        return found

    def end(self) -> None:
        def all_gone() -> bool:
            for pid in (left := self.alive()):
                os.kill(pid, signal.SIGKILL)
            return not left

        if self.script is not None and self.script.poll() is None:
            self.script.send_signal(signal.SIGKILL)
            self.script.wait()
        eventually(all_gone)
