"""The public face: names that users rely on, and imports that stay light."""

import subprocess
import sys

import weft
import weft.schedule
import weft.simulate


def test_the_public_names() -> None:
    errors, data = (
        ["PeerError", "RunError", "ScheduleError", "StorageError", "WeftError"],
        ["ChunkCost", "Cost", "Link"],
    )
    data += ["Pipeline", "Report", "Result", "Schedule", "Weights"]
    functions = ["cut", "cures", "launch", "linear_rule", "load_csv", "schedule", "simulate", "timeline", "verify"]
    functions += ["materialize", "on_meta", "optimizers"]
    assert sorted(weft.__all__) == sorted(errors + data + functions)
    assert all(hasattr(weft, name) for name in weft.__all__)


def test_functions_keep_their_names_beside_their_packages() -> None:
    """`weft.schedule` is the function, whatever has been imported from the package of that name."""
    assert weft.schedule("1f1b", stages=2, microbatches=2).name == "1f1b"
    assert weft.simulate(weft.schedule("1f1b", stages=2, microbatches=2)).steady


def test_what_needs_torch_is_imported_when_asked_for() -> None:
    """`import weft` takes a fraction of a second; torch takes several."""
    code = "import sys, weft; assert 'torch' not in sys.modules; weft.Pipeline; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert not hasattr(weft, "nothing")


def imported(*arguments: str) -> set[str]:
    """The modules that a fresh interpreter holds after a command line."""
    code = (
        "import contextlib, io, sys\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):\n"
        "    from weft.cli import main\n"
        f"    main({list(arguments)!r})\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


def test_what_needs_no_torch_imports_none() -> None:
    sizes = ("--stages", "4", "--microbatches", "4")
    for command in (("--help",), ("schedules",), ("draw", "wpipe", *sizes), ("simulate", "2bw", *sizes)):
        modules = imported(*command)
        assert "weft.cli" in modules
        assert "torch" not in modules
    assert "torch" not in imported("check", "xpipe", *sizes)
    assert "torch" not in imported("train", "--print-config", "--set", "schedule.name=xpipe")
    assert "torch" not in imported("train", "--set", "train.lr=fast")
