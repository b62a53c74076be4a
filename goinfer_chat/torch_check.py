"""`goinfer-chat check --backend torch`: PyTorch on this machine against the kernels, and against itself.

It builds nothing, needs no other model than the one it checks, and takes minutes where models of some billions of
weights run. On a machine with a GPU and without it is the same command.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.api import Engine, Message, Reply, Request, SamplingParams
from engine.config import ModelConfig
from engine.errors import OutOfMemoryError, UsageError
from engine.gguf_file import GGUFFile, open_gguf
from goinfer_chat.bench.asking import ask, tokens_of
from goinfer_chat.bench.texts import plain_text
from goinfer_chat.loading import find_model
from goinfer_chat.modes import EngineFactory
from goinfer_chat.settings import Settings
from goinfer_chat.terminal import Stream
from goinfer_chat.view.render import to_json

if TYPE_CHECKING:
    from engine.backend import Backend
    from engine.parity import Reader

POSITIONS: Final = 560
"""Read of a text: beyond the first part of 512 positions."""
LEAST_POSITIONS: Final = 96
WORK: Final = 4e11
"""Products that reading may take: seconds on a few cores, ten times in all. A large model reads fewer positions."""
EVERY: Final = 16
"""Logits of every so many positions are compared."""
REPLY_TOKENS: Final = 16

BOUNDS: Final = {"cpu": (0.12, 0.06), "torch": (0.02, 0.005)}
"""Of the mean difference in spreads and of the divergence in nats: the kernels round activations to int8, and half
precision rounds weights and activations to 11 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One thing that computes."""

    name: str
    weight_bytes: int
    prefill_tok_s: float
    decode_tok_s: float
    parity: dict[str, float] | None
    """Against the reference; None: it is the reference, or there is none."""
    within: bool | None
    """Whether that is within the bounds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchCheck:
    model: str
    quantization: str
    num_positions: int
    compared: tuple[Compared, ...]
    notices: tuple[str, ...]
    same: dict[str, bool]
    """What was found equal: bits of logits in steps of other shapes, words of replies."""

    @property
    def holds(self) -> bool:
        return all(self.same.values()) and all(row.within is not False for row in self.compared)

    def lines(self) -> Iterator[str]:
        yield f"{self.model}, {self.quantization}: {self.num_positions} positions of a text"
        yield from self.notices
        width = max(len(row.name) for row in self.compared)
        head = ("weights", "prefill", "decode", "largest", "mean", "KL", "same best")
        yield f"{'':<{width}}" + "".join(f"{word:>13}" for word in head)
        for row in self.compared:
            cells = [
                f"{row.weight_bytes / 1e6:,.0f} MB",
                f"{row.prefill_tok_s:,.0f} tok/s",
                f"{row.decode_tok_s:,.1f} tok/s",
            ]
            if row.parity is not None:
                p = row.parity
                cells += [f"{p['largest']:.3g}", f"{p['mean']:.2g}", f"{p['divergence']:.2g}"]
                cells.append(f"{100 * p['same_best']:.1f} %")
            end = {True: "  within bounds", False: "  OUT OF BOUNDS", None: ""}[row.within]
            yield f"{row.name:<{width}}" + "".join(f"{cell:>13}" for cell in cells) + end
        yield "largest and mean: differences of logits, in units of their spread; KL in nats; against the reference"
        for what, same in self.same.items():
            yield f"{what}: {'the same' if same else 'DIFFERENT'}"

    def as_object(self) -> dict[str, Any]:
        return {**asdict(self), "holds": self.holds}


def check_torch(settings: Settings, make_engine: EngineFactory) -> int:
    """Print the table. Returns 0, or 1 where something is not as it should be. Raises UsageError or ModelError."""
    out, side = Stream(sys.stdout), Stream(None if settings.quiet else sys.stderr)
    path = find_model(settings.model, side)
    result = measure(settings, path, make_engine, side)
    side.clear_status()
    if settings.json:
        out.write(to_json(result.as_object()))
    else:
        for line in result.lines():
            out.line(line)
    return 0 if result.holds else 1


def measure(settings: Settings, path: Path, make_engine: EngineFactory, side: Stream) -> TorchCheck:
    """Raises UsageError or ModelError."""
    same: dict[str, bool] = {}
    with tempfile.TemporaryDirectory() as folder:
        side.status("asking a conversation again and again")
        with closing(make_engine(replace(settings, context_size=2048, quiet=True), side, Path(folder))) as engine:
            info, text = engine.info, tokens_of(engine).encode(plain_text(POSITIONS))
            same |= _words(engine)
    with open_gguf(path) as gguf:
        ids = text[: _num_positions(gguf)]
        comparison = _Comparison(settings, gguf, ids, side)
        comparison.run()
    return TorchCheck(
        model=info.name,
        quantization=info.quantization,
        num_positions=len(ids),
        compared=tuple(comparison.rows),
        notices=(*info.notices, *comparison.notices),
        same=same | comparison.same,
    )


def _num_positions(gguf: GGUFFile) -> int:
    weights = sum(info.nbytes for info in gguf.tensors.values())  # about a byte each, whatever the type
    return int(min(POSITIONS, max(LEAST_POSITIONS, WORK / (2 * weights))))


