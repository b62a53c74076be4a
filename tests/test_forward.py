"""The numerics contract: a row's result depends on its own inputs and on what is before it, and on nothing else.

Every comparison is of bits. Chunks, threads, other conversations in the step, forks, what a block held before and the
instructions the kernels are compiled for must not show; and the compiled step is the one `model_twin` writes in NumPy.
"""

from __future__ import annotations

import gc
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_models import MODELS
from forward_runner import assert_same_cache, running, tokens
from kernel_calls import assert_same_bits, target_named
from tiny_models import write_tiny_model

from engine import model_twin
from engine.api import KVType
from engine.arch import ARCHITECTURES
from engine.buffers import MAX_WANTED
from engine.errors import UnsupportedModelError
from engine.gguf_file import open_gguf
from engine.kernels.plan import FEW_ROWS, GATED_ROWS, QUERY_TILE
from engine.kernels.target import ENVIRONMENT
from engine.model import Model

ROOT = Path(__file__).parents[1]

every_model = pytest.mark.parametrize("name", MODELS)
# Head sizes of 48 and 80 end in a run of 16 numbers in q8_0.
OTHER_TYPES: list[tuple[str, KVType]] = [("llama", "q8_0"), ("qwen3", "q8_0"), ("gemma3", "q8_0"), ("llama", "f32")]
OTHER_TYPES += [("gemma4", "q8_0"), ("gemma4", "f32")]
every_model_and_type = pytest.mark.parametrize(("name", "kv_type"), [*((name, "f16") for name in MODELS), *OTHER_TYPES])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The file of one of MODELS, written once."""
    folder = tmp_path_factory.mktemp("models")

    def path_of(name: str) -> Path:
        path = folder / f"{name}.gguf"
        return path if path.exists() else write_tiny_model(path, **MODELS[name])

    return path_of


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("llama", "blk.0.ffn_gate.bias"),
        ("llama", "blk.1.attn_norm.bias"),
        ("olmo2", "blk.1.attn_q.bias"),
        ("phi3", "blk.0.attn_qkv.scale"),
    ],
)
def test_a_tensor_that_a_step_would_pass_over_is_refused(architecture: Any, name: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "more.gguf", architecture, tensors={name: np.ones(16, np.float32)})
    with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError, match=f"tensor {name} is of a form of"):
        Model.load(gguf)


def test_every_architecture_is_here() -> None:
    assert {model["architecture"] for model in MODELS.values()} == set(ARCHITECTURES)


@pytest.mark.parametrize("token", [-1, -(2**31), "vocabulary", 2**31 - 1])
def test_a_token_that_the_model_does_not_have_never_reaches_compiled_code(
    token: Any, tiny: Callable[[str], Path]
) -> None:
    with running(tiny("llama")) as runner:
        table, vocabulary = runner.table(), runner.model.config.vocab_size
        token = vocabulary if token == "vocabulary" else token
        with pytest.raises(AssertionError, match=f"token id {token} is out of range, limit {vocabulary}"):
            runner.step((table, [1, token, 2]))
        runner.step((table, [vocabulary - 1]))


# ---------------------------------------------------------------- against NumPy
@every_model_and_type
def test_the_compiled_step_has_the_bits_of_the_numpy_step(
    name: str, kv_type: KVType, tiny: Callable[[str], Path]
) -> None:
    ids = tokens(70)  # beyond a block, and beyond the window
    with open_gguf(tiny(name)) as gguf:
        expected = model_twin.forward(gguf, ids, kv_type)
    assert np.isfinite(expected.logits).all()
    assert expected.logits.std() > 0.1
    for threads in (1, 2):
        with running(tiny(name), threads=threads, kv_type=kv_type) as runner:
            table = runner.table()
            logits = [runner.step((table, ids[first : first + 35])) for first in (0, 35)]
            assert_same_bits(np.concatenate(logits), expected.logits)
            assert_same_cache(runner, table, (expected.keys, expected.values))
            if table.state is not None:
                assert_same_bits(runner.state(table), expected.states)


@pytest.mark.parametrize("window", [0, 100, 600])
def test_parts_of_512_positions_have_the_bits_of_the_numpy_step(window: int, tmp_path: Path) -> None:
    """Contexts and windows that cross multiples of 512."""
    sizes = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 32, "num_layers": 2}
    path = write_tiny_model(tmp_path / "long.gguf", "gemma3", sliding_window=window, **sizes)
    ids = tokens(1100)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids)
    probes = [0, 99, 100, 511, 512, 513, 610, 611, 612, 1023, 1024, 1098]
    with running(path, threads=2, positions=1101) as runner:
        table = runner.table()
        assert_same_bits(runner.feed(table, ids, 512, probes), expected.logits[[*probes, 1099]])
        assert_same_cache(runner, table, (expected.keys, expected.values))


def test_as_many_query_heads_as_a_tile_holds_can_share_a_kv_head_and_no_more(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "num_kv_heads": 1, "head_dim": 16, "ffn_size": 32, "num_layers": 1}
    ids = tokens(13)
    path = write_tiny_model(tmp_path / "many.gguf", num_heads=QUERY_TILE, **sizes)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids)
    with running(path, threads=2) as runner:
        assert_same_bits(runner.step((runner.table(), ids)), expected.logits)
    more = write_tiny_model(tmp_path / "more.gguf", num_heads=QUERY_TILE + 2, **sizes)
    with open_gguf(more) as gguf, pytest.raises(UnsupportedModelError, match=f"{QUERY_TILE + 2} query heads"):
        Model.load(gguf)


@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_pieces_of_gate_and_up_that_end_amid_strips_do_not_show(threads: int, tmp_path: Path) -> None:
    """Five strips of 256: for any number of threads some piece ends amid one, with many threads several do."""
    sizes = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "num_layers": 2}
    path = write_tiny_model(tmp_path / "strips.gguf", ffn_size=5 * 256, **sizes)
    ids = tokens(FEW_ROWS + 1)
    with running(path, threads=threads) as runner:
        expected = runner.step((runner.table(), ids))  # more than a few: whole strips
        for few in (1, 3, FEW_ROWS):
            table = runner.table()
            assert_same_bits(runner.step((table, ids[:few])), expected[:few])
            assert_same_bits(runner.step((table, ids[few : few + 1])), expected[few : few + 1])


def test_few_rows_of_a_wide_feed_forward_layer_stay_in_the_room_they_have(tmp_path: Path) -> None:
    """Each thread keeps gate and up of GATED_ROWS x 256 values, which 16 rows fill several times over."""
    sizes = {"hidden_size": 64, "num_heads": 2, "num_kv_heads": 1, "head_dim": 32, "num_layers": 1}
    path = write_tiny_model(tmp_path / "wide.gguf", ffn_size=8 * GATED_ROWS * 256 // FEW_ROWS, **sizes)
    ids = tokens(FEW_ROWS + 1)
    for threads in (1, 2):
        with running(path, threads=threads) as runner:
            expected = runner.step((runner.table(), ids))  # more than a few
            table = runner.table()
            assert_same_bits(runner.step((table, ids[:-1])), expected[:-1])
            assert_same_bits(runner.step((table, ids[-1:])), expected[-1:])


# ---------------------------------------------------------------- chunks and threads
LENGTH = 600
PROBES = [*range(0, LENGTH, 40), 63, 64, 511, 512, 513]


@every_model_and_type
def test_chunks_and_threads_do_not_show(name: str, kv_type: KVType, tiny: Callable[[str], Path]) -> None:
    ids = tokens(LENGTH)
    expected = None
    # Threads wait for each other long where other work shares the CPUs: most single rows are left to one thread, and
    # to two those before and after position 512.
    for threads, chunks, late in (
        (1, (512, 64, 7, 2, 1), 0),
        (2, (512, 64, 7), 0),
        (2, (2, 1), 490),
        (3, (512, 64), 0),
    ):
        with running(tiny(name), threads=threads, kv_type=kv_type) as runner:
            for chunk in chunks:
                table = runner.table()
                logits = [runner.feed(table, ids[:late], 512, PROBES)[:-1]] if late else []
                logits.append(runner.feed(table, ids[late:], chunk, PROBES))
                found = np.concatenate(logits), runner.cache(table)
                expected = expected or found
                assert_same_bits(found[0], expected[0])
                assert_same_cache(runner, table, expected[1])
                table.release()


@every_model
def test_rows_that_are_not_wanted_do_not_show(name: str, tiny: Callable[[str], Path]) -> None:
    ids = tokens(50)
    with running(tiny(name), threads=2) as runner:
        everything = runner.step((runner.table(), ids))
        for want in ([], [0], [49], [3, 4, 31], range(1, 50, 2), range(MAX_WANTED)[:40]):
            table = runner.table()
            assert_same_bits(runner.step((table, ids), want=want), everything[list(want)])
            # The cache is whole all the same: the next token's logits say so.
            assert_same_bits(runner.step((table, ids[:1])), runner.feed(runner.table(), [*ids, ids[0]], 51))


def test_only_the_last_row_of_a_chunk_that_crosses_a_part_is_wanted(tiny: Callable[[str], Path]) -> None:
    """Wanted rows move to the front in the last layer, and bring their own share of attention with them."""
    ids = tokens(700)
    with running(tiny("llama"), threads=2) as runner:
        expected = runner.feed(runner.table(), ids, 64)
        table = runner.table()
        runner.step((table, ids[:250]), want=[])
        assert_same_bits(runner.step((table, ids[250:]), want=[449]), expected)


def test_a_thread_that_falls_behind_does_nothing_to_the_next_step(tiny: Callable[[str], Path]) -> None:
    """It still has a finished step's number when the context already holds the rows of a larger one."""
    with running(tiny("llama"), threads=2) as runner:
        model, buffers = runner.model, runner.model.buffers
        table = runner.table()
        runner.step((table, tokens(1)))
        expected = runner.step((table.fork(), tokens(64, seed=1)))
        number = int(buffers.generation[0])
        runner.step((table.fork(), tokens(1, seed=2)))
        context = model._context[0]
        whole = int(context["num_operations"])
        context["num_rows"] = 64
        context["num_operations"] = 1  # the embedding: enough to see, and it touches nothing but x
        buffers.x.fill(7)
        assert model._workers._step(model._context.ctypes.data, 1, number) == number + 1
        assert np.all(buffers.x == 7)
        context["num_operations"] = whole
        assert_same_bits(runner.step((table.fork(), tokens(64, seed=1))), expected)


