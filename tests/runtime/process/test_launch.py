"""Local ranks: real processes, started by scripts as users start them.

The functions of ranks are in `rank_functions.py`; the scripts import them from there.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping
from typing import Any, NoReturn

import pytest
from tests.helpers.rank_functions import DEADLINE, eventually, none, state
from tests.helpers.scripts import SOON, TORCHRUN, Scripts

from weft.errors import WeftError
from weft.runtime.process import hang_dump, launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")


# A successful run


GOOD = """
import json, os, sys
from dataclasses import dataclass
from rank_functions import arrive, eventually, launch, listeners, state

@dataclass
class Shift:
    by: int

def work(shift):
    import torch, torch.distributed as dist
    rank = arrive()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    facts = {"environment": [os.environ[name] for name in names], "threads": torch.get_num_threads()}
    facts |= {"listeners": listeners(), "argv": sys.argv[1:], "backend": dist.get_backend()}
    try:
        launch(work, shift, ranks=2)
    except ValueError as refused:
        facts["inside"] = str(refused)
    pids = [None] * 3
    dist.all_gather_object(pids, os.getpid())
    value = torch.full((2,), float(rank + shift.by), requires_grad=True)
    if rank > 0:  # rank 0 has ended, the others continue
        eventually(lambda: not state(pids[0]))
        other = torch.zeros(2)
        dist.send(value.detach(), 3 - rank) if rank == 1 else dist.recv(other, 1)
        dist.recv(other, 2) if rank == 1 else dist.send(value.detach(), 1)
        facts["other"] = other.tolist()
    shift.by += rank
    return facts, value, shift

if __name__ == "__main__":
    shift = Shift(10)
    results = launch(work, shift, ranks=3)
    assert shift == Shift(10) and [each[2] for each in results] == [Shift(10), Shift(11), Shift(12)]
    assert not listeners() and "RANK" not in os.environ and os.environ["GLOO_SOCKET_IFNAME"] != "lo"
    print(json.dumps({"facts": [each[0] for each in results], "values": [each[1].tolist() for each in results]}))