class _Comparison:
    """Backends that read the same text."""

    def __init__(self, settings: Settings, gguf: GGUFFile, ids: Sequence[int], side: Stream) -> None:
        self.rows: list[Compared] = []
        self.notices: list[str] = []
        self.same: dict[str, bool] = {}
        self._settings = settings
        self._gguf = gguf
        self._ids = ids
        self._probes = range(EVERY - 1, len(ids), EVERY)
        self._side = side

    def run(self) -> None:
        """What was chosen and the kernels, beside float32 on the CPU."""
        chosen, exact = self._backend("torch", self._settings.device), self._backend("torch", "cpu")
        is_exact = chosen.estimate(self._gguf, "f16") == exact.estimate(self._gguf, "f16")
        reference = None if is_exact else self._reference(exact)
        found = self._look(chosen, "torch", reference, in_other_steps=True)
        try:
            self._look(self._backend("cpu", "auto"), "cpu", found if reference is None else reference)
        except OutOfMemoryError as error:
            self.notices.append(str(error))

    def _backend(self, name: str, device: str) -> Backend:
        from engine.backend import open_backend

        return open_backend(name, device, self._gguf, self._settings.kv_type)

    def _reference(self, backend: Backend) -> Any:
        """Its logits, or None where memory has no room for it."""
        needed, free = backend.estimate(self._gguf, "f16")[0], backend.available_memory()
        if free is None or needed <= free:
            return self._look(backend, "torch", None)
        self.notices.append(
            f"no reference: in float32 the model needs {needed / 1e9:.1f} GB, and {free / 1e9:.1f} GB are free"
        )
        return None

    def _look(self, backend: Backend, kind: str, reference: Any, *, in_other_steps: bool = False) -> Any:
        """Logits of the probes. Adds a row, and `in_other_steps` what is the same in steps of other shapes."""
        from engine.parity import compare

        with self._reading(backend) as (model, reader):
            self._side.status(f"reading with {model.kernels}")
            found = reader.logits(self._ids, self._probes)
            rates = reader.rates(self._ids)
            parity = None if reference is None else compare(found, reference)
            mean, divergence = BOUNDS[kind]
            self.rows.append(
                Compared(
                    name=model.kernels,
                    weight_bytes=model.weight_bytes,
                    prefill_tok_s=rates.prefill_tok_s,
                    decode_tok_s=rates.decode_tok_s,
                    parity=None if parity is None else asdict(parity),
                    within=None if parity is None else parity.mean <= mean and parity.divergence <= divergence,
                )
            )
            if in_other_steps:
                self._side.status("reading in steps of other shapes")
                self.same |= _bits(reader, self._ids, self._probes, found)
        return found

    @contextmanager
    def _reading(self, backend: Backend) -> Iterator[tuple[Any, Reader]]:
        from engine.kv_cache import blocks_for
        from engine.model import LoadOptions
        from engine.parity import Reader

        num_positions = len(self._ids) + 64
        options = LoadOptions(
            threads=self._settings.threads,
            max_positions=min(num_positions, ModelConfig.from_gguf(self._gguf).train_context_size),
            kv_type=self._settings.kv_type,
            progress=lambda what, share: self._side.status(f"{what} ({share:.0%})" if share else what),
        )
        with closing(backend.load(self._gguf, options)) as model:
            yield model, Reader(model, 2 * blocks_for(num_positions) + 1)


def _bits(reader: Any, ids: Sequence[int], probes: Sequence[int], expected: Any) -> dict[str, bool]:
    """Whether a row's logits are the same bits in steps of other shapes."""
    found = {}
    some = [probe for probe in probes if probe < LEAST_POSITIONS]
    for chunk, limit in ((1, LEAST_POSITIONS), (7, len(ids)), (64, len(ids))):
        wanted = some if chunk == 1 else probes
        logits = reader.logits(ids[:limit], wanted, chunk)
        found[f"logits, read in chunks of {chunk}"] = logits.tobytes() == expected[: len(wanted)].tobytes()
    logits = reader.logits_beside(ids, ids[::-1], probes, 50)
    found["logits, beside another conversation"] = logits.tobytes() == expected.tobytes()
    return found


def _words(engine: Engine) -> dict[str, bool]:
    """Whether a third turn has the same words whatever is cached or guessed."""
    sampling = SamplingParams(temperature=0.8, seed=7)
    messages: list[Message] = []

    def turn(conversation: str, speculation: Any = "off") -> Reply:
        request = Request(
            messages=tuple(messages),
            sampling=sampling,
            max_tokens=REPLY_TOKENS,
            conversation=conversation,
            speculation=speculation,
        )
        return ask(engine, request).reply

    for text in ("Repeat: one two three one two three one two three.", "And once more, please."):
        messages.append(Message(role="user", content=text))
        messages.append(turn("warm").as_message())
    messages.append(Message(role="user", content="And again: one two three one two three."))
    ways: dict[str, Callable[[], Reply]] = {
        "a reused start": lambda: turn("warm"),
        "a start read from the disk": lambda: turn("warm"),
        "nothing cached": lambda: turn("cold"),
        "guesses": lambda: turn("guessed", "ngram"),
    }
    replies = {}
    for way, play in ways.items():
        replies[way] = play()
        for name in ("warm", "cold", "guessed"):
            engine.forget(name)
    expected = replies["nothing cached"]
    if expected.stats.prefill_reused_tokens or not replies["a reused start"].stats.prefill_reused_tokens:
        raise UsageError("the check needs --kv-sessions 1 or more, and the default of others")
    return {f"words, with {way}": reply.ids == expected.ids for way, reply in replies.items() if reply is not expected}