def test_more_threads_than_cpus_do_not_show_in_steps_of_any_size(tiny: Callable[[str], Path]) -> None:
    rng = np.random.default_rng(5)
    sizes = rng.choice([1, 1, 1, 2, 3, 8, 33, 64], 150).tolist()
    found = []
    for threads in (1, 2, 4, 16):
        with running(tiny("llama"), threads=threads) as runner:
            table, logits = runner.table(), []
            for n, size in enumerate(sizes):
                if len(table) > 200:
                    table.truncate(10)
                logits.append(runner.step((table, tokens(size, seed=n))))
            found.append((np.concatenate(logits), runner.cache(table)))
    for logits, cache in found[1:]:
        assert_same_bits(logits, found[0][0])
        for ours, theirs in zip(chain(*cache), chain(*found[0][1]), strict=True):
            assert_same_bits(ours, theirs)


# ---------------------------------------------------------------- other conversations
@every_model
def test_conversations_that_share_a_step_do_not_show(name: str, tiny: Callable[[str], Path]) -> None:
    texts = [tokens(150, seed=1), tokens(70, seed=2), tokens(40, seed=3)]
    # (conversation, new rows) of each step: prompts beside single tokens, in any order.
    steps = [
        [(0, 50), (1, 3)],
        [(1, 1), (0, 1)],
        [(0, 39), (2, 1), (1, 1)],
        [(2, 10), (1, 50)],
        [(1, 1), (0, 1), (2, 1)],
    ]
    steps += [[(1, 14), (0, 19), (2, 28)], [(0, 40)]]
    with running(tiny(name), threads=2) as runner:
        alone = []
        for ids in texts:
            table = runner.table()
            alone.append((runner.feed(table, ids, 64, range(200)), runner.cache(table)))
        tables = [runner.table() for _ in texts]
        for step in steps:
            rows = [(n, len(tables[n]) + i) for n, count in step for i in range(count)]
            wanted = [row for row, (_, position) in enumerate(rows) if position % 3 != 1]
            parts = [(tables[n], texts[n][len(tables[n]) : len(tables[n]) + count]) for n, count in step]
            logits = runner.step(*parts, want=wanted)
            assert_same_bits(logits, np.array([alone[n][0][position] for n, position in (rows[w] for w in wanted)]))
        for table, ids, (_, cache) in zip(tables, texts, alone):
            assert len(table) == len(ids)
            assert_same_cache(runner, table, cache)


