"""The limits of control groups, versions 1 and 2: how many cores and bytes this process really has.

A limit holds for a group and all groups below it, so the smallest one on the way up counts. A container may see its
own group as the root, or have a path that exists only on its host; then the root that it sees is its group.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

MOUNT = "sys/fs/cgroup"
UNLIMITED = 2**60  # version 1 has numbers of this size where there is no limit


def cpu_quota(root: Path) -> float | None:
    """Cores that the quotas allow; None without one."""
    quotas = []
    for folder in _groups(root, "cpu"):
        v1 = f"{_text(folder / 'cpu.cfs_quota_us')} {_text(folder / 'cpu.cfs_period_us')}"
        quota, period, *_ = [*(_text(folder / "cpu.max") or v1).split(), "", ""]  # "150000 100000", or "max 100000"
        if quota.isdigit() and period.isdigit():  # version 1 has -1 for no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def memory_limit(root: Path) -> tuple[int, int] | None:
    """The limit that leaves least, in bytes, and what is left of it; None without one.

    File pages that were not used lately don't count as used: the kernel drops them first.
    """
    limits = []
    for folder in _groups(root, "memory"):
        for limit_name, used_name, inactive in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = _text(folder / limit_name).strip(), _text(folder / used_name).strip()
            if limit.isdigit() and used.isdigit() and int(limit) < UNLIMITED:
                counts = dict(line.split()[:2] for line in _text(folder / "memory.stat").splitlines())
                limits.append((int(limit), int(limit) - max(0, int(used) - int(counts.get(inactive, 0)))))
    return min(limits, key=lambda limit: limit[1], default=None)


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's group and of those above it."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        names = ["", "unified"] if number == "0" else [controllers, controller]
        if number == "0" or controller in controllers.split(","):
            for mount in (root / MOUNT / name for name in names):
                below = mount / path.strip("/")
                yield from [below, *(parent for parent in below.parents if parent.is_relative_to(mount))]


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text("utf-8")
    return ""
