"""`weft.launch`: check the call, then start local ranks or join the job that this process is part of."""

from __future__ import annotations

import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from weft.environment import is_rank
from weft.errors import WeftError, one_line
from weft.runtime.process.child import this_rank
from weft.runtime.process.parent import Limits, run_ranks
from weft.runtime.process.torchrun import has_process_group, join
from weft.schedule import check_sizes

T = TypeVar("T")


def launch(
    fn: Callable[..., T],
    *args: Any,
    ranks: int,
    threads: int | None = None,
    backend: str | None = None,
    timeout: float = 300.0,
    deadline: float = 60.0,
    stop: threading.Event | None = None,
) -> list[T]:
    """Run `fn(*args)` on every rank, inside a default process group, with RANK, WORLD_SIZE and LOCAL_RANK set.

    From a plain script, this starts `ranks` processes on this machine and returns their results by rank. `fn` must be
    importable, and the script guarded by `if __name__ == "__main__":`, because every rank runs its top level. Arguments
    and results are pickled: every rank has its own copy. A rank computes with one thread, unless `threads` or the
    user's OMP_NUM_THREADS says otherwise. Ranks communicate over gloo on the loopback interface, or over `backend`;
    with an accelerator for each rank, also over the backend of these devices, such as "cuda:nccl,cpu:gloo". The device
    of a rank is the current one then (untested: we had no GPU).

    Under torchrun, or if a process group is already initialized, this joins the running job: it runs `fn` as the one
    rank that this process is, and returns a list with that one result. Other processes return their own results.

    When a rank fails or is killed, all ranks end at once, and RunError names the rank and the cause, with its
    traceback. `sys.exit()` in `fn` is a result of None, `sys.exit(1)` a failure. `timeout` is in seconds and limits how
    long a rank may take to import and meet the others, from the moment when it begins to import; it does not limit
    `fn`. A rank that is stopped (SIGSTOP, a debugger) and gives no sign of life for `deadline` seconds fails. No rank
    outlives this process; processes that `fn` starts are its own responsibility. Setting `stop` sets
    `weft.runtime.process.this_rank.stop` on every rank: a request that `fn` may follow.
    """
    _check_arguments(fn, ranks, threads, timeout=timeout, deadline=deadline)
    if this_rank.loading:
        raise WeftError(
            f"weft.launch was called at the top level of {this_rank.loading}, which every rank runs again; "
            'put the call under if __name__ == "__main__":'
        )
    if this_rank.name:
        raise WeftError(
            f"weft.launch can't start ranks inside a rank (this is {this_rank.name}); call it once, from the script"
        )
    if is_rank() or has_process_group():
        return [join(fn, args, ranks=ranks, threads=threads, backend=backend, timeout=timeout)]
    call, main = _pickle_call(fn, args), _main_module()
    if threads is None and "OMP_NUM_THREADS" not in os.environ:
        threads = 1
    limits = Limits(start=timeout, silence=deadline)
    return run_ranks(call, main=main, ranks=ranks, threads=threads, backend=backend, limits=limits, stop=stop)


def _check_arguments(fn: Any, ranks: Any, threads: Any, **limits: Any) -> None:
    if not callable(fn):
        raise WeftError(f"weft.launch needs a function to run (got {fn!r}); write weft.launch(train, ranks=4)")
    check_sizes(ranks=ranks, threads=1 if threads is None else threads)
    for name, seconds in limits.items():
        if not isinstance(seconds, (int, float)) or not seconds > 0:
            raise WeftError(f"{name} must be a number of seconds above 0 (got {seconds!r})")


def _pickle_call(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    rule = "weft.launch runs fn in new processes, which must be able to import it"
    inner: Any = fn
    while isinstance(inner, functools.partial):
        inner = inner.func
    name = f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
    if "<lambda>" in name or "<locals>" in name:
        raise WeftError(f"{rule} (got {name}); define it with def, at the top level of a module")
    if name.startswith("__main__.") and _main_module() is None:
        raise WeftError(f"{rule} (got {name}, and this __main__ is not a file); move it into a module")
    try:
        return pickle.dumps((fn, args))
    except Exception as problem:
        raise WeftError(
            f"weft.launch pickles fn and its arguments for the new processes, and these can't be pickled "
            f"({one_line(problem)}); pass plain data, and build the rest inside fn"
        ) from problem


def _main_module() -> tuple[str, str] | None:
    """How a new process finds the running script, by the rules of multiprocessing: ("module" | "path", where)."""
    main = sys.modules["__main__"]
    if (spec := getattr(main, "__spec__", None)) is not None:
        return None if spec.name.rpartition(".")[2] == "__main__" else ("module", spec.name)
    path = getattr(main, "__file__", None)
    return ("path", os.path.abspath(path)) if path and os.path.isfile(path) else None
