"""Two hosts on one machine: network namespaces joined by a link whose rate can be changed while processes use it.

The link is a veth pair with a token bucket (`tc tbf`) at both ends, so that both directions have the rate at once. A
bucket lets as many bytes pass at once as it holds: if it is smaller than a message, a message takes its time even on an
idle link. At 1 Gbit/s it can't be smaller: packets leave the sender in pieces of up to 64 KiB, a smaller bucket makes
the kernel split each of them, and then the link carries less than half of its rate. No packet leaves the namespaces:
they have this link and their loopback, and no other route.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from weft.errors import WeftError

DEVICE = "weft0"  # in both namespaces
ADDRESSES = ("10.99.0.1", "10.99.0.2")
SECONDS = 20  # for one command
PLACES = os.pathsep.join(("/usr/sbin", "/sbin"))  # where `ip` may be without being in PATH
NAMES = Path("/run/netns")
QUEUE = "400ms"  # what may wait before a packet is dropped

_count = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Link:
    """A rate in Mbit/s (None: as fast as the machine allows), and the bytes that its bucket holds."""

    name: str
    rate: float | None = None
    bucket: int = 0

    def seconds(self, count: float) -> float:
        """How long this many bytes take in one direction."""
        return 0.0 if self.rate is None else count * 8 / (self.rate * 1e6)


def why_not() -> str | None:
    """Why hosts can't be made here, and the remedy; None if they can."""
    if sys.platform != "linux":
        return f"network namespaces need Linux (here: {sys.platform})"
    if missing := [name for name in ("ip", "tc") if _path(name) is None]:
        return f"{' and '.join(missing)} not found; install iproute2 (Debian, Ubuntu: apt install iproute2)"
    if os.geteuid() != 0:
        return (
            f"network namespaces need root (user id here: {os.geteuid()}); run it as root, in a container or with sudo"
        )
    return None


class Hosts:
    """Two namespaces and their link; `with` removes them whatever happens."""

    def __init__(self) -> None:
        if reason := why_not():
            raise WeftError(f"two hosts on one machine: {reason}")
        prefix = f"weft-{os.getpid()}-{next(_count)}"
        self.names = (f"{prefix}-a", f"{prefix}-b")
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Hosts:
        _remove_leftovers()
        with contextlib.ExitStack() as stack:
            for name in self.names:
                stack.callback(_remove, name)
                _run("ip", "netns", "add", name)
            first, second = self.names
            ends = ["name", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second]
            _run("ip", "link", "add", *ends)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _run("ip", "-n", name, "address", "add", f"{address}/30", "dev", DEVICE)
                for device in ("lo", DEVICE):
                    _run("ip", "-n", name, "link", "set", device, "up")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *problem: object) -> None:
        self._stack.close()

    def set(self, link: Link) -> None:
        """Change the rate of the link, at both ends."""
        for name in self.names:
            at = ["dev", DEVICE, "root"]
            if link.rate is None:
                _run("tc", "-n", name, "qdisc", "replace", *at, "noqueue")
            else:
                bucket = ["rate", f"{link.rate:g}mbit", "burst", f"{link.bucket}b", "latency", QUEUE]
                _run("tc", "-n", name, "qdisc", "replace", *at, "tbf", *bucket)

    def dropped(self) -> int:
        """Packets that both ends have dropped since the rate was set."""
        texts = (_run("tc", "-s", "-n", name, "qdisc", "show", "dev", DEVICE) for name in self.names)
        return sum(int(count) for text in texts for count in re.findall(r"dropped (\d+)", text))

    def command(self, host: int, *command: str) -> list[str]:
        """The command line that runs a command on a host."""
        return [_path("ip") or "ip", "netns", "exec", self.names[host], *command]


def _remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed."""
    for name in sorted(NAMES.glob("weft-*-*-[ab]")):
        owner = name.name.split("-")[1]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            _remove(name.name)


def _remove(name: str) -> None:
    if (NAMES / name).exists():
        with contextlib.suppress(WeftError):  # remove the other one too
            _run("ip", "netns", "delete", name)


def _path(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path=PLACES)


def _run(name: str, *arguments: str) -> str:
    command = " ".join((name, *arguments))
    try:
        done = subprocess.run(
            [_path(name) or name, *arguments], capture_output=True, text=True, timeout=SECONDS, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        raise WeftError(f"two hosts on one machine: `{command}` did not run ({problem})") from None
    if done.returncode:
        raise WeftError(
            f"two hosts on one machine need permission to create network namespaces and links (`{command}` failed: "
            f"{done.stderr.strip()}); run it as root, in a container with --privileged"
        )
    return done.stdout
