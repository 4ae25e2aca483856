"""Scripts and commands as users run them, each in a folder; nothing of them is left after a test.

Every interpreter that they start inherits a mark in its environment, by which it is found.
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

from tests.helpers import devices
from tests.helpers.rank_functions import DEADLINE, eventually

import weft

SOON = 10.0  # seconds; weft takes 2, a busy machine may take longer
PATIENCE = 900.0  # seconds, for half a minute of computation on an idle machine
MARK = "WEFT_TEST_MARK"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = Path(weft.__file__).parents[1]  # which may not be the installed ones
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def paths(*folders: Path) -> str:
    """A value of PYTHONPATH."""
    return os.pathsep.join([*map(str, folders), *devices.python_path()])


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str

    @property
    def said(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]


class Starter:
    """The process that scripts and commands are forked from; see `starter.py`."""

    def __init__(self) -> None:
        command = [sys.executable, str(HERE / "starter.py")]
        environment = os.environ | {"PYTHONPATH": paths(SOURCES)}
        self.process = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, text=True)

    def start(self, kind: str, **order: Any) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"kind": kind, **order}), file=self.process.stdin, flush=True)

    def end(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=DEADLINE)


class Script:
    """A started process, much like a `subprocess.Popen`; its output is in the files `out` and `err` of its notes."""

    def __init__(self, notes: Path) -> None:
        self._notes = notes
        self.pid = int(eventually(lambda: _read(notes / "started")))

    @property
    def out(self) -> str:
        return _read(self._notes / "out")

    @property
    def err(self) -> str:
        return _read(self._notes / "err")

    def poll(self) -> int | None:
        code = _read(self._notes / "ended")
        return int(code) if code else None

    def wait(self, seconds: float = DEADLINE) -> int:
        eventually(lambda: self.poll() is not None, seconds)
        return int(_read(self._notes / "ended"))

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


class Marked:
    """Processes that are started in a folder, and all that these start."""

    def __init__(self, folder: Path, starter: Starter) -> None:
        self.folder = folder
        self.starter = starter
        self.mark = uuid.uuid4().hex
        clean = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH")}
        self.environment = {**clean, MARK: self.mark, "PYTHONPATH": paths(SOURCES)}

    def alive(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"{MARK}={self.mark}".encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended, or belongs to another user
                continue
        return found

    def end(self) -> None:
        def all_gone() -> bool:
            for pid in (left := self.alive()):
                os.kill(pid, signal.SIGKILL)
            return not left

        eventually(all_gone)


class Scripts(Marked):
    """Runs one script in a folder. The ranks that it launches are new interpreters, or forked, which is faster."""

    def __init__(self, folder: Path, starter: Starter, *, forked: bool = False) -> None:
        super().__init__(folder, starter)
        self.forked = forked
        self.script: Script | None = None
        (folder / "tmp").mkdir()
        self.environment["TMPDIR"] = str(folder / "tmp")

    def start(
        self,
        text: str,
        *arguments: str,
        under: tuple[str, ...] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Script:
        """As `python script.py arguments`, or `python -m …` with the script under a module."""
        path = self.folder / "script.py"
        path.write_text(text)
        runtime = paths(HERE, SOURCES)  # scripts import `rank_functions` from there
        return self._start(
            "script",
            command=[*under, str(path), *arguments],
            module=under[0] if under else "",
            forked=self.forked and not under,
            environment={**self.environment, "PYTHONPATH": runtime, **(environment or {})},
        )

    def launch(self, fn: Callable[..., Any], *args: Any, ranks: int) -> list[Any]:
        """`weft.launch`, on ranks that are forked from a process with torch imported.

        For tests of what ranks do; how they start and end is tested with new interpreters (test_launch.py).
        """
        script = self.start_launch(fn, *args, ranks=ranks)
        script.wait(PATIENCE)
        done = self.finish(script)
        assert done.code == 0, done.err
        results: list[Any] = pickle.loads((self.folder / "result").read_bytes())
        return results

    def start_launch(self, fn: Callable[..., Any], *args: Any, ranks: int) -> Script:
        (self.folder / "call").write_bytes(pickle.dumps((fn, args, ranks)))
        environment = {**self.environment, "PYTHONPATH": paths(ROOT, SOURCES)}
        return self._start("launch", root=str(ROOT), environment=environment)

    def _start(self, kind: str, **order: Any) -> Script:
        assert self.script is None, "one script a folder"
        self.starter.start(kind, folder=str(self.folder), notes=str(self.folder), **order)
        self.script = Script(self.folder)
        return self.script

    def finish(self, script: Script) -> Done:
        """Wait for its end and for that of all it has started; the temporary folder must be empty again."""
        code = script.wait()
        eventually(lambda: not self.alive(), SOON)
        assert not list((self.folder / "tmp").iterdir())
        return self.done(code)

    def done(self, code: int) -> Done:
        return Done(code, (self.folder / "out").read_text(), (self.folder / "err").read_text())

    def run(self, text: str, *, environment: Mapping[str, str] | None = None) -> Done:
        return self.finish(self.start(text, environment=environment))

    def end(self) -> None:
        if self.script is not None and self.script.poll() is None:
            self.script.send_signal(signal.SIGKILL)
            self.script.wait()
        super().end()


class Commands(Marked):
    """Runs commands of weft in a folder, one after the other or at once; their notes are in folders below it."""

    def __init__(self, folder: Path, starter: Starter) -> None:
        super().__init__(folder, starter)
        self.environment["COLUMNS"] = "200"
        self._scripts: list[Script] = []

    def start(self, *arguments: str, output: Path | None = None) -> Script:
        """`weft arguments`, with forked ranks; a file for stdout and stderr may be given, such as a pipe."""
        return self._start("weft", arguments=list(arguments), output=output and [str(output)] * 2)

    def start_torchrun(self, *arguments: str) -> Script:
        """`torchrun arguments`; its ranks are new interpreters."""
        module = "torch.distributed.run"
        return self._start("script", forked=False, module=module, command=[module, *arguments])

    def _start(self, kind: str, **order: Any) -> Script:
        notes = self.folder / f".command-{len(self._scripts)}"
        notes.mkdir()
        self.starter.start(kind, folder=str(self.folder), notes=str(notes), environment=self.environment, **order)
        self._scripts.append(Script(notes))
        return self._scripts[-1]

    def finish(self, script: Script, seconds: float = DEADLINE) -> Done:
        """Wait for its end."""
        code = script.wait(seconds)
        return Done(code, script.out, script.err)

    def run(self, *arguments: str, seconds: float = DEADLINE) -> Done:
        return self.finish(self.start(*arguments), seconds)

    def end(self) -> None:
        for script in self._scripts:
            if script.poll() is None and Path(f"/proc/{script.pid}").exists():  # a test may kill what notes the end
                os.killpg(script.pid, signal.SIGKILL)  # forked ranks too, which carry no mark
                script.wait()
        super().end()
