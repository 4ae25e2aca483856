"""Build the extension of the pretend device once per machine, source and PyTorch version."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib import metadata
from pathlib import Path

SOURCES = Path(__file__).with_name("csrc")
NAME = "weft_pretend"
FOLDER = "WEFT_PRETEND_FOLDER"  # where libraries are; processes with another TMPDIR inherit it


def missing() -> str | None:
    """What this machine lacks to build it."""
    if _compiler() is None:
        return "a C++ compiler (g++, or CXX)"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the headers of Python (python3-dev)"
    return None


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def target() -> Path:
    """Where the library of these sources is, or will be."""
    key = hashlib.sha256(metadata.version("torch").encode())
    key.update(sysconfig.get_config_var("SOABI").encode())
    for source in sorted(SOURCES.iterdir()):
        key.update(source.name.encode() + source.read_bytes())
    folder = os.environ.setdefault(FOLDER, str(Path(tempfile.gettempdir()) / f"weft-pretend-{os.getuid()}"))
    return Path(folder) / key.hexdigest()[:16] / f"{NAME}.so"


def build() -> Path:
    """The library. Others that build it at the same time wait for the first one."""
    library = target()
    if library.exists():
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    with open(library.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            part = library.with_suffix(f".{os.getpid()}")
            _compile(part)
            os.replace(part, library)
    return library


def _compile(library: Path) -> None:
    from torch.utils.cpp_extension import include_paths, library_paths

    if lacking := missing():
        raise RuntimeError(f"the pretend device needs {lacking}")
    path = str(_compiler())
    includes = [f"-I{folder}" for folder in (*include_paths(), sysconfig.get_paths()["include"])]
    libraries = [flag for folder in library_paths() for flag in (f"-L{folder}", f"-Wl,-rpath,{folder}")]
    flags = ["-O0", "-std=c++20", "-fPIC", "-shared", "-w", f"-DTORCH_EXTENSION_NAME={NAME}"]
    links = ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
    command = [path, *flags, *includes, str(SOURCES / "pretend.cpp"), "-o", str(library), *libraries, *links]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the pretend device does not compile with {path}:\n{result.stderr[-8000:]}")