@every_model
def test_a_forked_conversation_goes_on_as_if_it_had_never_been_another(name: str, tiny: Callable[[str], Path]) -> None:
    start, one, other = tokens(100, seed=1), tokens(40, seed=2), tokens(40, seed=3)
    with running(tiny(name), threads=2) as runner:
        expected = [runner.feed(runner.table(), [*start, *ids], 512, range(100, 140)) for ids in (one, other)]
        table = runner.table()
        runner.feed(table, start, 33)
        table.rest()
        fork = table.fork()
        # In one step, in the block that both began with.
        both = runner.step((table, one[:20]), (fork, other[:20]))
        ours = np.concatenate([both[:20], runner.feed(table, one[20:], 7, range(140))])
        theirs = np.concatenate([both[20:], runner.feed(fork, other[20:], 1, range(140))])
        assert_same_bits(ours, expected[0])
        assert_same_bits(theirs, expected[1])
        # Undone to the middle of a shared block, and said otherwise.
        table.truncate(100)
        assert_same_bits(runner.feed(table, other, 11, range(140)), expected[1])


@every_model_and_type
def test_what_a_block_held_before_does_not_show(name: str, kv_type: KVType, tiny: Callable[[str], Path]) -> None:
    ids = tokens(90)
    with running(tiny(name), threads=2, blocks=3, kv_type=kv_type) as runner:
        table = runner.table()
        clean = runner.feed(table, ids, 37, range(64, 90))
        table.release()
        runner.pool.memory[:] = 0xFF  # NaN wherever one looks
        for chunk in (37, 1, 90):
            table = runner.table()
            assert_same_bits(runner.feed(table, ids, chunk, range(64, 90)), clean)
            table.release()


