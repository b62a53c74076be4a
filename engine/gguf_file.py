"""GGUF model files: metadata read, tensors mapped.

The file is mapped and nothing beyond its header is read. It may come from anywhere, so every count, length, offset
and type is checked against what is left of the file before it is used or memory is taken for it: a damaged or hostile
file ends in a ModelFileError at once. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2
and 3, little-endian), and llama.cpp's gguf-split for models cut into several files.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import re
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from engine.errors import ModelFileError, ModelNotFoundError, UnsupportedModelError
from engine.quant import TensorType, block_shape, row_bytes

MetadataValue = bool | int | float | str | list[str] | NDArray[Any]
"""Arrays of strings are lists; arrays of numbers and booleans are read-only NumPy arrays."""

VERSIONS: Final = (2, 3)
DEFAULT_ALIGNMENT: Final = 32
MAX_ALIGNMENT: Final = 65_536  # the largest page size in use; more only moves the data away
MAX_ENTRIES: Final = 65_536  # keys, or tensors: mixtures of experts stored one by one reach about 50,000
MAX_NAME_BYTES: Final = 65_535  # the limit of the format for keys
MAX_TEXT_BYTES: Final = 16 << 20  # chat templates, the longest texts there are, have some 20 KB
SAMPLE_BYTES: Final = 4096

_BOOL, _STRING, _ARRAY = 7, 8, 9
_NUMBERS: Final[Mapping[int, str]] = MappingProxyType(
    {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8"}
)
# By number; those of TensorType among them. Only to say what an unsupported type is called.
_GGML_TYPE_NAMES: Final = (
    "F32 F16 Q4_0 Q4_1 Q4_2 Q4_3 Q5_0 Q5_1 Q8_0 Q8_1 Q2_K Q3_K Q4_K Q5_K Q6_K Q8_K IQ2_XXS IQ2_XS IQ3_XXS IQ1_S IQ4_NL "
    "IQ3_S IQ2_S IQ4_XS I8 I16 I32 I64 F64 IQ1_M BF16 Q4_0_4_4 Q4_0_4_8 Q4_0_8_8 TQ1_0 TQ2_0 IQ4_NL_4_4 IQ4_NL_4_8 "
    "IQ4_NL_8_8 MXFP4 NVFP4 Q1_0"
)
_SHARD_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """Where a tensor is. `shape` is in NumPy order: (rows N, columns K) for a matrix."""

    name: str
    shape: tuple[int, ...]
    type: TensorType
    nbytes: int
    shard: int
    """Which file of a split set, from 0."""
    offset: int
    """In bytes from the start of that file."""


def shown(text: str) -> str:
    """A name out of a file, safe to show: one line, no control characters, not too long."""
    escaped = text.encode("unicode_escape").decode("ascii") if not text.isprintable() else text
    return (escaped if len(escaped) <= 80 else escaped[:77] + "...") or "''"


class _Header:
    """One file's mapping and what its header says."""

    def __init__(self, path: Path, shard: int = 0) -> None:
        self.path = path
        self.map = _map(path)
        self.size = len(self.map)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self.map, np.uint8)
        self.metadata: dict[str, MetadataValue] = {}
        self.spans: dict[str, tuple[int, int]] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._position = 0
        num_tensors, num_keys = self._read_counts()
        self._read_metadata(num_keys)
        self._read_tensors(num_tensors, shard)

    def error(self, cause: str) -> ModelFileError:
        return ModelFileError(f"{shown(self.path.name)}: {cause}")

    def cut(self, what: str) -> ModelFileError:
        return self.error(f"the file ends inside {what} (it has {self.size:,} bytes): cut or damaged; fetch it again")

    def prefetch(self, start: int, end: int) -> None:
        """Have these bytes read in the background, where the system can.

        1,000 small stretches of a file that is not in memory: 14 ms asked for together, 500 ms one after the other,
        each with the read-ahead of a page fault (NVMe, 1.1 GB model).
        """
        if hasattr(mmap, "MADV_WILLNEED"):
            start -= start % mmap.PAGESIZE
            self.map.madvise(mmap.MADV_WILLNEED, start, end - start)

    def _advance(self, num_bytes: int, what: str) -> int:
        """The position before `num_bytes` that are there, moved past."""
        start = self._position
        if num_bytes > self.size - start:
            raise self.cut(what)
        self._position = start + num_bytes
        return start

    def _number(self, kind: int, what: str) -> int | float:
        dtype = np.dtype(_NUMBERS[kind])
        start = self._advance(dtype.itemsize, what)
        number: int | float = self.bytes[start : self._position].view(dtype)[0].item()
        return number

    def _u32(self, what: str) -> int:
        return int(struct.unpack_from("<I", self.map, self._advance(4, what))[0])

    def _u64(self, what: str) -> int:
        return int(struct.unpack_from("<Q", self.map, self._advance(8, what))[0])

    def _text(self, what: str, limit: int) -> str:
        length = self._u64(what)
        if length > self.size - self._position:
            raise self.cut(what)
        if length > limit:
            raise self.error(f"{what} has a text of {length:,} bytes; at most {limit:,} are allowed")
        start = self._advance(length, what)
        return self.map[start : self._position].decode("utf-8", errors="replace")

    def _read_counts(self) -> tuple[int, int]:
        if self.map[:4] != b"GGUF":
            raise self.error("not a GGUF file (its first four bytes are not GGUF)")
        self._position = 4
        version = self._u32("its header")
        if version & 0xFFFF == 0:
            raise UnsupportedModelError(f"{shown(self.path.name)}: big-endian GGUF files are not supported")
        if version not in VERSIONS:
            raise UnsupportedModelError(
                f"{shown(self.path.name)}: GGUF version {version} is not supported; supported: 2, 3"
            )
        num_tensors, num_keys = self._u64("its header"), self._u64("its header")
        # No key takes less than 13 bytes and no tensor less than 32.
        for count, least, what in ((num_tensors, 32, "tensors"), (num_keys, 13, "metadata keys")):
            if count > min(MAX_ENTRIES, (self.size - self._position) // least):
                raise self.error(f"it declares {count:,} {what}, which is more than it can hold: cut or damaged")
        return num_tensors, num_keys

    def _read_metadata(self, num_keys: int) -> None:
        for index in range(num_keys):
            key = self._text(f"metadata key {index}", MAX_NAME_BYTES)
            if key in self.metadata:
                raise self.error(f"metadata key {shown(key)} is there twice")
            start = self._position
            self.metadata[key] = self._value(key)
            self.spans[key] = (start, self._position)

    def _value(self, key: str) -> MetadataValue:
        what = f"metadata key {shown(key)}"
        kind = self._u32(what)
        if kind == _ARRAY:
            return self._array(key, what)
        if kind == _STRING:
            return self._text(what, MAX_TEXT_BYTES)
        if kind not in _NUMBERS:
            raise self.error(f"{what} has value type {kind}, which GGUF does not define")
        number = self._number(kind, what)
        return bool(number) if kind == _BOOL else number

    def _array(self, key: str, what: str) -> list[str] | NDArray[Any]:
        kind, count = self._u32(what), self._u64(what)
        if kind == _ARRAY:
            raise self.error(f"{what} is an array of arrays, which no supported model has")
        if kind == _STRING:
            return self._strings(key, what, count)
        if kind not in _NUMBERS:
            raise self.error(f"{what} is an array of value type {kind}, which GGUF does not define")
        dtype = np.dtype(_NUMBERS[kind])
        start = self._advance(count * dtype.itemsize, what)
        numbers = self.bytes[start : self._position].view(dtype)
        return numbers != 0 if kind == _BOOL else numbers

    def _strings(self, key: str, what: str, count: int) -> list[str]:
        """The vocabulary is the bulk of a header, hence one loop with nothing but the checks: 0.2 us a string."""
        data, size, position = self.map, self.size, self._position
        if count > (size - position) // 8:
            raise self.cut(what)
        # A replaced byte would make another token, or the same one twice.
        errors = "strict" if key.startswith("tokenizer.") else "replace"
        read_length = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        try:
            for _ in range(count):
                (length,) = read_length(data, position)
                start = position + 8
                position = start + length
                if position > size:
                    raise self.cut(what)
                strings.append(data[start:position].decode("utf-8", errors))
        except struct.error:
            raise self.cut(what) from None
        except UnicodeDecodeError:
            raise self.error(f"{what}: entry {len(strings)} is not valid UTF-8") from None
        self._position = position
        return strings

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        # A power of two, and at least 8 as the format asks, so that mapped numbers lie where a CPU wants them.
        if not isinstance(alignment, int) or not 8 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            found = f"{alignment:,}" if isinstance(alignment, int) else "not a number"
            raise self.error(f"general.alignment is {found}; it must be a power of two from 8 to {MAX_ALIGNMENT:,}")
        return alignment

    def _read_tensors(self, num_tensors: int, shard: int) -> None:
        alignment = self._alignment()
        entries: list[tuple[str, tuple[int, ...], TensorType, int, int]] = []
        for index in range(num_tensors):
            name = self._text(f"the name of tensor {index}", MAX_NAME_BYTES)
            entries.append((name, *self._tensor(f"tensor {shown(name)}", alignment)))
        data_start = -(-self._position // alignment) * alignment
        for name, shape, type, nbytes, offset in entries:
            if name in self.tensors:
                raise self.error(f"tensor {shown(name)} is there twice")
            if data_start + offset + nbytes > self.size:
                raise self.cut(f"the data of tensor {shown(name)}")
            self.tensors[name] = TensorInfo(
                name=name, shape=shape, type=type, nbytes=nbytes, shard=shard, offset=data_start + offset
            )

    def _tensor(self, what: str, alignment: int) -> tuple[tuple[int, ...], TensorType, int, int]:
        """(shape, type, bytes, offset in the data) of the next entry of the table, its name read."""
        num_dims = self._u32(what)
        if not 1 <= num_dims <= 4:
            raise self.error(f"{what} has {num_dims:,} dimensions; there can be 1 to 4")
        shape = tuple(reversed([self._u64(what) for _ in range(num_dims)]))
        number, offset = self._u32(what), self._u64(what)
        try:
            tensor_type = TensorType(number)
        except ValueError:
            name = dict(enumerate(_GGML_TYPE_NAMES.split())).get(number, str(number))
            supported = ", ".join(type.name for type in TensorType)
            raise UnsupportedModelError(
                f"{shown(self.path.name)}: {what} has type {name}, which is not supported; supported: {supported}"
            ) from None
        span, _ = block_shape(tensor_type)
        if 0 in shape or shape[-1] % span:
            raise self.error(f"{what} has shape {shape}; its rows must be whole blocks of {span} ({tensor_type.name})")
        nbytes = math.prod(shape[:-1]) * row_bytes(tensor_type, shape[-1])
        if offset % alignment:
            raise self.error(f"{what} starts at {offset:,}, which is not a multiple of the alignment {alignment}")
        return shape, tensor_type, nbytes, offset


def _map(path: Path) -> mmap.mmap:
    try:
        # Looked at before it is opened: opening a pipe would wait for its other end.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise ModelFileError(f"{shown(str(path))}: not a regular file")
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise ModelFileError(f"{shown(path.name)}: the file is empty")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFoundError(f"{shown(str(path))}: no such file") from None
    except (OSError, ValueError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ModelFileError(f"{shown(str(path))}: cannot be opened: {cause}") from None


def _samples(info: TensorInfo) -> list[tuple[int, int]]:
    """The stretches of a tensor's data that its content hash covers, as offsets in the file."""
    size = min(info.nbytes, SAMPLE_BYTES)
    spare = info.nbytes - size
    return [(info.offset + skip, info.offset + skip + size) for skip in (0, spare // 2, spare)]


class GGUFFile:
    """An open model: `metadata` of the first file, `tensors` of all. Made by `open_gguf`."""

    path: Path
    metadata: Mapping[str, MetadataValue]
    tensors: Mapping[str, TensorInfo]

    def __init__(self, path: Path, headers: list[_Header]) -> None:
        self.path = path
        self.metadata = MappingProxyType(headers[0].metadata)
        self.tensors = MappingProxyType({name: info for header in headers for name, info in header.tensors.items()})
        self._headers = headers
        self._content_hash: str | None = None

    def data(self, name: str) -> NDArray[np.uint8]:
        """The tensor's bytes [nbytes] as a read-only view of the mapping. Raises ModelFileError if it is not there."""
        info = self.tensors.get(name)
        if info is None:
            raise ModelFileError(f"{shown(self.path.name)}: tensor {shown(name)} is missing")
        assert self._headers, "the file is closed"
        return self._headers[info.shard].bytes[info.offset : info.offset + info.nbytes]

    def forget(self, name: str) -> None:
        """Let the system drop a tensor's pages from this process's memory; reading it again brings them back."""
        info = self.tensors[name]
        header = self._headers[info.shard]
        start = -(-info.offset // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (info.offset + info.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            header.map.madvise(mmap.MADV_DONTNEED, start, length)

    def content_hash(self) -> str:
        """What model this is, wherever its file lies and however it is split: a SHA-256 in hex, in milliseconds.

        It covers all metadata (but `split.*` and the alignment), every tensor's name, shape and type, and of each
        tensor's data the first, the middle and the last 4 KiB. A byte changed anywhere else in the data is not
        noticed: that is the price of asking at every start, and what the checksum of a download is for.
        """
        if self._content_hash is not None:
            return self._content_hash  # weights, caches and conversations all ask when a model starts
        assert self._headers, "the file is closed"
        tensors = sorted(self.tensors.items())
        for _, info in tensors:
            for start, end in _samples(info):
                self._headers[info.shard].prefetch(start, end)
        digest = hashlib.sha256()

        def add(part: bytes) -> None:
            digest.update(len(part).to_bytes(8, "little"))  # parts cannot be cut elsewhere to the same hash
            digest.update(part)

        first = self._headers[0]
        for key, (start, end) in sorted(first.spans.items()):
            if not key.startswith("split.") and key != "general.alignment":
                add(key.encode())
                add(first.map[start:end])
        for name, info in tensors:
            add(f"{name} {info.shape} {info.type.name}".encode())
            for start, end in _samples(info):
                add(self._headers[info.shard].map[start:end])
        self._content_hash = digest.hexdigest()
        return self._content_hash

    def close(self) -> None:
        """Let go of the mapping. Views that are still held stay valid, and keep it until they go."""
        self._headers = []

    def __enter__(self) -> GGUFFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def open_gguf(path: Path) -> GGUFFile:
    """Open one file, or a split set through any of its files (`NAME-00001-of-00003.gguf`).

    Raises ModelNotFoundError, ModelFileError (damaged, cut, a part of the set missing), UnsupportedModelError (tensor
    type, version, byte order). The size is checked here: a file that is cut while it is open can still end the
    process, as with every mapped file.
    """
    header = _Header(path)
    count = _split_number(header, "split.count", 1)
    if count <= 1:
        return GGUFFile(path, [header])
    return GGUFFile(path, _open_shards(header, count))


def _split_number(header: _Header, key: str, default: int | None = None) -> int:
    value = header.metadata.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise header.error(f"it is a part of a split model, but its {key} is missing or not a number")
    return value


def _open_shards(header: _Header, count: int) -> list[_Header]:
    """All files of the set that `header` belongs to, in order."""
    number = _split_number(header, "split.no") + 1
    name = _SHARD_NAME.fullmatch(header.path.name)
    if name is None or (int(name["number"]), int(name["count"])) != (number, count):
        raise header.error(
            f"it is part {number} of {count} of a split model and must be named ...-{number:05d}-of-{count:05d}.gguf, "
            "next to the other parts"
        )
    paths = [header.path.with_name(f"{name['stem']}-{index + 1:05d}-of-{count:05d}.gguf") for index in range(count)]
    for path in paths:
        if not path.exists():
            raise header.error(f"it is part {number} of {count} of a split model, and {shown(path.name)} is missing")
    headers = [_Header(path, shard) for shard, path in enumerate(paths)]
    for shard, other in enumerate(headers):
        if _split_number(other, "split.no") != shard or _split_number(other, "split.count") != count:
            raise other.error(f"it is not part {shard + 1} of {count}, as its name says: it belongs to another set")
    names = [name for other in headers for name in other.tensors]
    expected = _split_number(headers[0], "split.tensors.count")
    if len(set(names)) != len(names) or len(names) != expected:
        raise header.error(
            f"its {count} parts hold {len(set(names)):,} different tensors of {len(names):,}, and should hold "
            f"{expected:,}: the parts are not of one model"
        )
    return headers