"""


def test_results_come_back_by_rank_and_by_value(new_interpreters: Scripts) -> None:
    away = [name for _, name in socket.if_nameindex() if not name.startswith("lo")]
    cluster = {"GLOO_SOCKET_IFNAME": away[-1] if away else ""}  # a setting of a cluster, which must not apply here
    done = new_interpreters.run(GOOD, environment=cluster)
    assert (done.code, done.err) == (0, "")
    (said,) = done.said
    assert said["values"] == [[10.0, 10.0], [11.0, 11.0], [12.0, 12.0]]
    for rank, facts in enumerate(said["facts"]):
        assert facts["environment"] == [str(rank), "3", str(rank), "3", "1"]
        assert (facts["threads"], facts["backend"], facts["argv"]) == (1, "gloo", [])
        assert facts["listeners"]
        assert set(facts["listeners"]) <= {"0100007F", "00000000000000000000000001000000"}  # 127.0.0.1 and ::1
        assert f"can't start ranks inside a rank (this is rank {rank} of 3)" in facts["inside"]
    assert [facts.get("other") for facts in said["facts"]] == [None, [12.0, 12.0], [11.0, 11.0]]


def test_threads_are_the_users_choice_and_the_folder_is_private(scripts: Scripts) -> None:
    """Without anonymous files (outside Linux), files are in a private folder."""
    done = scripts.run(
        "import os\n"
        "from rank_functions import report, settings\n"
        "if __name__ == '__main__':\n"
        "    del os.memfd_create\n"
        "    report(settings, ranks=1)\n"
        "    report(settings, ranks=1, threads=3)",
        environment={"OMP_NUM_THREADS": "2"},
    )
    assert done.code == 0, done.err
    theirs, asked = (said["results"][0] for said in done.said)
    assert theirs[0] == "2"  # torch uses that number, or the number of cores
    assert asked[:2] == ["3", 3]
    for (folder,) in (theirs[2], asked[2]):
        assert folder.startswith("weft-")
        assert folder.endswith(" 700")


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (
            "cude",
            'WEFT_DEVICE must be a device, such as "cpu", "cuda" or "cuda:1" (got \'cude\'), did you mean',
        ),
        ("vulkan", "WEFT_DEVICE=vulkan: PyTorch sees no vulkan device"),
    ],
)
def test_a_device_that_ranks_can_not_have_is_the_callers_mistake(scripts: Scripts, device: str, words: str) -> None:
    done = scripts.run(
        "from rank_functions import none, report\nif __name__ == '__main__': report(none, ranks=2)",
        environment={"WEFT_DEVICE": device},
    )
    (said,) = done.said
    assert said["error"] == "WeftError"
    assert said["message"].startswith(words)


# Refusals before any process starts


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("fn", "args", "options", "words"),
    [
        (lambda: 1, (), {}, r"must be able to import it \(got .*<lambda>\); define it with def"),
        (functools.partial(lambda value: value, 1), (), {}, "<lambda>"),
        (none, (threading.Lock(),), {}, "these can't be pickled .*lock.*; pass plain data"),
        (none, (lambda: 1,), {}, "these can't be pickled"),
        ("none", (), {}, "needs a function to run .got 'none'"),
        (none, (), {"ranks": 0}, "ranks must be a whole number of 1 or more .got 0"),
        (none, (), {"ranks": True}, "ranks must be"),
        (none, (), {"threads": 0}, "threads must be"),
        (none, (), {"timeout": 0}, "timeout must be a number of seconds above 0"),
    ],
)
def test_bad_input_is_refused(fn: Any, args: tuple[Any, ...], options: Mapping[str, Any], words: str) -> None:
    with pytest.raises(WeftError, match=words):
        launch(fn, *args, **{"ranks": 2, **options})


@pytest.mark.usefixtures("no_processes")
def test_a_function_inside_a_function_is_refused() -> None:
    def inner() -> None:
        """Not importable."""

    with pytest.raises(WeftError, match=r"<locals>.inner\); define it with def, at the top level of a module"):
        launch(inner, ranks=2)


@pytest.mark.usefixtures("no_processes")
def test_a_main_module_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    main: Any = types.ModuleType("__main__")  # as with `python -c`
    exec("def work(): pass", main.__dict__)
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(WeftError) as refused:
        launch(main.work, ranks=2)
    assert "(got __main__.work, and this __main__ is not a file); move it into a module" in str(refused.value)


def test_a_script_without_a_main_guard_is_refused(scripts: Scripts) -> None:
    done = scripts.run("from weft import launch\nprint('top')\ndef f(): pass\nlaunch(f, ranks=2)")
    assert done.code == 1
    assert 1 < len(done.out.splitlines()) <= 3
    last = done.err.splitlines()[-1]
    assert last.startswith("weft.errors.WeftError: weft.launch was called at the top level of script.py")
    assert last.endswith('put the call under if __name__ == "__main__":')
    assert done.err.count("Traceback") == 1


def test_a_function_that_ranks_cannot_import_is_refused(new_interpreters: Scripts) -> None:
    done = new_interpreters.run(
        "import sys, types\n"
        "from rank_functions import report\n"
        "if __name__ == '__main__':\n"
        "    ghost = sys.modules['ghost'] = types.ModuleType('ghost')\n"
        "    exec('def work(): pass', ghost.__dict__)\n"
        "    report(ghost.work, ranks=1)"
    )
    assert done.said[0]["error"] == "WeftError", done.err
    assert "(ModuleNotFoundError: No module named 'ghost'); put them at the top level of" in done.said[0]["message"]


# Runs that fail


def test_a_failure_ends_all_ranks_and_has_its_traceback(scripts: Scripts) -> None:
    done = scripts.run("from rank_functions import *\nif __name__ == '__main__': report(failing, ranks=3)")
    assert done.out.startswith("no line is lost")
    said = json.loads(done.out.removeprefix("no line is lost"))
    assert said["error"] == "RunError"
    first, *_, last = said["message"].splitlines()
    assert first == "rank 1 failed: LookupError: no such layer"
    assert last == "LookupError: no such layer"
    assert "in failing\n" in said["message"]
    assert "child.py" not in said["message"]
    assert said["left"] == []
    assert said["seconds"] < SOON
    assert done.err == ""


def test_the_first_failure_is_reported_not_its_consequences(scripts: Scripts) -> None:
    done = scripts.run("from rank_functions import *\nif __name__ == '__main__': report(echoing, ranks=3)")
    message = done.said[0]["message"]
    assert message.startswith("rank 2 failed: RunError: rank 2, chunk 2, micro-batch 7 (2F7)\n")
    assert "LookupError: no such layer" in message
    assert done.said[0]["left"] == []


def test_a_killed_rank_is_named_and_a_stopped_one_is_ended(scripts: Scripts) -> None:
    done = scripts.run("from rank_functions import *\nif __name__ == '__main__': report(killed, ranks=3)")
    (said,) = done.said
    assert said["error"] == "RunError"
    assert said["message"].startswith("rank 2 was killed by SIGKILL")
    assert said["left"] == []
    assert said["seconds"] < SOON


def test_other_ways_to_end(scripts: Scripts) -> None:
    done = scripts.run(
        "from rank_functions import *\n"
        "if __name__ == '__main__':\n"
        "    report(leaving, None, ranks=1)\n"
        "    report(leaving, 3, ranks=1)\n"
        "    report(interrupted, ranks=1)\n"
        "    report(vanishing, ranks=1)\n"
        "    report(unpicklable, ranks=1)"
    )
    good, *bad = done.said
    assert good["results"] == [None]
    for said, words in zip(
        bad,
        (
            "rank 0 failed: sys.exit(3)",
            "rank 0 failed: KeyboardInterrupt",
            "rank 0 ended with exit code 0 before fn returned",
            "rank 0 failed: RunError: its result can't be pickled (TypeError: cannot pickle '_thread.lock' object)",
        ),
        strict=True,
    ):
        assert said["error"] == "RunError"
        assert said["message"].startswith(words)


LATE = """
import os, sys, time
from pathlib import Path
from rank_functions import none, report