def test_a_model_that_is_closed_and_freed_leaves_another_alone(tiny: Callable[[str], Path]) -> None:
    ids = tokens(20)
    with running(tiny("llama"), threads=2) as runner:
        before = runner.step((runner.table(), ids))
        for name in ("qwen3", "llama"):
            with running(tiny(name), threads=2) as other:
                other.step((other.table(), ids))
        del other
        gc.collect()
        assert_same_bits(runner.step((runner.table(), ids)), before)


# ---------------------------------------------------------------- other instructions
def checksum(folder: str) -> str:
    """Of logits and caches of all MODELS in a folder, in mixed chunks and with two threads."""
    digest = hashlib.sha256()
    for name, kv_type in [*((name, "f16") for name in MODELS), *OTHER_TYPES]:
        with running(Path(folder) / f"{name}.gguf", threads=2, kv_type=kv_type) as runner:
            table = runner.table()
            for chunk in (90, 1, 5):
                digest.update(runner.feed(table, tokens(91, seed=chunk), chunk, range(0, 300, 3)).tobytes())
            for part in chain(*runner.cache(table)):
                digest.update(part.tobytes())
    return digest.hexdigest()


def test_kernels_compiled_without_avx512_give_the_same_bits(tiny: Callable[[str], Path]) -> None:
    lesser = target_named("avx2").name
    folder = {str(tiny(name).parent) for name in MODELS}.pop()
    environment = {
        **os.environ,
        ENVIRONMENT: lesser,
        # NumPy goes without as well: tables and scales must not depend on it either.
        "NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_ICL AVX512_SPR",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        "PYTHONWARNINGS": "ignore",  # of features that this CPU lacks anyway
    }
    code = f"import test_forward; print(test_forward.checksum({folder!r}))"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == checksum(folder)


# ---------------------------------------------------------------- a real model
@pytest.mark.parametrize("name", ["smollm2-135m"])
def test_a_real_model_keeps_the_contract(name: str, model_path: Callable[[str], Path]) -> None:
    ids, probes = tokens(160, 10_000), range(0, 160, 9)
    expected = None
    for threads, chunks in ((2, (160, 64, 7)), (1, (101, 1))):
        with running(model_path(name), threads=threads) as runner:
            for chunk in chunks:
                table = runner.table()
                found = runner.feed(table, ids, chunk, probes), runner.cache(table)
                expected = expected or found
                assert_same_bits(found[0], expected[0])
                assert_same_cache(runner, table, expected[1])


def test_a_real_model_has_the_bits_of_the_numpy_step(model_path: Callable[[str], Path]) -> None:
    path, ids = model_path("smollm2-135m"), tokens(3, 10_000)
    with open_gguf(path) as gguf:
        expected = model_twin.forward(gguf, ids)
    with running(path, threads=2) as runner:
        assert_same_bits(runner.step((runner.table(), ids)), expected.logits)
