"""Models larger than memory: refused, or read from the disk as steps touch them, with the same bits."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import running, tokens
from kernel_calls import assert_same_bits
from test_memory import GIB, plan
from tiny_models import write_tiny_model

import engine
from engine import backend, giw_file
from engine.api import SamplingParams
from engine.errors import OutOfMemoryError
from engine.gguf_file import open_gguf
from engine.model import Model
from engine.quant import TensorType

ROOT = Path(__file__).parents[1]
# 50 MB of weights, of which a token touches a sixteenth and the rest of the model.
MIXTURE: dict[str, Any] = {
    "architecture": "qwen3moe",
    "hidden_size": 256,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 64,
    "num_layers": 2,
    "experts": 64,
    "experts_used": 4,
    "ffn_size": 512,
    "expert_ffn_size": 448,
    "tensor_types": TensorType.Q8_0,
}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("mixture") / "mixture.gguf", **MIXTURE)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(giw_file, "folder", lambda: tmp_path / "weights")
    return tmp_path / "weights"


def from_disk(path: Path) -> np.ndarray:
    with running(path, from_disk=True) as runner:
        return runner.step((runner.table(), tokens(40)))


def in_a_process(code: str, *args: Path) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, args)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# ---------------------------------------------------------------- what is planned
def test_a_model_that_does_not_fit_is_refused_and_the_way_out_is_named() -> None:
    with pytest.raises(OutOfMemoryError, match="or run it from the disk, slowly: --from-disk"):
        plan(weight_bytes=8 * GIB)


def test_from_the_disk_weights_need_not_fit_and_both_numbers_are_said() -> None:
    got = plan(weight_bytes=8 * GIB, from_disk=True, token_bytes=GIB)
    assert got.from_disk
    assert got.context_size == 8192
    (notice,) = got.notices
    assert "8,192 MiB of weights, and 4,096 MiB of memory are free" in notice
    assert "1,024 MiB of them for a token; a token waits for what is not in memory" in notice


def test_a_token_that_touches_more_than_memory_waits_for_the_disk_each_time() -> None:
    (notice,) = plan(weight_bytes=8 * GIB, from_disk=True, token_bytes=8 * GIB).notices
    assert "8,192 MiB of them for a token; each token waits for the disk" in notice


def test_half_of_memory_or_what_a_token_touches_is_left_for_weights() -> None:
    for token_bytes, blocks in ((GIB, 3 * 1024), (8 * GIB, 2 * 1024)):
        got = plan(32_768, kv_sessions=100, weight_bytes=8 * GIB, from_disk=True, token_bytes=token_bytes)
        assert got.num_blocks == blocks
    with pytest.raises(OutOfMemoryError, match=r"close other programs or choose a smaller model$"):
        plan(available=2 * 2**20, weight_bytes=8 * GIB, from_disk=True, token_bytes=GIB)


def test_weights_that_fit_are_planned_as_ever() -> None:
    got = plan(from_disk=True, token_bytes=GIB)
    assert got.notices == ()
    assert got.from_disk


def test_what_a_token_touches_counts_the_experts_it_passes(mixture: Path) -> None:
    with open_gguf(mixture) as gguf:
        whole, touched = Model.estimate(gguf)[0], Model.token_bytes(gguf)
        experts = sum(t.nbytes for name, t in gguf.tensors.items() if "_exps." in name)
        row = gguf.tensors["token_embd.weight"].nbytes // gguf.tensors["token_embd.weight"].shape[0]
    assert abs(touched - 16 * row - (whole - experts * 60 / 64)) < 1000


# ---------------------------------------------------------------- what is done
def test_weights_from_the_disk_give_the_bits_of_those_in_memory(mixture: Path, folder: Path) -> None:
    with running(mixture) as runner:
        expected = runner.step((runner.table(), tokens(40)))
    assert not list(folder.glob("*"))  # too small to be kept, unless it is asked for
    assert_same_bits(from_disk(mixture), expected)
    (kept,) = folder.glob("*.giw")
    before = kept.stat().st_ino
    assert_same_bits(from_disk(mixture), expected)
    assert kept.stat().st_ino == before  # written once
    with open_gguf(mixture) as gguf:
        assert kept.stat().st_size > Model.estimate(gguf)[0]


def test_the_written_file_is_the_one_that_a_start_in_memory_would_keep(
    mixture: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from_disk(mixture)
    (path,) = folder.glob("*.giw")
    written = path.read_bytes()
    path.unlink()
    monkeypatch.setattr(giw_file, "WORTH_KEEPING", 0)
    with running(mixture):
        pass
    assert path.read_bytes() == written
    # And it is found whole.
    with running(mixture) as runner:
        assert runner.model.weights._writer is None


def test_a_cut_or_foreign_file_is_written_anew(mixture: Path, folder: Path) -> None:
    expected = from_disk(mixture)
    (path,) = folder.glob("*.giw")
    whole = path.read_bytes()
    for damaged in (whole[:-1], whole[:30] + b"x" + whole[31:], b""):
        path.write_bytes(damaged)
        assert_same_bits(from_disk(mixture), expected)
        assert path.read_bytes() == whole


def test_a_disk_without_room_is_an_error_that_says_so(
    mixture: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(giw_file.CAP_ENVIRONMENT, "0.01")
    with pytest.raises(OutOfMemoryError, match=r"0\.0 GB, cannot be laid out in .*: too large for the cap"):
        from_disk(mixture)
    monkeypatch.delenv(giw_file.CAP_ENVIRONMENT)
    # `make_room` looks, and another program fills the disk meanwhile.
    real = giw_file.write

    def full(*args: Any) -> None:
        def lay_out(put: Any) -> None:
            def put_no_more(offset: int, piece: np.ndarray) -> None:
                if offset > 1_000_000:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                put(offset, piece)

            args[3](put_no_more)

        real(*args[:3], lay_out)

    monkeypatch.setattr(giw_file, "write", full)
    with pytest.raises(OutOfMemoryError, match="No space left on device"):
        from_disk(mixture)
    assert list(folder.iterdir()) == []


def test_an_engine_with_less_memory_than_weights_refuses_or_runs_as_is_chosen(
    mixture: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "available_memory", lambda: 30 * 2**20)
    with pytest.raises(OutOfMemoryError, match="--from-disk"):
        engine.load(mixture)
    with engine.load(mixture, from_disk=True, threads=1) as loaded:
        assert any("weights are read from the disk" in notice for notice in loaded.info.notices)
        assert loaded.chat("hello", max_tokens=4).stats.completion_tokens == 4


def test_a_model_that_takes_most_of_what_is_free_is_mapped_where_the_disk_has_room(
    mixture: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "available_memory", lambda: 70 * 2**20)
    replies = []
    for cap in ("0.001", "20"):
        monkeypatch.setenv(giw_file.CAP_ENVIRONMENT, cap)
        with engine.load(mixture, threads=1, context_size=256) as loaded:
            assert not any("disk" in notice for notice in loaded.info.notices)
            replies.append(loaded.chat("hello", max_tokens=4, sampling=SamplingParams(temperature=0)).ids)
        assert len(list(folder.glob("*.giw"))) == (cap == "20")
    assert replies[0] == replies[1]


_MAP = """
import resource, sys
from pathlib import Path
from engine import giw_file
from engine.errors import OutOfMemoryError
from engine.gguf_file import open_gguf
from engine.model import LoadOptions, Model

