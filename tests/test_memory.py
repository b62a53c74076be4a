"""What is free, read from written-out system files, and what is made of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.errors import OutOfMemoryError, UsageError
from engine.memory import DEFAULT_CONTEXT, available_memory, plan_memory

GIB = 2**30
RESERVED = 256 * 2**20


def plan(context_size: int | None = None, available: int | None = 4 * GIB, **settings: int):
    values = {"weight_bytes": GIB, "block_bytes": 2**20, "train_context_size": 32_768, "kv_sessions": 4, **settings}
    return plan_memory(name="m.gguf", context_size=context_size, available=available, **values)


def test_the_default_context_is_the_smaller_of_8192_and_the_trained_one() -> None:
    assert plan().context_size == DEFAULT_CONTEXT == 8192
    assert plan(train_context_size=2048).context_size == 2048
    assert plan().notices == plan(train_context_size=2048).notices == ()


def test_every_kept_conversation_may_fill_its_context() -> None:
    assert plan(context_size=1000).num_blocks == 4 * 16
    assert plan(context_size=1000, kv_sessions=0).num_blocks == 16


def test_the_pool_shrinks_before_the_context_does() -> None:
    got = plan(context_size=32_768, available=GIB + 600 * 2**20)
    assert (got.context_size, got.num_blocks, got.notices) == (32_768, 600, ())


def test_running_states_take_a_quarter_of_what_is_free_and_a_gib_at_most() -> None:
    for available, slots, checkpoints in ((3 * GIB, 8, 1), (9 * GIB, 16, 2), (None, 16, 2), (GIB + 700 * 2**20, 3, 1)):
        got = plan(available=available, state_bytes=2**26)
        assert (got.num_states, got.num_checkpoints) == (slots, checkpoints)
    assert plan(32_768, available=2 * GIB, state_bytes=2**26).num_blocks == 1024 - 4 * 64  # the rest is for K and V
    assert plan().num_states == 0


def test_a_context_that_does_not_fit_becomes_smaller_and_is_said() -> None:
    got = plan(context_size=32_768, available=GIB + 100 * 2**20)
    assert (got.context_size, got.num_blocks) == (6_400, 100)
    (notice,) = got.notices
    assert "6,400 tokens instead of 32,768" in notice
    assert "1,536 MiB" in notice
    assert "1,124 MiB are free" in notice


def test_a_context_beyond_training_becomes_smaller_and_is_said() -> None:
    got = plan(context_size=131_072)
    assert got.context_size == 32_768
    assert "32,768 tokens, the most m.gguf was trained for, instead of 131,072" in got.notices[0]


def test_a_model_that_does_not_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(OutOfMemoryError, match=r"needs 1,032 MiB .* 512 tokens, and 1,027 MiB are free"):
        plan(available=GIB + 3 * 2**20)
    with pytest.raises(OutOfMemoryError, match="and 0 MiB are free"):
        plan(available=-5)
    assert plan(context_size=128, available=GIB + 3 * 2**20).context_size == 128


def test_memory_that_is_not_known_is_not_checked() -> None:
    assert plan(context_size=4096, available=None).num_blocks == 256


@pytest.mark.parametrize("context_size", [-1, 0, 1])
def test_a_context_without_room_for_prompt_and_reply_is_refused(context_size: int) -> None:
    with pytest.raises(UsageError, match="at least 2 tokens"):
        plan(context_size=context_size)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def free(root: Path) -> int | None:
    return available_memory(root / "proc", root / "cgroup")


MEMINFO = {"proc/meminfo": "MemTotal:  16777216 kB\nMemAvailable:  8388608 kB\n"}


def test_free_memory_is_what_the_system_says_less_a_reserve(tmp_path: Path) -> None:
    write(tmp_path, MEMINFO)
    assert free(tmp_path) == 8 * GIB - RESERVED


def test_a_control_group_of_version_2_or_one_above_it_limits(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "0::/user/chat\n",
            "cgroup/user/chat/memory.max": "max\n",
            "cgroup/user/chat/memory.current": "1000\n",
            "cgroup/user/memory.max": f"{3 * GIB}\n",
            "cgroup/user/memory.current": f"{2 * GIB}\n",
            "cgroup/user/memory.stat": f"anon 5\ninactive_file {GIB // 2}\nactive_file 4096\n",
        },
    )
    assert free(tmp_path) == GIB + GIB // 2 + 4096 - RESERVED


def test_a_control_group_of_version_1_limits(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": f"{2 * GIB}\n",  # in a container the path below is the host's
            "cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
            "cgroup/memory/memory.stat": "active_file 1\ntotal_inactive_file 4096\ntotal_active_file 512\n",
        },
    )
    assert free(tmp_path) == GIB + 4608 - RESERVED


def test_unlimited_control_groups_do_not_limit(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            **MEMINFO,
            "proc/self/cgroup": "4:memory:/\n0::/\n",
            "cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "cgroup/memory/memory.usage_in_bytes": "5\n",
            "cgroup/memory.max": "max\n",
        },
    )
    assert free(tmp_path) == 8 * GIB - RESERVED


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="used address space is read from /proc")
def test_a_limit_on_address_space_counts() -> None:
    limit = 3 * GIB
    code = (
        "import resource; from engine.memory import available_memory; "
        f"resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit})); print(available_memory())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0 < int(done.stdout) < limit - 512 * 2**20
