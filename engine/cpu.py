"""How many threads this process may use at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MAX_THREADS = 256
"""More are a mistake: each has memory of its own, and a step has not that many pieces."""


def usable_threads(root: Path = Path("/")) -> int:
    """Physical cores of the CPUs this process may run on, at most what a CPU quota allows, at least 1.

    Two hardware threads of a core share the units that do the work here, so a second one brings nothing. `root` is
    where /proc and /sys are looked for.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    count = len({_core_of(root, cpu) for cpu in cpus})
    return max(1, int(min([float(count), *_quotas(root)])))


def _core_of(root: Path, cpu: int) -> str:
    """An identity shared by the hardware threads of one core; the CPU itself where Linux does not say."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quotas(root: Path) -> Iterator[float]:
    """CPUs' worth of time that each control group of this process and those above it grant, where they limit it."""
    for folder in _control_groups(root):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = ((folder / f"cpu.cfs_{what}_us").read_text().strip() for what in ("quota", "period"))
            if quota not in ("max", "-1"):
                yield int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue


def _control_groups(root: Path) -> Iterator[Path]:
    """Folders of the groups (version 2, or cpu of version 1) that this process is in, outermost first."""
    mounts = root / "sys/fs/cgroup"
    groups = {mounts: PurePosixPath("/"), mounts / "cpu": PurePosixPath("/")}
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            groups[mounts] = PurePosixPath(path)
        elif "cpu" in controllers.split(","):
            groups[mounts / "cpu"] = PurePosixPath(path)
    for mount, group in groups.items():
        yield mount
        for n in range(1, len(group.parts)):
            # A container may not see the part of the path that lies above it.
            yield mount.joinpath(*group.parts[1 : n + 1])
