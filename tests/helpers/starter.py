"""Starts processes by fork, from a process that has imported torch already: importing it takes two seconds.

A forked process looks like one with its own interpreter: it leads a session and has its own working directory,
environment, arguments, path and __main__. Orders arrive as lines of JSON; their `kind` is one of

script   run a script, or a module such as torchrun with a script; the ranks that it launches are new interpreters,
         or forked if the order says so
weft     run a command line of weft; ranks are forked
launch   call `weft.launch`; ranks are forked

A forked rank still runs all that a rank runs (`process.child.serve`). Use "weft" and "launch" where it does not
matter how ranks start. Nothing has been computed here before a fork, so no thread of torch is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import weft.runtime.process.parent

PATH = sys.path[1:]  # without this folder
COMMANDS = (
    "weft.train.command",
    "weft.train.compare",
    "weft.train.export",
    "weft.train.train_job",
    "weft.train.data.readers.synthetic",
    "numpy.ma",  # of the summary
)


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if order["kind"] != "script" or order["forked"]:
            import_for_ranks()
        if order["kind"] == "weft":
            import_for_commands()
        gc.freeze()  # else a forked process spends two seconds of its end on what was imported here
        if os.fork() == 0:
            watch(order)
            return
    while True:  # wait, so that the CPU time of children is counted
        try:
            os.wait()
        except ChildProcessError:
            os._exit(0)


@cache
def import_for_ranks() -> None:
    """The first optimizer imports as much as torch itself."""
    import torch

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    _ = weft.Pipeline


@cache
def import_for_commands() -> None:
    for module in ("weft.cli", *COMMANDS):
        importlib.import_module(module)


def watch(order: dict[str, Any]) -> None:
    """Start a process and note its id and its exit code."""
    notes = Path(order["notes"])
    if (process := os.fork()) == 0:
        become(order)
        return
    note(notes / "started", process)
    _, status = os.waitpid(process, 0)
    note(notes / "ended", os.waitstatus_to_exitcode(status))
    os._exit(0)


def note(path: Path, value: int) -> None:
    path.with_suffix(".part").write_text(str(value))
    os.replace(path.with_suffix(".part"), path)


def become(order: dict[str, Any]) -> None:
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes start with SIGINT ignored
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    tempfile.tempdir = None  # cached
    created = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY
    outputs = order.get("output") or [os.path.join(order["notes"], name) for name in ("out", "err")]
    files = [(os.devnull, os.O_RDONLY), *((name, created) for name in outputs)]
    for descriptor, (name, flags) in enumerate(files):
        opened = os.open(name, flags)
        os.dup2(opened, descriptor)
        os.close(opened)
    {"script": run_script, "weft": run_weft, "launch": run_launch}[order["kind"]](order)


def run_script(order: Mapping[str, Any]) -> None:
    script, *_ = sys.argv = order["command"]
    sys.path[:] = [os.path.dirname(script), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    if order["module"]:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        return
    if order["forked"]:
        fork_ranks()
    fresh = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")  # see multiprocessing
    fresh.__file__ = script
    exec(compile(Path(script).read_text(), script, "exec"), fresh.__dict__)


def run_weft(order: Mapping[str, Any]) -> None:
    """As `python -m weft arguments` does."""
    from weft.cli import main

    sys.argv = ["weft", *order["arguments"]]
    sys.path[:] = [order["folder"], *PATH]
    sys.modules["__main__"] = types.ModuleType("__main__")
    fork_ranks()
    end(main(order["arguments"]))


def end(code: int) -> NoReturn:
    """End this process as an interpreter does, except that nothing of what was imported here is destroyed.

    That would copy all of its memory, which takes a quarter of a second.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):  # then the interpreter reports it
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def run_launch(order: Mapping[str, Any]) -> None:
    """Call `weft.launch` with the pickled function, and leave the pickled results."""
    sys.path[:] = [order["root"], *PATH]
    sys.modules["__main__"] = types.ModuleType("__main__")
    fork_ranks()
    fn, args, ranks = pickle.loads(Path("call").read_bytes())
    Path("result").write_bytes(pickle.dumps(weft.launch(fn, *args, ranks=ranks)))
    os._exit(0)


def fork_ranks() -> None:
    launching: Any = sys.modules["weft.runtime.process.parent"]
    launching.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": Forked})


class Forked:
    """A rank, with what `launch` uses of `subprocess.Popen`."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdin: int, pass_fds: list[int]) -> None:
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads, which only write to other ranks
            self.pid = os.fork()
        if self.pid == 0:
            run_rank(command[-1], env, pass_fds)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.005)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


def run_rank(bootstrap: str, environment: Mapping[str, str], kept: Iterable[int]) -> NoReturn:
    """Run a rank in this process, which keeps only the given descriptors of its parent."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):  # the descriptor that listed this folder
                    os.close(descriptor)
        exec(bootstrap, {})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
