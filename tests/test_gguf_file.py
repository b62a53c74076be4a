import math
import os
import struct
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import write_tiny_model

from engine.errors import GoinferError, ModelError, ModelFileError, ModelNotFoundError, UnsupportedModelError
from engine.gguf_file import _GGML_TYPE_NAMES, SAMPLE_BYTES, open_gguf
from engine.quant import TensorType

U32, STRING, ARRAY = 4, 8, 9


def text(value: bytes | str) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def key(name: bytes | str, kind: int, payload: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + payload


def tensor(name: bytes | str, dims: list[int], kind: int = 0, offset: int = 0, *, num_dims: int | None = None) -> bytes:
    head = text(name) + struct.pack("<I", len(dims) if num_dims is None else num_dims)
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def model(
    *,
    keys: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    data: bytes | None = bytes(64),
    version: int = 3,
    num_keys: int | None = None,
    num_tensors: int | None = None,
) -> bytes:
    """A GGUF file put together by hand, with counts that may lie; data None: it ends with the header."""
    keys, tensors = keys or [], tensors or []
    raw = b"GGUF" + struct.pack(
        "<IQQ",
        version,
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    raw += b"".join(keys) + b"".join(tensors)
    return raw if data is None else raw + bytes(-len(raw) % 32) + data


def alignment(value: int, kind: int = U32) -> bytes:
    return key("general.alignment", kind, struct.pack("<I", value))


SMALL = model(
    keys=[
        key("general.architecture", STRING, text("llama")),
        key("some.array", ARRAY, struct.pack("<IQ3H", 2, 3, 1, 2, 3)),
        key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("é")),
        alignment(32),
    ],
    tensors=[tensor("a", [4, 2]), tensor("b", [32], 2, 32)],
    data=bytes(range(32 + 18)),
)

BAD_FILES: dict[str, tuple[bytes, type[ModelError], str]] = {
    "empty": (b"", ModelFileError, "the file is empty"),
    "other-format": (b"PK\x03\x04" + bytes(60), ModelFileError, "not a GGUF file"),
    "only-magic": (b"GGUF", ModelFileError, "the file ends inside its header"),
    "version-1": (model(version=1), UnsupportedModelError, "GGUF version 1 is not supported; supported: 2, 3"),
    "big-endian": (model(version=3 << 24), UnsupportedModelError, "big-endian"),
    "array-2**63-in-a-tiny-file": (
        model(keys=[key("", ARRAY, struct.pack("<IQ", U32, 2**63))], data=None),
        ModelFileError,
        "the file ends inside metadata key '' (it has 48 bytes)",
    ),
    "strings-2**63": (
        model(keys=[key("abc", ARRAY, struct.pack("<IQ", STRING, 2**63))]),
        ModelFileError,
        "the file ends inside metadata key abc",
    ),
    "numbers-2**61": (
        model(keys=[key("abc", ARRAY, struct.pack("<IQ", 12, 2**61))]),
        ModelFileError,
        "the file ends inside metadata key abc",
    ),
    "string-2**63": (
        model(keys=[key("abc", STRING, struct.pack("<Q", 2**63))]),
        ModelFileError,
        "the file ends inside metadata key abc",
    ),
    "string-in-array-2**63": (
        model(keys=[key("abc", ARRAY, struct.pack("<IQQ", STRING, 1, 2**63))]),
        ModelFileError,
        "the file ends inside metadata key abc",
    ),
    "array-that-ends-inside-a-length": (
        model(keys=[key("abc", ARRAY, struct.pack("<IQ", STRING, 2) + text("16 bytes of text") + bytes(4))], data=None),
        ModelFileError,
        "the file ends inside metadata key abc",
    ),
    "key-2**64-1": (
        model(keys=[struct.pack("<Q", 2**64 - 1)]),
        ModelFileError,
        "the file ends inside metadata key 0",
    ),
    "key-of-70000-bytes": (
        model(keys=[key("k" * 70_000, U32, bytes(4))]),
        ModelFileError,
        "metadata key 0 has a text of 70,000 bytes; at most 65,535 are allowed",
    ),
    "text-of-17-MiB": (
        model(keys=[key("abc", STRING, text(bytes(17 << 20)))]),
        ModelFileError,
        "metadata key abc has a text of 17,825,792 bytes",
    ),
    "kv-count-2**63": (model(num_keys=2**63), ModelFileError, f"it declares {2**63:,} metadata keys"),
    "tensor-count-2**63": (model(num_tensors=2**63), ModelFileError, f"it declares {2**63:,} tensors"),
    "kv-count-20": (model(num_keys=20), ModelFileError, "it declares 20 metadata keys"),
    "tensor-count-20": (model(num_tensors=20), ModelFileError, "it declares 20 tensors"),
    "kv-count-a-million": (
        model(num_keys=1_000_000, data=bytes(14_000_000)),
        ModelFileError,
        "it declares 1,000,000 metadata keys",
    ),
    "nested-array": (
        model(keys=[key("abc", ARRAY, struct.pack("<IQ", ARRAY, 1) * 5)]),
        ModelFileError,
        "metadata key abc is an array of arrays",
    ),
    "value-type-13": (model(keys=[key("abc", 13, bytes(8))]), ModelFileError, "metadata key abc has value type 13"),
    "array-of-type-13": (
        model(keys=[key("abc", ARRAY, struct.pack("<IQ", 13, 1))]),
        ModelFileError,
        "metadata key abc is an array of value type 13",
    ),
    "duplicate-key": (
        model(keys=[key("abc", U32, bytes(4))] * 2),
        ModelFileError,
        "metadata key abc is there twice",
    ),
    "token-not-utf-8": (
        model(keys=[key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text(b"\xff"))]),
        ModelFileError,
        "metadata key tokenizer.ggml.tokens: entry 1 is not valid UTF-8",
    ),
    "alignment-2**30": (model(keys=[alignment(2**30)]), ModelFileError, "general.alignment is 1,073,741,824"),
    "alignment-0": (model(keys=[alignment(0)]), ModelFileError, "general.alignment is 0"),
    "alignment-24": (model(keys=[alignment(24)]), ModelFileError, "general.alignment is 24"),
    "alignment-float": (model(keys=[alignment(0, kind=6)]), ModelFileError, "general.alignment is not a number"),
    "dims-4e9": (
        model(tensors=[tensor("t", [4], num_dims=4_000_000_000)]),
        ModelFileError,
        "tensor t has 4,000,000,000 dimensions",
    ),
    "dims-0": (model(tensors=[tensor("t", [], num_dims=0), bytes(32)]), ModelFileError, "tensor t has 0 dimensions"),
    "dims-5": (model(tensors=[tensor("t", [1] * 5)]), ModelFileError, "tensor t has 5 dimensions"),
    "empty-tensor": (model(tensors=[tensor("t", [4, 0])]), ModelFileError, "tensor t has shape (0, 4)"),
    "part-of-a-block": (model(tensors=[tensor("t", [48], 2)]), ModelFileError, "must be whole blocks of 32 (Q4_0)"),
    "size-overflows-64-bits": (
        model(tensors=[tensor("t", [2**63, 2**63, 2**63, 4])]),
        ModelFileError,
        "the file ends inside the data of tensor t",
    ),
    "size-wraps-to-16": (
        model(tensors=[tensor("t", [2**62 + 4, 1])]),
        ModelFileError,
        "the file ends inside the data of tensor t",
    ),
    "type-IQ1_S": (
        model(tensors=[tensor("blk.3.attn_q.weight", [256], 19)]),
        UnsupportedModelError,
        "tensor blk.3.attn_q.weight has type IQ1_S, which is not supported; supported: F32, F16, Q4_0, ",
    ),
    "type-41": (
        model(tensors=[tensor("t", [256], 41)]),
        UnsupportedModelError,
        "tensor t has type Q1_0, which is not supported; supported: F32",
    ),
    "type-99": (model(tensors=[tensor("t", [256], 99)]), UnsupportedModelError, "tensor t has type 99, which is not"),
    "duplicate-tensor": (
        model(tensors=[tensor("t", [4]), tensor("t", [4], offset=32)]),
        ModelFileError,
        "tensor t is there twice",
    ),
    "offset-past-the-end": (
        model(tensors=[tensor("t", [4], offset=1 << 40)]),
        ModelFileError,
        "the file ends inside the data of tensor t",
    ),
    "offset-at-2**64": (
        model(tensors=[tensor("t", [4], offset=2**64 - 32)]),
        ModelFileError,
        "the file ends inside the data of tensor t",
    ),
    "offset-misaligned": (
        model(tensors=[tensor("t", [4], offset=4)]),
        ModelFileError,
        "tensor t starts at 4, which is not a multiple of the alignment 32",
    ),
    "one-byte-short": (
        model(tensors=[tensor("t", [16])], data=bytes(63)),
        ModelFileError,
        "the file ends inside the data of tensor t",
    ),
    "part-without-its-number": (
        model(keys=[key("split.count", 2, struct.pack("<H", 2))]),
        ModelFileError,
        "split.no is missing or not a number",
    ),
}


