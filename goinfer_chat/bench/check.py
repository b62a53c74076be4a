"""`goinfer-chat check`: what a person can expect of this machine with this model, in less than two minutes.

A long prompt, some decoding, then the limits of the machine, and which of them the two phases are near.
"""

from __future__ import annotations

import math
import sys
from contextlib import closing
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Final, Literal

from engine.api import Engine, ModelInfo, Request, SamplingParams
from engine.errors import UsageError
from engine.gguf_file import open_gguf
from goinfer_chat.bench.asking import Answer, ask, tokens_of
from goinfer_chat.bench.machine import Peaks, Probe, describe, peak_resident_bytes
from goinfer_chat.bench.report import significant
from goinfer_chat.bench.texts import plain_text
from goinfer_chat.bench.work import Work
from goinfer_chat.models import catalogue
from goinfer_chat.modes import EngineFactory
from goinfer_chat.settings import Settings
from goinfer_chat.terminal import Stream
from goinfer_chat.view.render import to_json

WORDS: Final = 2000
DECODE_TOKENS: Final = 64
NEAR: Final = 0.5
"""A phase that uses less than this of every limit is held up by something else."""

Limit = Literal["arithmetic", "memory", "neither"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """How near prefill or decode comes to the limits: shares of what the machine can do."""

    arithmetic: float
    """Of the products."""
    memory: float
    """Of the bandwidth."""

    @property
    def limit(self) -> Limit:
        if max(self.arithmetic, self.memory) < NEAR:
            return "neither"
        return "arithmetic" if self.arithmetic > self.memory else "memory"

    def text(self) -> str:
        why = {
            "arithmetic": "arithmetic is the limit",
            "memory": "memory is the limit",
            "neither": "neither is near (other programs? a very small model?)",
        }
        shares = f"{100 * self.arithmetic:.0f} % of the arithmetic, {100 * self.memory:.0f} % of the memory bandwidth"
        return f"{shares}: {why[self.limit]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    info: ModelInfo
    machine: str
    load_seconds: float
    num_words: int
    long: Answer
    """The prompt of `num_words` words and the reply to it."""
    peak_bytes: int | None
    """The most memory the process held; None where the system does not say."""
    bandwidth: float
    """Bytes per second."""
    peaks: Peaks
    prefill: Phase
    decode: Phase

    def lines(self) -> list[str]:
        info, stats = self.info, self.long.reply.stats
        assert stats.ttft_ms is not None
        peak = "" if self.peak_bytes is None else f"{self.peak_bytes / 1e6:,.0f} MB at most: "
        kv = f"{(stats.kv_bytes or 0) / 1e6:,.0f} MB of keys and values of {stats.context_used:,} tokens"
        first = f"{stats.ttft_ms / 1e3:.2f} s for a prompt of {self.num_words:,} words, {stats.prompt_tokens:,} tokens"
        prefill_rate = "" if stats.prefill_tok_s is None else f" ({stats.prefill_tok_s:,.0f} tok/s)"
        decode_rate = "" if stats.decode_tok_s is None else f"{stats.decode_tok_s:.1f} tok/s"
        rows = [
            ("model", f"{info.name}, {info.quantization}"),
            ("machine", self.machine),
            ("kernels", info.computed_by),
            ("loading", f"{self.load_seconds:.1f} s"),
            ("first token", first + prefill_rate),
            ("decode", decode_rate),
            ("memory", f"{peak}{info.weight_bytes / 1e6:,.0f} MB of weights, {kv}"),
            ("limits", f"{self.peaks.integer / 1e9:,.0f} GMAC/s of bytes, {self.bandwidth / 1e9:.1f} GB/s"),
            ("prefill", self.prefill.text()),
            ("decode", self.decode.text()),
        ]
        return [f"{name:<13}{text}" for name, text in rows]

    def as_object(self) -> dict[str, Any]:
        info, stats = self.info, self.long.reply.stats

        def phase(found: Phase) -> dict[str, Any]:
            shares = {"arithmetic": significant(found.arithmetic, 4), "memory": significant(found.memory, 4)}
            return {**shares, "limit": found.limit}

        return {
            "model": info.name,
            "quantization": info.quantization,
            "machine": self.machine,
            "kernels": info.kernels,
            "threads": info.threads,
            "load_seconds": significant(self.load_seconds, 4),
            "prompt_words": self.num_words,
            "prompt_tokens": stats.prompt_tokens,
            "ttft_ms": stats.ttft_ms,
            "prefill_tok_s": stats.prefill_tok_s,
            "decode_tok_s": stats.decode_tok_s,
            "peak_bytes": self.peak_bytes,
            "weight_bytes": info.weight_bytes,
            "kv_bytes": stats.kv_bytes,
            "integer_peak": significant(self.peaks.integer),
            "float_peak": significant(self.peaks.floating),
            "bandwidth": significant(self.bandwidth),
            "prefill": phase(self.prefill),
            "decode": phase(self.decode),
        }


def check_machine(settings: Settings, make_engine: EngineFactory) -> int:
    """Measure and print. Returns the exit code; raises UsageError or ModelError."""
    out, side = Stream(sys.stdout), Stream(None if settings.quiet else sys.stderr)
    side.status("loading the model")
    started = perf_counter()
    with closing(make_engine(settings, side)) as engine:
        result = measure(settings, engine, perf_counter() - started, side)
    side.clear_status()
    if settings.json:
        out.write(to_json(result.as_object()))
    else:
        for line in result.lines():
            out.line(line)
    return 0


def measure(settings: Settings, engine: Engine, load_seconds: float, side: Stream) -> Check:
    """Raises UsageError, also when the context has no room for a short prompt, or ModelError."""
    side.status(f"reading a prompt of {WORDS:,} words")
    num_words, request = _long_request(engine)
    long = ask(engine, request)
    peak_bytes = peak_resident_bytes()  # before the probe takes its buffer
    side.status("measuring the limits of this machine")
    probe = Probe(engine.info.threads)
    bandwidth, peaks = probe.bandwidth(), probe.peaks()
    probe.close()
    path = catalogue.resolve(settings.model)
    assert path is not None, "an engine was made of it"
    with open_gguf(path) as gguf:
        work = Work.of(gguf)
    return Check(
        info=engine.info,
        machine=describe().title,
        load_seconds=load_seconds,
        num_words=num_words,
        long=long,
        peak_bytes=peak_bytes,
        bandwidth=bandwidth,
        peaks=peaks,
        prefill=prefill_phase(long, work, peaks, bandwidth),
        decode=decode_phase(long, work, peaks, bandwidth),
    )


def prefill_phase(long: Answer, work: Work, peaks: Peaks, bandwidth: float) -> Phase:
    """Of a prompt read from an empty cache: each chunk reads all weights."""
    stats = long.reply.stats
    count, rate = stats.prefill_tokens, stats.prefill_tok_s
    assert count is not None
    assert rate is not None
    products = work.matrices(count, 1).plus(work.prompt_attention(count))
    seconds = count / rate
    return Phase(
        arithmetic=peaks.seconds(products.integer, products.floating) / seconds,
        memory=work.weight_bytes * long.num_chunks / bandwidth / seconds,
    )


def decode_phase(long: Answer, work: Work, peaks: Peaks, bandwidth: float) -> Phase:
    """Of tokens drawn one by one behind the prompt."""
    stats = long.reply.stats
    assert stats.prompt_tokens is not None
    assert stats.decode_tok_s is not None
    products = work.matrices(1, 1)
    num_bytes = work.weight_bytes + work.kv_bytes(stats.prompt_tokens)
    return Phase(
        arithmetic=peaks.seconds(products.integer, products.floating) * stats.decode_tok_s,
        memory=num_bytes / bandwidth * stats.decode_tok_s,
    )


def _long_request(engine: Engine) -> tuple[int, Request]:
    """The prompt of WORDS words, or of as many as leave room for the reply, and how many these are."""
    tokens = tokens_of(engine)
    room = engine.info.context_size - DECODE_TOKENS
    sampling = SamplingParams(temperature=0, logit_bias=dict.fromkeys(tokens.end_ids, -math.inf))
    num_words = WORDS
    while num_words:
        ids = tuple(tokens.encode(plain_text(num_words)))
        if len(ids) <= room:
            request = Request(
                prompt_ids=ids,
                sampling=sampling,
                max_tokens=DECODE_TOKENS,
                conversation="goinfer-chat check",
                speculation="off",  # what a step reads and multiplies is known without it
            )
            return num_words, request
        num_words = min(num_words - 1, num_words * room // len(ids))
    raise UsageError(f"a context of {engine.info.context_size:,} tokens has no room for the check; give a larger --ctx")
