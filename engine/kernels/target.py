"""The CPU the kernels are compiled for: what it can do, and what that means for the shape of the kernels.

The shapes change speed only. Results have the same bits on every target.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from engine.errors import UnsupportedModelError, UsageError

ENVIRONMENT = "GOINFER_CHAT_KERNELS"
"""Set to a target's name to use fewer of the CPU's features than it has, for tests and for finding faults."""


@dataclass(frozen=True, slots=True)
class Target:
    """A compile target. `cpu` and `features` are LLVM's; the rest shapes the generated code."""

    name: str
    title: str
    """The instruction set, for people."""
    triple: str
    cpu: str
    features: str
    dot: str
    """How four u8 x s8 products are added to an i32: "vnni", "maddubs" (AVX2) or "sdot" (arm64)."""
    tile_rows: tuple[int, ...]
    """Activation rows of a matmul tile, descending to 1. Bounded by registers: 32 of 512 bits against 16 of 256."""
    has_panels: bool
    """Whether many rows meet weights unpacked into a panel (`panel.py`), which wants 32 wide registers."""
    query_tiles: tuple[int, ...]
    """Queries that share a pass over keys or values."""
    exponentials: int
    """Vectors whose exponentials are made side by side, since one is a long chain."""

    @property
    def signed_bytes(self) -> bool:
        """Whether 8-bit weights are multiplied as signed: `maddubs` would saturate on large unsigned ones."""
        return self.dot != "vnni"


def neon(triple: str, cpu: str, features: str) -> Target:
    """An arm64 CPU with the dot product (FEAT_DotProd, Armv8.2)."""
    return Target("neon", "NEON dot product", triple, cpu, features, "sdot", (4, 2, 1), False, (2, 1), 2)


def detect() -> Target:
    """The best target this CPU has, or the lesser one that GOINFER_CHAT_KERNELS names.

    Raises UnsupportedModelError when the CPU lacks what the kernels need, UsageError for an unknown name.
    """
    import llvmlite.binding as llvm

    has = llvm.get_host_cpu_features()
    cpu, triple = llvm.get_host_cpu_name(), llvm.get_process_triple()
    wanted = os.environ.get(ENVIRONMENT, "")
    found: dict[str, Target] = {}
    if triple.startswith(("x86_64", "amd64", "i686")):
        if all(has.get(f) for f in ("avx512f", "avx512bw", "avx512vl", "avx512vnni", "fma", "f16c")):
            # Wide registers even where LLVM's tuning for the CPU would split 512-bit vectors.
            features = has.flatten() + ",-prefer-256-bit"
            found["avx512"] = Target(
                "avx512", "AVX-512 VNNI", triple, cpu, features, "vnni", (8, 4, 3, 2, 1), True, (6, 3, 2, 1), 8
            )
        if all(has.get(f) for f in ("avx2", "fma", "f16c")):
            features = ",".join(
                f"{'-' if f.startswith('avx512') or f == 'avxvnni' else '+'}{f}" for f in sorted(has) if has[f]
            )
            found["avx2"] = Target(
                "avx2", "AVX2", triple, "x86-64-v3", features, "maddubs", (4, 2, 1), False, (2, 1), 2
            )
    elif triple.startswith(("aarch64", "arm64")) and has.get("dotprod", triple.startswith("arm64-apple")):
        found["neon"] = neon(triple, cpu, has.flatten())
    if not found:
        raise UnsupportedModelError(
            f"this CPU ({cpu}) has neither AVX2 with FMA and F16C nor arm64 with the dot product, which the cpu "
            "backend needs"
        )
    if wanted and wanted not in found:
        raise UsageError(f"{ENVIRONMENT}={wanted} is not one of {', '.join(found)}, which this CPU can run")
    return found[wanted] if wanted else next(iter(found.values()))