giw_file.folder = lambda: Path(sys.argv[2])
gguf = open_gguf(Path(sys.argv[1]))
Model.load(gguf, LoadOptions(threads=1, max_positions=64, max_rows=4)).close()  # what code needs is mapped
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 20_000_000, used + 20_000_000))
try:
    Model.load(gguf, LoadOptions(threads=1, max_positions=64, max_rows=4, from_disk=True))
except OutOfMemoryError as error:
    print(error)
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_limit_on_addresses_is_said_before_the_file_is_written(mixture: Path, folder: Path) -> None:
    done = in_a_process(_MAP, mixture, folder)
    assert "cannot be mapped" in done
    assert "ulimit -v" in done
    assert not list(folder.glob("*"))


_MEASURE = """
import sys
from pathlib import Path
from engine import giw_file
from engine.gguf_file import open_gguf
from engine.model import LoadOptions, Model
from forward_runner import Runner, tokens
from engine.kv_cache import KVPool

def private():
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("RssAnon"))
    return int(line.split()[1]) * 1024

def mapped():
    lines = Path("/proc/self/smaps").read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.endswith(".giw"))
    return next(int(line.split()[1]) * 1024 for line in lines[start:] if line.startswith("Rss:"))

giw_file.folder = lambda: Path(sys.argv[2])
before = private()
model = Model.load(open_gguf(Path(sys.argv[1])), LoadOptions(threads=1, max_positions=128, max_rows=8, from_disk=True))
pool = KVPool(model.kv_block_bytes, 2)
model.bind_pool(pool)
runner = Runner(model, pool)
runner.step((runner.table(), tokens(1)))
print(private() - before, mapped(), model.weight_bytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
def test_a_token_needs_little_of_the_weights_in_memory(mixture: Path, folder: Path) -> None:
    """At the start that writes the file too: what is private stays small, and what is mapped is what was touched."""
    for _ in range(2):
        private, mapped, whole = map(int, in_a_process(_MEASURE, mixture, folder).split())
        assert whole > 45e6
        assert private < 0.4 * whole
        assert mapped < 0.6 * whole


# ---------------------------------------------------------------- by hand
@pytest.mark.skipif(not os.environ.get("GOINFER_TEST_30B"), reason="writes 35 GB: set GOINFER_TEST_30B to a folder")
def test_thirty_billion_weights_run_a_token() -> None:
    import large_mixture

    folder = Path(os.environ["GOINFER_TEST_30B"])
    try:
        print(large_mixture.measure(folder))
    finally:
        shutil.rmtree(folder / "goinfer-30b", ignore_errors=True)