@pytest.fixture(params=BAD_FILES)
def bad_file(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, type[ModelError], str]:
    raw, error, cause = BAD_FILES[request.param]
    path = tmp_path / "bad.gguf"
    path.write_bytes(raw)
    return path, error, cause


def test_a_bad_file_ends_in_one_line_with_its_name_and_the_cause(bad_file: tuple[Path, type[ModelError], str]) -> None:
    path, error, cause = bad_file
    with pytest.raises(error) as caught:
        open_gguf(path)
    message = str(caught.value)
    assert type(caught.value) is error
    assert message.startswith("bad.gguf: ")
    assert cause in message
    assert message.isprintable()
    assert len(message) < 250


def test_bad_files_cost_neither_time_nor_memory(tmp_path: Path) -> None:
    for name, (raw, _, _) in BAD_FILES.items():
        (tmp_path / f"{name}.gguf").write_bytes(raw)
    script = """
        import re, sys, time
        from pathlib import Path
        from engine.errors import ModelError
        from engine.gguf_file import open_gguf
        for path in sorted(Path(sys.argv[1]).iterdir()):
            start = time.process_time()
            try:
                open_gguf(path)
            except ModelError:
                assert time.process_time() - start < 1, path
            else:
                raise SystemExit(f"{path} was opened")
        # Of this program alone: ru_maxrss would start at what pytest itself had in memory.
        peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
        assert peak < 200 << 10, peak
        print("done")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), tmp_path],
        capture_output=True, text=True, timeout=60, cwd=Path(__file__).parent.parent,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for size in range(len(SMALL)):
        path.write_bytes(SMALL[:size])
        with pytest.raises(ModelFileError, match=r"^cut\.gguf: "):
            open_gguf(path)
    path.write_bytes(SMALL)
    assert open_gguf(path).data("b").tolist() == list(range(32, 50))


def test_a_model_cut_to_60_percent_or_1_KiB_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "tiny.gguf")
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) * 6 // 10])
    with pytest.raises(ModelFileError, match=r"the file ends inside the data of tensor .* cut or damaged"):
        open_gguf(path)
    path.write_bytes(raw[:1024])
    with pytest.raises(ModelFileError, match="the file ends inside metadata key tokenizer"):
        open_gguf(path)


HOSTILE = st.sampled_from([2**64 - 1, 2**63, 2**62, 2**32, 2**31, 65536, 255, 9, 8, 0]).flatmap(
    lambda number: st.sampled_from([struct.pack("<Q", number), struct.pack("<Q", number)[:4]])
)


@given(st.lists(st.tuples(st.integers(0, len(SMALL) - 1), HOSTILE | st.binary(min_size=1, max_size=2)), min_size=1))
@settings(max_examples=500, deadline=1000)
def test_changed_bytes_give_a_model_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, bytes]]
) -> None:
    raw = bytearray(SMALL)
    for position, new in changes:
        raw[position : position + len(new)] = new
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    path.write_bytes(raw)
    try:
        opened = open_gguf(path)
    except GoinferError as error:
        message = str(error)
    else:
        message = opened.content_hash()
        for name, info in opened.tensors.items():
            assert len(opened.data(name)) == info.nbytes
    assert message.isprintable()


def test_names_out_of_a_file_reach_a_message_without_control_characters(tmp_path: Path) -> None:
    path = tmp_path / "x\x1b[2J\n.gguf"
    path.write_bytes(model(tensors=[tensor("t\x1b]0;hi\x07\nline" + "y" * 500, [4], 99)]))
    with pytest.raises(UnsupportedModelError) as caught:
        open_gguf(path)
    assert str(caught.value).isprintable()
    assert "x\\x1b[2J\\n.gguf" in str(caught.value)
    assert len(str(caught.value)) < 350


def test_what_is_no_file_is_refused_by_path(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"nothing\.gguf: no such file"):
        open_gguf(tmp_path / "nothing.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_gguf(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="not a regular file"):
        open_gguf(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="cannot be opened"):
        open_gguf(tmp_path / "nul\0.gguf")


def test_every_value_type_comes_back_as_written(tmp_path: Path) -> None:
    path = tmp_path / "values.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    numbers = {
        "uint8": 255, "int8": -128, "uint16": 65535, "int16": -32768, "uint32": 2**32 - 1, "int32": -(2**31),
        "uint64": 2**64 - 1, "int64": -(2**63), "float32": 0.5, "float64": math.pi, "bool": True,
    }  # fmt: skip
    for name, value in numbers.items():
        getattr(writer, f"add_{name}")(name, value)
        kind = gguf.GGUFValueType[name.upper()]
        writer.add_key_value(f"{name}s", [value, type(value)(0)], gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_string("string", "日本 é \0 end")
    writer.add_array("strings", ["", "a", "日本 é", "\0"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with open_gguf(path) as opened:
        for name, value in numbers.items():
            assert opened.metadata[name] == value
            assert type(opened.metadata[name]) is type(value)
            array = opened.metadata[f"{name}s"]
            assert isinstance(array, np.ndarray)
            assert array.dtype == np.dtype(name)
            assert array.tolist() == [value, 0]
        assert opened.metadata["string"] == "日本 é \0 end"
        assert opened.metadata["strings"] == ["", "a", "日本 é", "\0"]
        assert opened.metadata["general.architecture"] == "llama"


def test_a_text_that_is_not_utf_8_is_readable_outside_the_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "latin.gguf"
    names = key("authors", ARRAY, struct.pack("<IQ", STRING, 1) + text(b"Andr\xe9"))
    path.write_bytes(model(keys=[key("general.name", STRING, text(b"Andr\xe9")), names]))
    assert open_gguf(path).metadata == {"general.name": "Andr\ufffd", "authors": ["Andr\ufffd"]}


@pytest.mark.parametrize("version", [2, 3])
def test_versions_2_and_3_are_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "version.gguf"
    path.write_bytes(SMALL[:4] + struct.pack("<I", version) + SMALL[8:])
    assert open_gguf(path).tensors["a"].shape == (2, 4)


@pytest.mark.parametrize("align", [8, 32, 4096])
def test_a_file_says_how_its_tensors_are_aligned(tmp_path: Path, align: int) -> None:
    path = tmp_path / "aligned.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(align)
    arrays = {f"t{size}": np.arange(size, dtype=np.float32) for size in (1, 2, 3, 5)}
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    opened = open_gguf(path)
    assert {name: opened.data(name).view(np.float32).tolist() for name in arrays} == {
        name: array.tolist() for name, array in arrays.items()
    }


def assert_read_as_the_gguf_package_reads(path: Path) -> None:
    theirs = gguf.GGUFReader(path)
    with open_gguf(path) as ours:
        fields = {name: field for name, field in theirs.fields.items() if not name.startswith("GGUF.")}
        assert set(ours.metadata) == set(fields)
        for name, field in fields.items():
            value = ours.metadata[name]
            assert (value.tolist() if isinstance(value, np.ndarray) else value) == field.contents(), name
        assert [(info.name, info.shape[::-1], int(info.type), info.nbytes) for info in ours.tensors.values()] == [
            (info.name, tuple(map(int, info.shape)), int(info.tensor_type), info.n_bytes) for info in theirs.tensors
        ]
        for info in theirs.tensors:
            assert np.array_equal(ours.data(info.name), info.data.reshape(-1).view(np.uint8)), info.name


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma3"])
def test_a_tiny_model_reads_as_with_the_gguf_package(tmp_path: Path, architecture) -> None:
    types = {"*attn*": TensorType.Q4_K, "*down*": TensorType.Q6_K, "token_embd*": TensorType.F16}
    path = write_tiny_model(tmp_path / "tiny.gguf", architecture, tensor_types=types)
    assert_read_as_the_gguf_package_reads(path)


@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m",
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow),
        pytest.param("gemma-3-270m", marks=pytest.mark.slow),
    ],
)
def test_a_real_model_reads_as_with_the_gguf_package(name: str, model_path) -> None:
    assert_read_as_the_gguf_package_reads(model_path(name))


def test_a_large_vocabulary_is_read_in_well_under_half_a_second(tmp_path: Path) -> None:
    tokens, merges = [f"token{i}" for i in range(262_144)], [f"left{i} right{i}" for i in range(500_000)]
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(
        model(
            keys=[
                key(name, ARRAY, struct.pack("<IQ", STRING, len(strings)) + b"".join(map(text, strings)))
                for name, strings in (("tokenizer.ggml.tokens", tokens), ("tokenizer.ggml.merges", merges))
            ]
        )
    )
    seconds = []
    for _ in range(3):
        start = time.process_time()
        opened = open_gguf(path)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.5
    assert opened.metadata["tokenizer.ggml.tokens"] == tokens
    assert opened.metadata["tokenizer.ggml.merges"] == merges


def test_opening_costs_the_header_however_large_the_data(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(model(tensors=[tensor("t", [1 << 20, 1 << 14])], data=b""))
    os.truncate(path, path.stat().st_size + (4 << 34))
    start = time.process_time()
    opened = open_gguf(path)
    opened.content_hash()
    assert time.process_time() - start < 0.1
    assert len(opened.data("t")) == 4 << 34


def test_a_count_is_refused_before_it_is_walked(tmp_path: Path) -> None:
    path = tmp_path / "sparse.gguf"
    path.write_bytes(model(keys=[key("abc", ARRAY, struct.pack("<IQ", STRING, 2**40))], data=None))
    os.truncate(path, 256 << 20)  # zeros: 33 million empty strings
    start = time.process_time()
    with pytest.raises(ModelFileError, match="the file ends inside metadata key abc"):
        open_gguf(path)
    assert time.process_time() - start < 0.1


def test_data_is_a_read_only_view_that_outlives_close(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    path.write_bytes(SMALL)
    with open_gguf(path) as opened:
        data, array = opened.data("a"), opened.metadata["some.array"]
        assert np.shares_memory(data, opened.data("a"))
    assert not data.flags.writeable
    assert data.tolist() == list(range(32))
    assert isinstance(array, np.ndarray)
    assert array.tolist() == [1, 2, 3]


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    path = tmp_path / "one.gguf"
    path.write_bytes(SMALL)
    with pytest.raises(ModelFileError, match=r"one\.gguf: tensor output\.weight is missing"):
        open_gguf(path).data("output.weight")


def test_type_names_are_those_of_ggml() -> None:
    names = _GGML_TYPE_NAMES.split()
    assert all(names[kind] == kind.name for kind in gguf.GGMLQuantizationType)
    assert all(names[kind] == kind.name for kind in TensorType)


@pytest.fixture
def split_set(tmp_path: Path) -> tuple[Path, list[Path]]:
    """The same model as one file and as a set of several."""
    whole = write_tiny_model(tmp_path / "whole.gguf", hidden_size=64, head_dim=32, num_heads=2, num_kv_heads=1)
    write_tiny_model(
        tmp_path / "part.gguf", hidden_size=64, head_dim=32, num_heads=2, num_kv_heads=1, split_max_tensors=8
    )
    return whole, sorted(tmp_path.glob("part-*.gguf"))


def test_a_split_set_opens_through_any_of_its_files(split_set: tuple[Path, list[Path]]) -> None:
    whole, parts = split_set
    assert len(parts) == 3
    expected = open_gguf(whole)
    for part in parts:
        opened = open_gguf(part)
        assert set(opened.tensors) == set(expected.tensors)
        assert {info.shard for info in opened.tensors.values()} == {0, 1, 2}
        for name in expected.tensors:
            assert np.array_equal(opened.data(name), expected.data(name))
        assert opened.metadata["general.architecture"] == "llama"
        assert opened.metadata["tokenizer.ggml.tokens"] == expected.metadata["tokenizer.ggml.tokens"]


def test_a_missing_part_is_named(split_set: tuple[Path, list[Path]]) -> None:
    _, parts = split_set
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        with pytest.raises(ModelFileError, match=r"part-00002-of-00003\.gguf is missing"):
            open_gguf(part)


def test_a_renamed_part_says_how_it_must_be_named(split_set: tuple[Path, list[Path]]) -> None:
    _, parts = split_set
    for name in ("model.gguf", "part-00001-of-00003.gguf", "part-00002-of-00004.gguf"):
        renamed = parts[1].rename(parts[1].with_name(name))
        with pytest.raises(ModelFileError, match=r"part 2 of 3 .* must be named \.\.\.-00002-of-00003\.gguf"):
            open_gguf(renamed)
        renamed.rename(parts[1])


def test_a_part_with_the_name_of_another_is_noticed(split_set: tuple[Path, list[Path]]) -> None:
    _, parts = split_set
    second = parts[1].read_bytes()
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelFileError, match="it is not part 2 of 3, as its name says"):
        open_gguf(parts[0])
    parts[1].write_bytes(second)
    open_gguf(parts[0])


@pytest.mark.parametrize(("second", "total"), [("a", 2), ("b", 3), ("b", None)])
def test_parts_hold_each_tensor_of_the_model_once(tmp_path: Path, second: str, total: int | None) -> None:
    def write(second: str, total: int | None) -> None:
        for number, name in enumerate(("a", second)):
            keys = [key("split.no", 2, struct.pack("<H", number)), key("split.count", 2, struct.pack("<H", 2))]
            keys += [] if total is None else [key("split.tensors.count", 5, struct.pack("<i", total))]
            part = tmp_path / f"m-{number + 1:05d}-of-00002.gguf"
            part.write_bytes(model(keys=keys, tensors=[tensor(name, [4])]))

    write("b", 2)
    assert set(open_gguf(tmp_path / "m-00002-of-00002.gguf").tensors) == {"a", "b"}
    write(second, total)
    with pytest.raises(ModelFileError, match=r"the parts are not of one model|split\.tensors\.count is missing"):
        open_gguf(tmp_path / "m-00001-of-00002.gguf")


def test_the_content_hash_is_the_same_wherever_and_in_however_many_files(split_set: tuple[Path, list[Path]]) -> None:
    whole, parts = split_set
    expected = open_gguf(whole).content_hash()
    assert {open_gguf(part).content_hash() for part in parts} == {expected}
    moved = whole.rename(whole.with_name("moved.gguf"))
    assert open_gguf(moved).content_hash() == expected
    assert len(bytes.fromhex(expected)) == 32


def test_the_content_hash_sees_metadata_tables_and_the_sampled_data(tmp_path: Path) -> None:
    path = tmp_path / "hash.gguf"
    size = 5 * SAMPLE_BYTES

    def content_hash(name: str = "llama", dims: tuple[int, ...] = (size,), changed: int | None = None) -> str:
        data = bytearray(size * 4)
        if changed is not None:
            data[changed] = 1
        keys = [key("general.architecture", STRING, text(name))]
        path.write_bytes(model(keys=keys, tensors=[tensor("t", list(dims))], data=bytes(data)))
        return open_gguf(path).content_hash()

    hashes = [content_hash(), content_hash(name="qwen2"), content_hash(dims=(size // 2, 2))]
    last = size * 4 - 1
    hashes += [content_hash(changed=at) for at in (0, SAMPLE_BYTES - 1, last // 2, last - SAMPLE_BYTES + 1, last)]
    assert len(set(hashes)) == len(hashes)
    # What it does not see, so that whoever relies on it knows.
    assert content_hash(changed=SAMPLE_BYTES) == hashes[0]
