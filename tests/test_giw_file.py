"""Laid-out weights kept on disk: used only when whole and theirs, replaced when not, capped."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny_model

from engine import giw_file
from engine.gguf_file import open_gguf
from engine.kv_pool import KVPool
from engine.model import LoadOptions, Model

KEY = giw_file.key_of("0" * 64, "a matrix at 0")
WEIGHTS = np.random.default_rng(0).integers(0, 256, 3 * giw_file.PAGE + 17, dtype=np.uint8)


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(giw_file, "folder", lambda: tmp_path / "weights")


def kept(key: bytes = KEY, size: int = len(WEIGHTS)) -> np.ndarray | None:
    return giw_file.open_kept(key, size, threads=2)


def test_weights_come_back_as_they_were() -> None:
    giw_file.keep(KEY, "tiny", WEIGHTS, threads=2)
    found = kept()
    assert found is not None
    assert np.array_equal(found, WEIGHTS)
    assert [k.name for k in giw_file.list_kept()] == ["tiny"]


def test_any_damage_means_laying_out_again() -> None:
    giw_file.keep(KEY, "tiny", WEIGHTS, threads=1)
    path = giw_file.path_of(KEY)
    whole = path.read_bytes()
    for at in (0, 13, 20, 60, 80, 90, 100, 158, giw_file.PAGE, giw_file.PAGE + 5000, len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert kept() is None, f"byte {at}"
    for length in (0, 10, giw_file.PAGE, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert kept() is None
    path.write_bytes(whole + b"x")
    assert kept() is None
    path.write_bytes(whole)
    assert kept() is not None


def test_other_weights_are_not_taken_for_these() -> None:
    giw_file.keep(KEY, "tiny", WEIGHTS, threads=1)
    other = giw_file.key_of("0" * 64, "a matrix at 4096")
    assert giw_file.path_of(other) == giw_file.path_of(KEY)  # the same model, laid out in another way
    assert kept(other) is None
    stranger = giw_file.key_of("1" * 64, "a matrix at 0")
    os.rename(giw_file.path_of(KEY), giw_file.path_of(stranger))
    assert kept(stranger) is None


def test_the_least_recently_used_goes_when_the_cap_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(giw_file.CAP_ENVIRONMENT, str(2.5 * (len(WEIGHTS) + giw_file.PAGE) / 1e9))
    keys = [giw_file.key_of(str(n), "a matrix at 0") for n in range(3)]
    for n, key in enumerate(keys[:2]):
        giw_file.keep(key, f"model {n}", WEIGHTS, threads=1)
        os.utime(giw_file.path_of(key), (n + 1, n + 1))
    assert kept(keys[0]) is not None  # used now, so the other one is the oldest
    giw_file.keep(keys[2], "model 2", WEIGHTS, threads=1)
    assert {k.name for k in giw_file.list_kept()} == {"model 0", "model 2"}


def test_a_cap_of_zero_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(giw_file.CAP_ENVIRONMENT, "0")
    giw_file.keep(KEY, "tiny", WEIGHTS, threads=1)
    assert giw_file.list_kept() == []


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("a file where the folder should be")
    giw_file.keep(KEY, "tiny", WEIGHTS, threads=1)
    assert kept() is None


def test_a_model_starts_from_its_kept_weights_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giw_file, "WORTH_KEEPING", 0)
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama")
    memories = []
    for _ in range(2):
        with open_gguf(path) as gguf:
            model = Model.load(gguf, LoadOptions(threads=2, max_positions=128))
            memories.append((bytes(model.weights.memory), model.weights.memory.flags.writeable))
            model.close()
    assert [k.name for k in giw_file.list_kept()] == ["tiny"]
    assert memories[0][0] == memories[1][0]
    assert [writeable for _, writeable in memories] == [True, False]  # laid out, then mapped


@pytest.mark.parametrize("refusal", ["no such word", "the kernel says no"])
def test_where_large_pages_are_refused_models_load_all_the_same(
    refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(giw_file, "WORTH_KEEPING", 0)
    if refusal == "no such word":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    else:
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 12345, raising=False)
        with pytest.raises(OSError, match="Invalid argument"):
            mmap.mmap(-1, 4096).madvise(mmap.MADV_HUGEPAGE)
    path = write_tiny_model(tmp_path / "tiny.gguf", "llama")
    memories = []
    for _ in range(2):
        with open_gguf(path) as gguf:
            model = Model.load(gguf, LoadOptions(threads=2, max_positions=128))
            memories.append(bytes(model.weights.memory))
            assert not model.new_pool(2).memory.any()
            model.close()
    assert memories[0] == memories[1]
    assert KVPool(4096, 3).memory.shape == (3, 4096)


def in_large_pages(start: int) -> int:
    """Bytes of the mapping of a file at this address that lie in large pages; 0 where the system does not say."""
    try:
        lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    except OSError:
        return 0
    for line in lines:
        if line.startswith(f"{start:x}-"):
            return next((int(more.split()[1]) << 10 for more in lines if more.startswith("FilePmdMapped:")), 0)
    return 0


def mapped_address(path: Path) -> tuple[np.ndarray, int]:
    """A file, read as mapped [bytes] u8, and its address."""
    with path.open("rb") as file:
        bytes_ = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    int(bytes_[::4096].sum())
    return bytes_, bytes_.ctypes.data


def test_a_kept_file_lies_in_large_pages_where_files_can(tmp_path: Path) -> None:
    size = 40 << 20
    weights = np.random.default_rng(1).integers(0, 256, size - giw_file.PAGE, dtype=np.uint8)
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(giw_file.PAGE) + weights.tobytes())
    whole, start = mapped_address(plain)
    if in_large_pages(start) < size:
        pytest.skip("this kernel or file system has no large pages for files, or none are free")
    del whole
    giw_file.keep(KEY, "tiny", weights, threads=2)
    path = giw_file.path_of(KEY)
    for written in (True, False):  # as it was written, and as it is read when nothing of it is in memory
        if not written:
            with path.open("rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        found = kept(size=len(weights))
        assert found is not None
        assert np.array_equal(found, weights)
        assert in_large_pages(found.ctypes.data - giw_file.PAGE) >= size * 0.95
        del found
