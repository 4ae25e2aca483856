"""Starts scripts by fork, from a process that has imported torch already: importing it takes two seconds.

A script is as it would be in an interpreter of its own: the leader of a session, with its own folder, environment,
arguments, path and __main__. The ranks that it launches *are* new interpreters. Orders come as lines of JSON.

An order may also be a call of `weft.launch`, for tests in which it does not matter how ranks begin: then these are
forked too, each with the life of a rank before it (`weft.runtime.rank.serve`). Nothing here has computed by then, so no
thread of torch's is lost in a fork.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import weft.runtime.launch

PATH = sys.path[1:]  # without this folder


def main() -> None:
    for line in sys.stdin:
        order = json.loads(line)
        if order["calls"]:
            load_what_ranks_use()
        if os.fork() == 0:
            watch(order)
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
    if order["calls"]:
        call(order)
        return
    script, *_ = sys.argv = order["command"]
    sys.path[:] = [os.path.dirname(script), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *PATH]
    if order["module"]:
        runpy.run_module(order["module"], run_name="__main__", alter_sys=True)
        return
    fresh = sys.modules["__main__"] = sys.modules["__mp_main__"] = types.ModuleType("__main__")  # see multiprocessing
    fresh.__file__ = script
    exec(compile(Path(script).read_text(), script, "exec"), fresh.__dict__)


# Calls of weft.launch


@cache
def load_what_ranks_use() -> None:
    """The first optimizer loads as much as torch itself did."""
    import torch

    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    _ = weft.Pipeline


def call(order: Mapping[str, Any]) -> None:
    """Launch the function that is pickled in the folder, and leave its results there."""
    sys.path[:] = [order["root"], *PATH]
    sys.modules["__main__"] = types.ModuleType("__main__")
    launching: Any = sys.modules["weft.runtime.launch"]  # by its name stands the function
    launching.subprocess = types.SimpleNamespace(**vars(subprocess) | {"Popen": Forked})
    fn, args, ranks = pickle.loads(Path("call").read_bytes())
    Path("result").write_bytes(pickle.dumps(launching.launch(fn, *args, ranks=ranks)))


class Forked:
    """A rank, as far as `launch` asks `subprocess.Popen` for it."""

    def __init__(self, command: list[str], *, env: Mapping[str, str], stdin: int, pass_fds: list[int]) -> None:
        self.returncode: int | None = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads that hand over what ranks are told
            self.pid = os.fork()
        if self.pid == 0:
            be_born(command[-1], env, pass_fds)

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


def be_born(birth: str, environment: Mapping[str, str], kept: Iterable[int]) -> NoReturn:
    """The rest of this process is a rank's; of what its parent has open, it has what it was given."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor > 2 and descriptor not in kept:
                with contextlib.suppress(OSError):  # the one that this list was read from
                    os.close(descriptor)
        exec(birth, {})
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
