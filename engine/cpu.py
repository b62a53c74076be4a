"""How many threads this process may use at once."""

from __future__ import annotations

import os
from pathlib import Path

MAX_THREADS = 256
"""More are a mistake: each has memory of its own, and a step has not that many pieces."""


def usable_threads() -> int:
    """Physical cores of the CPUs this process may run on, at most what a CPU quota allows, at least 1.

    Two hardware threads of a core share the units that do the work here, so a second one brings nothing.
    """
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    count = len({_core_of(cpu) for cpu in cpus})
    quota = _quota()
    return max(1, count if quota is None else min(count, int(quota)))


def _core_of(cpu: int) -> str:
    """An identity shared by the hardware threads of one core; the CPU itself where Linux does not say."""
    try:
        return Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> float | None:
    """CPUs' worth of time a control group grants; None: no limit."""
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        folder = Path("/sys/fs/cgroup/cpu")
        micros = int((folder / "cpu.cfs_quota_us").read_text())
        return None if micros <= 0 else micros / int((folder / "cpu.cfs_period_us").read_text())
    except (OSError, ValueError, ZeroDivisionError):
        return None