def stuck():
    Path("stuck").touch()
    time.sleep(1000)

class Clock:  # runs fast once rank 1 is stuck
    ahead = 0

    def monotonic(self):
        self.ahead += 500 * Path("stuck").exists()
        return time.monotonic() + self.ahead

if __name__ == "__main__":
    sys.modules["weft.runtime.process.parent"].time = Clock()
    report(none, ranks=2, timeout=900)
elif os.environ["RANK"] == "1":
    stuck()
"""


def test_a_rank_that_never_joins_is_named_and_prints_its_stack(scripts: Scripts) -> None:
    done = scripts.run(LATE)
    (said,) = done.said
    assert said["error"] == "RunError"
    assert said["message"].startswith(("rank 1 did not join", "ranks 0, 1 did not join"))  # if 0 was slow
    assert "within 900 s" in said["message"]
    assert "weft: stacks of rank 1 " in done.err
    assert ", line 8 in stuck\n" in done.err


def test_ranks_meet_without_memfd(scripts: Scripts) -> None:
    """A sandbox may refuse it: the store is a file with a name then, and nothing of it is left."""
    (said,) = scripts.run(
        "import os\n"
        "from rank_functions import none, report\n"
        "def refused(*_):\n"
        "    raise PermissionError(1, 'Operation not permitted')\n"
        "if __name__ == '__main__':\n"
        "    os.memfd_create = refused\n"
        "    report(none, ranks=2)"
    ).said
    assert said["results"] == [None, None]


def test_a_rank_ends_without_the_destructors_of_libraries(scripts: Scripts) -> None:
    """Those of C++ libraries abort some processes; what Python has to do at its end is done."""
    done = scripts.run(
        "import atexit, ctypes, threading, time\n"
        "from rank_functions import report\n"
        "libc = ctypes.CDLL(None)\n"
        "def later():\n"
        "    time.sleep(0.1)\n"
        "    print('thread', flush=True)\n"
        "def work():\n"
        "    global unclosed\n"
        "    unclosed = open('unclosed', 'w')\n"
        "    unclosed.write('kept')\n"
        "    libc.on_exit(libc.abort, None)\n"
        "    atexit.register(print, 'exit', flush=True)\n"
        "    threading.Thread(target=later).start()\n"
        "if __name__ == '__main__':\n"
        "    report(work, ranks=1)"
    )
    assert [line for line in done.out.splitlines() if not line.startswith("{")] == ["thread", "exit"]
    assert done.said[0]["results"] == [None]
    assert done.err == ""
    assert (scripts.folder / "unclosed").read_text() == "kept"


# The death of the parent


ORPHANS = """
import os, signal, sys, time
from pathlib import Path
from rank_functions import launch

def work():
    os.kill(os.getpid(), signal.SIGINT)  # ranks ignore it: their parent handles it
    Path(f"up.{os.getpid()}").touch()
    if os.environ["RANK"] == "1" and sys.argv[1] != "watching":
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        pass

if __name__ == "__main__":
    if sys.argv[1] == "watching":  # without help from the kernel
        module = sys.modules["weft.runtime.process.parent"]
        module.BOOTSTRAP = module.BOOTSTRAP.replace('"linux"', '"other"')
    launch(work, ranks=2)
elif sys.argv[1] == "importing":
    work()
