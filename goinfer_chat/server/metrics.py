"""Counters in the text form of Prometheus.

https://prometheus.io/docs/instrumenting/exposition_formats/ describes the form.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from engine.api import TurnStats

_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_HELP = {
    "goinfer_requests_total": "counter Answers by route and status.",
    "goinfer_rejected_total": "counter Requests turned away, by what was full.",
    "goinfer_disconnects_total": "counter Clients that went away before their answer was complete.",
    "goinfer_prompt_tokens_total": "counter Tokens of prompts.",
    "goinfer_prefill_tokens_total": "counter Tokens of prompts that were evaluated.",
    "goinfer_prefill_reused_tokens_total": "counter Tokens of prompts that were reused, from memory or from files.",
    "goinfer_completion_tokens_total": "counter Tokens of replies.",
    "goinfer_cache_requests_total": "counter Requests by where their prompt's start was found: hit (memory, and the "
    "conversation goes on), shared (another's memory), restore (a file), miss.",
    "goinfer_running_requests": "gauge Replies that run.",
    "goinfer_waiting_requests": "gauge Requests that wait for a place.",
    "goinfer_inflight_requests": "gauge Requests in progress, in any state.",
    "goinfer_resident_bytes": "gauge Memory of the process.",
    "goinfer_ttft_seconds": "histogram From a request's start in the engine to its first token.",
}


class Metrics:
    """For one thread, that of the event loop."""

    def __init__(self) -> None:
        self._values: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._ttft: dict[str, list[int]] = {}
        self._ttft_sum: defaultdict[str, float] = defaultdict(float)

    def count(self, name: str, amount: float = 1, **labels: str) -> None:
        self._values[name][_labels(labels)] += amount

    def gauge(self, name: str, value: float, **labels: str) -> None:
        self._values[name][_labels(labels)] = value

    def value(self, name: str, **labels: str) -> float:
        """0 where nothing has been counted."""
        return self._values[name][_labels(labels)]

    def reply(self, model: str, stats: TurnStats, *, goes_on: bool) -> None:
        """Take in the figures of a reply; `goes_on`: its conversation was found."""
        for name in ("prompt", "prefill", "prefill_reused", "completion"):
            self.count(f"goinfer_{name}_tokens_total", getattr(stats, f"{name}_tokens"), model=model)
        restored = stats.restored_tokens or 0
        if restored:
            source = "restore"
        elif not stats.prefill_reused_tokens:
            source = "miss"
        else:
            source = "hit" if goes_on else "shared"
        self.count("goinfer_cache_requests_total", model=model, result=source)
        if stats.ttft_ms is not None:
            counts = self._ttft.setdefault(model, [0] * (len(_BUCKETS) + 1))
            counts[bisect_left(_BUCKETS, stats.ttft_ms / 1e3)] += 1
            self._ttft_sum[model] += stats.ttft_ms / 1e3

    def text(self) -> str:
        lines: list[str] = []
        self.gauge("goinfer_resident_bytes", resident_bytes())
        for name, line in _HELP.items():
            kind, help = line.split(" ", 1)
            lines += [f"# HELP {name} {help}", f"# TYPE {name} {kind}"]
            lines += [f"{name}{labels} {value:.12g}" for labels, value in self._values[name].items()]
            if kind == "histogram":
                lines += self._histogram(name)
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str) -> Iterator[str]:
        for model, counts in self._ttft.items():
            total = 0
            for bound, count in zip((*map(str, _BUCKETS), "+Inf"), counts):
                total += count
                yield f"{name}_bucket{_labels({'model': model, 'le': bound})} {total}"
            yield f"{name}_sum{_labels({'model': model})} {self._ttft_sum[model]:.12g}"
            yield f"{name}_count{_labels({'model': model})} {total}"


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * 4096
    return 0


def _labels(labels: dict[str, str]) -> str:
    def escaped(text: str) -> str:
        return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

    inner = ",".join(f'{name}="{escaped(value)}"' for name, value in sorted(labels.items()))
    return f"{{{inner}}}" if inner else ""
