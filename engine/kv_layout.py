"""What the bytes of K/V mean: how positions lie in a block, and what they belong to.

Both go into the header of a `.giw-kv` file (`kv_file.py`), which is packed and read here.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
import zlib
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from engine.api import KVType
from engine.config import ModelConfig
from engine.kernels.kv_types import runs_of
from engine.kv_cache import BLOCK_SIZE

MAGIC, VERSION = b"GIW kv cache", 3
"""A file has the first version that can say what it holds: 2 with running states, 3 where layers differ in shape."""
NUMERICS_VERSION = 2
"""Raised whenever the same model and ids may give other bits of K or V than before."""
MAX_HEADER_BYTES, MAX_LAYERS = 2048, 1024

MAKERS = ("the cpu backend", "torch, cpu", "torch, cuda", "torch, mps")
"""What computes K and V, by number: the highest byte of `Identity.numerics_version`."""


SEVERAL = 0xFF << 24
"""The numerics of K/V of which more than one maker computed some."""


def numerics_of(maker: int, version: int) -> int:
    """The number of a maker's numerics. Of torch the version is a fingerprint of all that may change bits."""
    assert 0 <= version < 1 << 24
    return maker << 24 | version


_START = struct.Struct("<12sII")
_IDENTITY = struct.Struct("<I32s32s16s8sIII16s")
_PART = struct.Struct("<II")
_STATE = struct.Struct("<Q")
_CHECK = struct.Struct("<I")


