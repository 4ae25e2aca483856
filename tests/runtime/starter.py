"""Starts scripts by fork, from a process that has imported torch already: importing it takes two seconds.

A script is as it would be in an interpreter of its own: the leader of a session, with its own folder, environment,
arguments, path and __main__. The ranks that it launches *are* new interpreters. Orders come as lines of JSON.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import weft.runtime.launch  # noqa: F401

PATH = sys.path[1:]  # without this folder


def main() -> None:
    for line in sys.stdin:
        if os.fork() == 0:
            watch(json.loads(line))
            return
    while True:  # so that whoever counts time counts that of scripts too
        try:
            os.wait()
        except ChildProcessError:
            return


def watch(order: dict[str, Any]) -> None:
    """Start a script, and note its number and how it ends."""
    folder = Path(order["folder"])
    if (script := os.fork()) == 0:
        become(order)
        return
    note(folder / "started", script)
    _, status = os.waitpid(script, 0)
    note(folder / "ended", os.waitstatus_to_exitcode(status))
    os._exit(0)


def note(path: Path, value: int) -> None:
    path.with_suffix(".part").write_text(str(value))
    os.replace(path.with_suffix(".part"), path)


def become(order: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a run in the background is born without
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # to be asked for again
    for descriptor, (name, flags) in enumerate(
        [(os.devnull, os.O_RDONLY), *((name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("out", "err"))]
    ):
        opened = os.open(name, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    script, *_ = sys.argv = order["command"]
    sys.path[:] = [os.path.dirname(script), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    if order["module"]:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        return
    fresh = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")  # see multiprocessing
    fresh.__file__ = script
    exec(compile(Path(script).read_text(), script, "exec"), fresh.__dict__)


if __name__ == "__main__":
    main()
