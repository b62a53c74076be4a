"""What fits into memory, decided before anything large is loaded.

An operating system grants more memory than it has and kills the program when it is used; so the need is computed
first and compared with what is free for this process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from engine.errors import OutOfMemoryError, UsageError
from engine.kv_pool import BLOCK_SIZE, blocks_for

DEFAULT_CONTEXT = 8192
"""Positions when none are asked for: several files of source and a long talk, 0.2 GB of K/V in a model of 1.5B."""

LEAST_CONTEXT = 512
"""A context that was asked for is not made smaller than this: the model is refused instead."""

MOST_CHECKPOINTS = 8
"""States of its past that a conversation keeps at most, of a model with layers that keep a running state."""

STATE_BYTES = 2**30
"""What running states may take in all, and at most a quarter of what is free beside the weights: two for a conversation
that runs, and those of its past. Fewer than LEAST_STATES are of no use."""

LEAST_STATES = 3

_RESERVED = 256 * 2**20  # for the interpreter, compiled code, one step's activations and logits
_RESERVED_ADDRESSES = 512 * 2**20  # threads reserve address space (stacks, malloc arenas) that they hardly use


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What will be loaded, and how large."""

    context_size: int
    num_blocks: int
    """Blocks of the pool: every kept conversation may fill its context, where memory allows it."""
    notices: tuple[str, ...]
    from_disk: bool = False
    """Weights stay in their file, and what a step touches of them is read when it is touched."""
    num_states: int = 0
    """Slots for running states; 0: the model has none."""
    num_checkpoints: int = 0
    """How many of them a conversation may have for its past."""


def plan_memory(
    *,
    name: str,
    weight_bytes: int,
    block_bytes: int,
    context_size: int | None,
    train_context_size: int,
    kv_sessions: int,
    available: int | None,
    from_disk: bool = False,
    token_bytes: int = 0,
    state_bytes: int = 0,
) -> MemoryPlan:
    """The context and the pool that fit beside the weights into `available` bytes (None: not known, not checked).

    A context larger than memory or training allows becomes smaller, and a notice says so. Raises OutOfMemoryError
    with the bytes needed and free when not even the smallest useful one fits, and UsageError for a context below 2.

    `from_disk`: weights that do not fit are no reason to refuse. Then half of memory, or what a token touches of the
    weights (`token_bytes`) if that is less, is left for them, and a notice says both.
    """
    if context_size is not None and context_size < 2:
        raise UsageError(
            f"a context needs at least 2 tokens, one for the prompt and one for the reply, not {context_size}"
        )
    notices = []
    wanted = context_size or DEFAULT_CONTEXT
    context = min(wanted, train_context_size)
    if context_size is not None and context < wanted:
        notices.append(f"the context is {context:,} tokens, the most {name} was trained for, instead of {wanted:,}")
    num_blocks = max(1, kv_sessions) * blocks_for(context)
    if available is None:
        num_states, num_checkpoints = _states(state_bytes, kv_sessions, None)
    else:
        if from_disk and weight_bytes > available - num_blocks * block_bytes:
            notices.append(_says_from_disk(name, weight_bytes, token_bytes, available))
            weight_bytes = min(weight_bytes, token_bytes, max(0, available) // 2)
        num_states, num_checkpoints = _states(state_bytes, kv_sessions, available - weight_bytes)
        taken = weight_bytes + num_states * state_bytes
        free_blocks = (available - taken) // block_bytes
        least = min(context, LEAST_CONTEXT)
        if free_blocks < blocks_for(least):
            needed = taken + blocks_for(least) * block_bytes
            raise OutOfMemoryError(
                f"{name} needs {_mib(needed)} of memory with a context of {least:,} tokens, and "
                f"{_mib(max(0, available))} are free; close other programs or choose a smaller model"
                + ("" if from_disk else ", or run it from the disk, slowly: --from-disk")
            )
        if free_blocks < blocks_for(context):
            needed = taken + blocks_for(context) * block_bytes
            notices.append(
                f"the context is {free_blocks * BLOCK_SIZE:,} tokens instead of {context:,}, for which {name} needs "
                f"{_mib(needed)} of memory, and {_mib(available)} are free"
            )
            context = free_blocks * BLOCK_SIZE
        num_blocks = min(num_blocks, free_blocks)
    return MemoryPlan(
        context_size=context,
        num_blocks=num_blocks,
        notices=tuple(notices),
        from_disk=from_disk,
        num_states=num_states,
        num_checkpoints=num_checkpoints,
    )


def _says_from_disk(name: str, weight_bytes: int, token_bytes: int, available: int) -> str:
    often = "each token waits for the disk" if token_bytes > available else "a token waits for what is not in memory"
    return (
        f"{name} has {_mib(weight_bytes)} of weights, and {_mib(max(0, available))} of memory are free: weights are "
        f"read from the disk when they are needed, {_mib(token_bytes)} of them for a token; {often}"
    )


def _states(state_bytes: int, kv_sessions: int, free: int | None) -> tuple[int, int]:
    """Slots for running states, and how many of them a conversation may have for its past."""
    if not state_bytes:
        return 0, 0
    conversations = max(1, kv_sessions)
    budget = STATE_BYTES if free is None else min(STATE_BYTES, free // 4)
    slots = max(LEAST_STATES, min(conversations * (MOST_CHECKPOINTS + 2), budget // state_bytes))
    return slots, max(1, min(MOST_CHECKPOINTS, slots // conversations - 2))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes this process may still use, less a reserve for all but weights and K/V; None if the system does not say.

    The least of: what the system has left (MemAvailable, or physical memory where that is not told), what the control
    groups leave (v1 and v2, the process's own and those above it), and the limit on address space.
    """
    free = [*_system_memory(proc), *_cgroup_memory(proc, cgroups)]
    addresses = [left - _RESERVED_ADDRESSES for left in _address_space(proc)]
    return min([*(left - _RESERVED for left in free), *addresses], default=None)


def _system_memory(proc: Path) -> Iterator[int]:
    for line in _read(proc / "meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024
            return
    with contextlib.suppress(ValueError, OSError, AttributeError):  # no such name, or no sysconf at all
        yield os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_memory(proc: Path, root: Path) -> Iterator[int]:
    for line in _read(proc / "self" / "cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            names = ("memory.max", "memory.current", "")
            yield from _groups(root, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
            yield from _groups(root / "memory", path, *names)


def _groups(root: Path, path: str, limit_name: str, usage_name: str, prefix: str) -> Iterator[int]:
    """What the group and each one above it leave. In a container the path may not exist below its own root.

    Pages of files count as free, also those that were read twice, as in the kernel's own MemAvailable: they go first.
    """
    group = root / path.lstrip("/")
    for folder in (group, *group.parents):
        limit, usage = _read(folder / limit_name), _read(folder / usage_name)
        if limit.strip().isdigit() and usage.strip().isdigit():
            stat = dict(line.split(maxsplit=1) for line in _read(folder / "memory.stat").splitlines() if " " in line)
            files = (stat.get(f"{prefix}{kind}_file", "0") for kind in ("inactive", "active"))
            yield int(limit) - int(usage) + sum(map(int, files))
        if folder == root:
            return


def _address_space(proc: Path) -> Iterator[int]:
    try:
        import resource
    except ImportError:  # not a Unix
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = _read(proc / "self" / "statm").split()
    if limit != resource.RLIM_INFINITY and used:
        yield limit - int(used[0]) * resource.getpagesize()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