Parts = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How positions lie in a block: layer with keys and values of its own after layer, each a row of parts.

    A part (rows, width) is `rows` times 64 positions of `width` bytes. Keys in f16 with the positions innermost are
    (heads * head size, 2), values with a head's numbers side by side (heads, 2 * head size).
    """

    layers: tuple[Parts, ...]
    state_bytes: int = 0
    """Bytes of the running state that the model's other layers keep; 0 if it has none."""

    @classmethod
    def of(cls, config: ModelConfig, kv_type: KVType) -> KVLayout:
        """As compiled code has it (`kernels/kv_types.py`): keys, values, and behind each its scales, if any."""

        def parts(heads: int, dim: int) -> Parts:
            if kv_type == "q8_0":
                runs = runs_of(dim)
                return (heads * dim, 1), (heads * runs, 2), (heads, dim), (heads, 2 * runs)
            size = 4 if kv_type == "f32" else 2
            return (heads * dim, size), (heads, size * dim)

        heads = (config.heads[n] for n in config.attention_layers)
        return cls(layers=tuple(parts(h.num_kv_heads, h.dim) for h in heads), state_bytes=config.state_bytes)

    @property
    def position_bytes(self) -> int:
        return sum(map(_bytes_of, self.layers))

    @property
    def offsets(self) -> list[int]:
        """Bytes from the start of a block to each layer."""
        return [BLOCK_SIZE * size for size in accumulate(map(_bytes_of, self.layers[:-1]), initial=0)]

    @property
    def block_bytes(self) -> int:
        return self.position_bytes * BLOCK_SIZE

    def gather(self, block: NDArray[np.uint8], first: int, last: int) -> NDArray[np.uint8]:
        """Slots first .. last - 1 of a block [block_bytes] u8, packed: laid out as a block of fewer positions."""
        if (first, last) == (0, BLOCK_SIZE):
            return block
        packed = np.empty((last - first) * self.position_bytes, np.uint8)
        for target, source in zip(self._views(packed, last - first), self._views(block, BLOCK_SIZE)):
            target[...] = source[:, :, first:last]
        return packed

    def scatter(self, packed: NDArray[np.uint8], skip: int, block: NDArray[np.uint8], first: int, last: int) -> None:
        """Packed positions from the `skip`-th on into slots first .. last - 1 of a block."""
        count = len(packed) // self.position_bytes
        for target, source in zip(self._views(block, BLOCK_SIZE), self._views(packed, count)):
            target[:, :, first:last] = source[:, :, skip : skip + last - first]

    def _views(self, data: NDArray[np.uint8], count: int) -> list[NDArray[np.unsignedinteger]]:
        """Each part of `count` packed positions, as a view [layers, rows, count, words of a position].

        Of layers that follow one another and are alike it is one view.
        """
        found: list[NDArray[np.unsignedinteger]] = []
        for parts, alike in groupby(self.layers):
            number = len(list(alike))
            some, data = np.split(data, [number * count * _bytes_of(parts)])
            layers, start = some.reshape(number, -1), 0
            for rows, width in parts:
                word = next(size for size in (8, 4, 2, 1) if width % size == 0)  # NumPy copies a word at a time
                end = start + rows * count * width
                found.append(layers[:, start:end].view(f"u{word}").reshape(number, rows, count, width // word))
                start = end
        return found


def _bytes_of(parts: Parts) -> int:
    """Bytes of a position in a layer."""
    return sum(rows * width for rows, width in parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What keys and values belong to; they mean nothing to anything else."""

    model: bytes
    """`GGUFFile.content_hash` [32]."""
    architecture: str
    rope: bytes
    """SHA-256 of the settings of the rotary embedding [32]."""
    kv_type: str
    layout: KVLayout
    numerics_version: int = NUMERICS_VERSION

    @classmethod
    def of(
        cls, config: ModelConfig, content_hash: str, kv_type: KVType = "f16", numerics: int = NUMERICS_VERSION
    ) -> Identity:
        """Of a model with its K/V in this type."""
        arch = config.arch
        rope = [config.rope_base, config.heads[-1].rope_dim, config.rope_scale, list(config.rope_factors)]
        rope += [arch.neox_rope, config.local_rope_base, arch.local_layers, config.window]
        return cls(
            model=bytes.fromhex(content_hash),
            architecture=config.architecture,
            rope=hashlib.sha256(json.dumps(rope).encode()).digest(),
            kv_type=kv_type,
            layout=KVLayout.of(config, kv_type),
            numerics_version=numerics,
        )

    def __post_init__(self) -> None:
        assert len(self.model) == len(self.rope) == 32
        assert len(self.architecture) <= 16
        assert len(self.kv_type) <= 8

    @property
    def maker(self) -> str:
        """What computed it, for people."""
        maker = self.numerics_version >> 24
        return MAKERS[maker] if maker < len(MAKERS) else "more than one backend"

    @property
    def key(self) -> str:
        """16 hexadecimal digits, others for every other identity."""
        return hashlib.sha256(pack_header(self, bytes(16))).hexdigest()[:16]

    def mismatch(self, mine: Identity) -> str | None:
        """Why K/V with this identity are of no use where `mine` is in use, or None if they are.

        What another backend computed is of use: it differs by rounding, not by what it means.
        """
        if self.model != mine.model:
            return "made with another model"
        if self.architecture != mine.architecture:
            return f"made with architecture {self.architecture}, and this is {mine.architecture}"
        if self.rope != mine.rope:
            return "made with other RoPE settings"
        if self.kv_type != mine.kv_type:
            return f"made with another KV type, {self.kv_type}, and {mine.kv_type} is in use"
        if self.layout != mine.layout:
            return "its blocks are laid out differently"
        if (
            self.numerics_version != mine.numerics_version
            and max(self.numerics_version, mine.numerics_version) < 1 << 24
        ):
            return f"made with version {self.numerics_version} of the numerics, and this is {mine.numerics_version}"
        return None


def speed_key(identity: Identity) -> str:
    """What the speed of reading prompts is remembered under: that of each backend is its own."""
    maker = identity.numerics_version >> 24
    return identity.model.hex() + (f" {MAKERS[maker]}" if 0 < maker < len(MAKERS) else "")


class HeaderError(Exception):
    """Why a header is of no use, in one line for people."""


def pack_header(identity: Identity, nonce: bytes) -> bytes:
    """The header of a file. `nonce` [16] is a random number of its own for each file."""
    layout = identity.layout
    kinds = list(dict.fromkeys(layout.layers))
    body = _IDENTITY.pack(
        identity.numerics_version,
        identity.model,
        identity.rope,
        identity.architecture.encode("ascii"),
        identity.kv_type.encode("ascii"),
        BLOCK_SIZE,
        len(layout.layers),
        len(kinds[0]),
        nonce,
    ) + b"".join(_PART.pack(*part) for parts in kinds for part in parts)
    version = 3 if len(kinds) > 1 else 2 if layout.state_bytes else 1
    if version == 3:
        body += bytes(kinds.index(parts) for parts in layout.layers)
    if version > 1:
        body += _STATE.pack(layout.state_bytes)
    header = _START.pack(MAGIC, version, _START.size + len(body) + _CHECK.size) + body
    return header + _CHECK.pack(zlib.crc32(header))


def read_header(start: bytes) -> tuple[bytes, Identity]:
    """The header that `start`, the first MAX_HEADER_BYTES of a file, begins with. Raises HeaderError."""
    if not start:
        raise HeaderError("it is empty")
    if not start.startswith(MAGIC[: len(start)]):
        raise HeaderError("it is not a .giw-kv file")
    if len(start) < _START.size:
        raise HeaderError("its header is cut short")
    _, version, num_bytes = _START.unpack_from(start)
    if version > VERSION:
        raise HeaderError(f"written by a newer version: its format is {version}, and this program knows {VERSION}")
    least = _START.size + _IDENTITY.size + _CHECK.size
    if version < 1 or not least <= num_bytes <= MAX_HEADER_BYTES:
        raise HeaderError("its header is damaged")
    if num_bytes > len(start):
        raise HeaderError("its header is cut short")
    header = start[:num_bytes]
    if _CHECK.unpack_from(header, num_bytes - _CHECK.size) != (zlib.crc32(header[: -_CHECK.size]),):
        raise HeaderError("its header is damaged")
    numerics, model, rope, architecture, kv_type, block_size, num_layers, num_parts, _ = _IDENTITY.unpack_from(
        header, _START.size
    )
    layout = _layout_in(header[_START.size + _IDENTITY.size : -_CHECK.size], version, num_layers, num_parts)
    if layout is None:
        raise HeaderError("its header is damaged")
    if block_size != BLOCK_SIZE:
        raise HeaderError(f"its blocks have {block_size:,} positions, and {BLOCK_SIZE} are in use")
    return header, Identity(
        model=model,
        architecture=_text(architecture),
        rope=rope,
        kv_type=_text(kv_type),
        layout=layout,
        numerics_version=numerics,
    )


def _layout_in(rest: bytes, version: int, num_layers: int, num_parts: int) -> KVLayout | None:
    """What a header says from its parts on; None if it makes no sense."""
    state_bytes, numbers = 0, bytes(num_layers) if num_layers <= MAX_LAYERS else b""
    if version > 1 and len(rest) >= _STATE.size:
        rest, (state_bytes,) = rest[: -_STATE.size], _STATE.unpack_from(rest, len(rest) - _STATE.size)
    if version > 2 and len(rest) >= num_layers:
        rest, numbers = rest[: len(rest) - num_layers], rest[len(rest) - num_layers :]
    size = num_parts * _PART.size
    num_kinds = max(numbers, default=-1) + 1
    if not num_kinds or not size or len(rest) != num_kinds * size:
        return None
    kinds = [tuple(_PART.iter_unpack(rest[n * size : (n + 1) * size])) for n in range(num_kinds)]
    return KVLayout(layers=tuple(kinds[n] for n in numbers), state_bytes=state_bytes)


@dataclass(frozen=True, slots=True)
class KVFormat:
    """What a file says of its K/V, for listings."""

    kv_type: str
    position_bytes: int
    """Of one position in all layers."""


def format_of(path: Path) -> KVFormat | None:
    """None where there is no file of ours, or its header cannot be read. A link is not followed."""
    with contextlib.suppress(OSError, HeaderError):
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))
        with open(descriptor, "rb") as file:
            _, identity = read_header(file.read(MAX_HEADER_BYTES))
            return KVFormat(identity.kv_type, identity.layout.position_bytes)
    return None


def _text(field: bytes) -> str:
    """Printable, whatever is there: it ends up in a message."""
    return "".join(c for c in field.rstrip(b"\0").decode("ascii", "ignore") if c.isprintable())
