"""How many threads are used where a machine, a control group or an affinity mask grants fewer CPUs than there are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.cpu import usable_threads


def machine(root: Path, siblings: list[str], files: dict[str, str] | None = None) -> Path:
    """A tree that looks like /sys and /proc: CPU n shares its core with `siblings[n]`."""
    for cpu, shared in enumerate(siblings):
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(shared + "\n")
    for name, text in (files or {}).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


FOUR_CORES = [f"{n % 4},{n % 4 + 4}" for n in range(8)]


@pytest.mark.usefixtures("eight_cpus")
def test_two_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    assert usable_threads(machine(tmp_path / "shared", FOUR_CORES)) == 4
    assert usable_threads(machine(tmp_path / "own", [str(n) for n in range(8)])) == 8


@pytest.mark.usefixtures("eight_cpus")
def test_a_system_that_says_nothing_of_cores_counts_its_cpus(tmp_path: Path) -> None:
    assert usable_threads(tmp_path) == 8


def test_an_affinity_mask_leaves_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = machine(tmp_path, FOUR_CORES)
    for mask, cores in (({0, 4}, 1), ({0, 1, 5}, 2), ({3}, 1), ({1, 2, 3, 7}, 3)):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, mask=mask: mask, raising=False)
        assert usable_threads(root) == cores


@pytest.fixture
def mask() -> Iterator[set[int]]:
    """The mask of this process, put back afterwards."""
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity masks")
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


def test_a_process_held_to_one_cpu_uses_one_thread(mask: set[int]) -> None:
    os.sched_setaffinity(0, {min(mask)})
    assert usable_threads() == 1


QUOTAS = {
    "version 2, in a container": ({"sys/fs/cgroup/cpu.max": "200000 100000\n"}, 2),
    "less than one CPU": ({"sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "a CPU and a half": ({"sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1),
    "more than there are": ({"sys/fs/cgroup/cpu.max": "9900000 100000\n"}, 4),
    "no limit": ({"sys/fs/cgroup/cpu.max": "max 100000\n"}, 4),
    "nonsense": ({"sys/fs/cgroup/cpu.max": "many 0\n"}, 4),
    "a group of the process itself": (
        {
            "proc/self/cgroup": "0::/user.slice/chat.scope\n",
            "sys/fs/cgroup/user.slice/cpu.max": "max 100000\n",
            "sys/fs/cgroup/user.slice/chat.scope/cpu.max": "300000 100000\n",
        },
        3,
    ),
    "a group above it": (
        {
            "proc/self/cgroup": "0::/user.slice/chat.scope\n",
            "sys/fs/cgroup/user.slice/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/user.slice/chat.scope/cpu.max": "300000 100000\n",
        },
        2,
    ),
    "version 1": (
        {
            "proc/self/cgroup": "5:memory:/big\n3:cpu,cpuacct:/docker/ab\n",
            "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_quota_us": "200000\n",
            "sys/fs/cgroup/cpu/docker/ab/cpu.cfs_period_us": "100000\n",
        },
        2,
    ),
    "version 1 without a limit": (
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        4,
    ),
}


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize("name", QUOTAS)
def test_a_quota_of_a_control_group_is_kept(name: str, tmp_path: Path) -> None:
    files, expected = QUOTAS[name]
    assert usable_threads(machine(tmp_path, FOUR_CORES, files)) == expected