"""


@pytest.mark.parametrize(
    ("number", "where"),
    [
        (signal.SIGKILL, "importing"),
        (signal.SIGKILL, "running"),
        (signal.SIGKILL, "watching"),
        (signal.SIGTERM, "running"),
        (signal.SIGINT, "importing"),
        (signal.SIGINT, "running"),
    ],
)
def test_no_rank_outlives_its_parent(scripts: Scripts, number: signal.Signals, where: str) -> None:
    process = scripts.start(ORPHANS, where)

    def up() -> bool:
        assert process.poll() is None, (scripts.folder / "err").read_text()
        pids = [int(entry.suffix[1:]) for entry in scripts.folder.glob("up.*")]
        return len(pids) == 2 and (where == "watching" or "T" in map(state, pids))

    eventually(up)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # like a terminal
    else:
        process.send_signal(number)
    done = scripts.finish(process)
    assert done.code == -number
    assert done.out == ""
    if number == signal.SIGINT:
        assert done.err.count("Traceback") == 1
        assert done.err.splitlines()[-1] == "KeyboardInterrupt"
    else:
        assert done.err == ""


# Under torchrun


JOINED = """
import json, os, sys
import torch.distributed as dist
from weft import WeftError
from rank_functions import launch

def facts(what):
    return what, dist.get_rank(), dist.get_world_size()

said = {}
try:
    launch(facts, "refused", ranks=3)
except WeftError as problem:
    said["refused"] = str(problem)
said["joined"] = [launch(lambda: facts("first"), ranks=2), launch(facts, "second", ranks=2)]
assert not dist.is_initialized()
dist.init_process_group("gloo")
said["joined"].append(launch(facts, "third", ranks=2))
assert dist.is_initialized()
dist.destroy_process_group()
with open(f"said.{os.environ['RANK']}", "w") as file:
    json.dump(said, file)
"""


def test_under_torchrun_launch_joins_the_process_group(new_interpreters: Scripts) -> None:
    script = new_interpreters.start(JOINED, under=TORCHRUN)
    assert script.wait() == 0, (new_interpreters.folder / "err").read_text()
    for rank in range(2):
        said = json.loads((new_interpreters.folder / f"said.{rank}").read_text())
        assert said["joined"] == [[["first", rank, 2]], [["second", rank, 2]], [["third", rank, 2]]]
        assert "(ranks: 3, WORLD_SIZE: 2); start 3 processes with torchrun, or use ranks=2" in said["refused"]


# Stacks


def test_stacks_of_ranks_in_any_state(scripts: Scripts) -> None:
    done = scripts.run("from rank_functions import *\nif __name__ == '__main__': report(standing, ranks=5)")
    assert "rank 0 failed: LookupError: enough" in done.said[0]["message"]
    reason, *parts = done.err.split("weft: stacks of rank ")
    assert reason.startswith("weft: rank 0 (pid ")
    assert reason.endswith(": waited 3 s for F3\n")
    assert [int(part[0]) for part in parts] == [0, 1, 2, 3, 4]
    for part, name in zip(parts, ("asking", "spinning", "sleeping", "stopping", "receiving"), strict=True):
        assert f" in {name}\n" in part
        assert ("which was stopped" in part.splitlines()[0]) == (name == "stopping")
        assert "(most recent call first):" in part
    *_, gone, other_host = done.err.splitlines()
    assert gone.startswith("weft: rank 5 (pid ")
    assert gone.endswith(") has ended")
    assert other_host.startswith("weft: rank 6 (pid 7) is on another host, elsewhere")


def test_a_process_without_a_handler_gets_no_signal(capfd: pytest.CaptureFixture[str]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        try:
            hang_dump.dump({1: (socket.gethostname(), process.pid), 2: ("?", "x")}, rank=0, reason="?")  # type: ignore[dict-item]
            assert state(process.pid)
        finally:
            process.kill()
    assert f"rank 1 (pid {process.pid}) has no stack dump enabled" in capfd.readouterr().err


def test_only_one_rank_dumps_stacks_at_a_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All deadlines pass at once; a rank that waits for another dump does not start a second one."""
    waits = threading.Event()

    def sleep(seconds: float) -> None:
        waits.set()
        time.sleep(seconds)

    monkeypatch.setattr(hang_dump, "time", types.SimpleNamespace(monotonic=time.monotonic, sleep=sleep))
    asker = threading.Thread(target=hang_dump.dump, args=({},), kwargs={"rank": 3, "reason": "waited"}, daemon=True)
    hang_dump.enable()
    with hang_dump._lock([os.getpid()]) as is_first:
        assert is_first
        asker.start()
        assert waits.wait(DEADLINE)
        assert asker.is_alive()
    asker.join(DEADLINE)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[0].endswith(": waited")
    assert lines[1].startswith("weft: rank 3: another rank of this host has just dumped")
