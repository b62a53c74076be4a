"""What only Gemma 4 has: layers of two shapes in the cache, layers that look at keys and values of others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_runner import running, tokens
from kernel_calls import assert_same_bits
from tiny_gemma4 import Gemma4
from tiny_models import write_tiny_model

from engine import load, model_twin
from engine.api import KVType, Message, Reply, SamplingParams
from engine.config import ModelConfig
from engine.errors import ModelFileError, UnsupportedModelError
from engine.gguf_file import open_gguf
from engine.kernels.program import Op
from engine.kv_layout import KVLayout
from engine.local import LocalEngine
from engine.matrices import ModelMatrices
from engine.model import Model

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": 1,
    "head_dim": 64,
    "ffn_size": 96,
    "num_layers": 7,
    "context_size": 512,
}
EDGE = Gemma4(local_kv_heads=1, shared=4, embedding=32)
"""As E2B and E4B: of seven layers two with a window have keys and values, and one that sees everything."""


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def written(name: str = "edge.gguf", **settings: Any) -> Path:
        return write_tiny_model(tmp_path / name, "gemma4", **{**SIZES, "gemma4": EDGE, **settings})

    return written


@pytest.mark.parametrize(("kv_type", "size"), [("f16", 2), ("f32", 4), ("q8_0", 17 / 16)])
def test_a_token_takes_the_keys_and_values_of_the_layers_that_have_some(
    write: Callable[..., Path], kv_type: KVType, size: float
) -> None:
    path = write()
    expected = 2 * (32 + 32 + 64) * size
    with load(path, threads=1, kv_type=kv_type) as engine:
        assert engine.info.kv_bytes_per_token == expected
        reply = engine.chat("words " * 40, max_tokens=3)
        blocks = -(-reply.stats.context_used // 64)
        assert reply.stats.kv_bytes == blocks * 64 * expected
    with open_gguf(path) as gguf:
        assert Model.estimate(gguf, kv_type)[1] == 64 * expected
        layout = KVLayout.of(ModelConfig.from_gguf(gguf), kv_type)
    assert layout.offsets == [0, int(64 * 2 * 32 * size), int(64 * 4 * 32 * size)]


def test_layers_look_at_the_last_keys_and_values_before_them_that_see_as_much(write: Callable[..., Path]) -> None:
    with open_gguf(write()) as gguf:
        config = ModelConfig.from_gguf(gguf)
    assert [config.kv_layer(n) for n in range(7)] == [0, 1, 2, 1, 1, 2, 1]
    assert config.attention_layers == (0, 1, 2)
    assert config.last_remembered == 2


def test_only_wanted_rows_go_on_behind_the_last_keys_and_values(write: Callable[..., Path]) -> None:
    with running(write()) as runner:
        operations = runner.model._program.operations
        keep = operations["code"].tolist().index(Op.KEEP)
        assert np.all(operations["wanted"][keep:])
        assert operations["code"][keep:].tolist().count(Op.ATTEND) == 5
        # A prompt whose rows nobody wants leaves no trace of later layers, and what comes next is the same.
        ids = tokens(140)
        table, other = runner.table(), runner.table()
        runner.step((table, ids[:139]), want=[])
        runner.step((other, ids[:139]), want=range(80, 139))
        assert_same_bits(runner.step((table, ids[139:])), runner.step((other, ids[139:])))


def test_what_layers_without_keys_have_no_use_for_is_passed_over(write: Callable[..., Path]) -> None:
    unused = {"attn_k.weight": (32, 64), "attn_v.weight": (32, 64), "attn_k_norm.weight": (32,)}
    tensors = {f"blk.4.{name}": np.ones(shape, np.float32) for name, shape in unused.items()}
    ids = tokens(20)
    with running(write()) as runner:
        expected, size = runner.step((runner.table(), ids)), runner.model.weight_bytes
    with running(write("more.gguf", tensors=tensors)) as runner:
        assert_same_bits(runner.step((runner.table(), ids)), expected)
        assert runner.model.weight_bytes == size


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        ({"attention.shared_kv_layers": 5}, "is 5, and no layer before these sees as much as each of them"),
        ({"attention.shared_kv_layers": 7}, "is 7, which is not between 0 and 6"),
        ({"attention.sliding_window_pattern": [True, False]}, "is not a yes or no for each of 7 layers"),
        ({"attention.head_count_kv": [1, 2, 1, 1, 1, 1, 1]}, "differs between layers that see as much"),
        ({"attention.head_count_kv": [1, 1]}, "is not a number between 1 and 1048576 for each of 7 layers"),
        ({"attention.value_length_swa": 48}, "keys of 32 and values of 48"),
        ({"attention.key_length_swa": 40, "attention.value_length_swa": 40}, "a head size of 40"),
        ({"feed_forward_length": [96] * 6 + [0]}, "is not a number between 1 and 1048576 for each of 7 layers"),
        ({"feed_forward_length": [96] * 7}, "ffn_down.weight is"),
        ({"embedding_length_per_layer_input": 40}, r"\(multiples of 32\)"),
        ({"embedding_length_per_layer_input": 64}, "per_layer_model_proj.weight is"),
        ({"embedding_length_per_layer_input": 0}, "tensor blk.0.inp_gate.weight is of a form"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(
    keys: dict[str, Any], reason: str, write: Callable[..., Path]
) -> None:
    path = write(metadata={f"gemma4.{key}": value for key, value in keys.items()})
    with open_gguf(path) as gguf, pytest.raises((ModelFileError, UnsupportedModelError), match=reason):
        Model.load(gguf)


def test_a_window_has_rotations_of_its_own_and_no_factors(write: Callable[..., Path]) -> None:
    def tables(**settings: Any) -> list[np.ndarray]:
        with open_gguf(write(**settings)) as gguf:
            config = ModelConfig.from_gguf(gguf)
        return [config.rope_tables(50, local)[0] for local in (True, False)]

    local, full = tables()
    assert local.shape == (50, 16)
    assert full.shape == (50, 32)
    other_local, other = tables(rope_factors=[1.0] * 8 + [1e30] * 24)
    assert_same_bits(other_local, local)
    assert_same_bits(other[:, :8], full[:, :8])
    assert np.all(other[:, 8:] == 1)
    third, same = tables(metadata={"gemma4.rope.freq_base_swa": 777.0})
    assert not np.array_equal(third, local)
    assert_same_bits(same, full)


def test_conversations_fork_are_undone_and_come_back_from_files_with_the_same_words(
    write: Callable[..., Path], tmp_path: Path
) -> None:
    def talk(engine: Callable[[], LocalEngine]) -> list[tuple[int, ...]]:
        def ask(messages: list[Message], conversation: str = "one") -> Reply:
            sampling = SamplingParams(seed=len(messages))
            return engine().chat(messages, max_tokens=9, sampling=sampling, conversation=conversation)

        said = [Message(role="user", content="a b c " * 30)]
        first = ask(said)
        said += [Message(role="assistant", content=first.text, ids=first.ids), Message(role="user", content="and d?")]
        second = ask(said)
        fork = ask([*said[:2], Message(role="user", content="or e?")], "two")
        undone = ask([*said[:2], Message(role="user", content="f!")])
        return [reply.ids for reply in (first, second, fork, undone)]

    path, reused = write(), []
    with load(path, threads=1, speculation="off") as engine:
        expected = talk(lambda: engine)
    with load(path, threads=2, kv_folder=tmp_path / "kept") as engine:
        assert talk(lambda: engine) == expected
    engines: list[LocalEngine] = []

    def fresh() -> LocalEngine:
        if engines:
            engines.pop().close()
        engines.append(load(path, threads=1, kv_folder=tmp_path / "again", kv_sessions=1))
        reused.append(engines[0].info.kept_tokens)
        return engines[0]

    assert talk(fresh) == expected
    engines[0].close()
    assert min(reused[1:]) > 64


def test_tokens_that_the_file_says_are_not_said_are_not_said(write: Callable[..., Path]) -> None:
    ids = tokens(20)
    with running(write()) as runner:
        expected = runner.step((runner.table(), ids))
    said = expected.argmax(-1).tolist()
    key = "tokenizer.ggml.suppress_tokens"
    with running(write("less.gguf", metadata={key: said[:3]})) as runner:
        found = runner.step((runner.table(), ids))
    with open_gguf(write("less.gguf", metadata={key: said[:3]})) as gguf:
        assert_same_bits(model_twin.forward(gguf, ids).logits, found)
    assert np.all(found[:, said[:3]] == np.float32(-1e30))
    others = np.delete(np.arange(expected.shape[1]), said[:3])
    assert_same_bits(found[:, others], expected[:, others])
    for wrong in ([expected.shape[1]], [-1], ["x"], "x"):
        with open_gguf(write("odd.gguf", metadata={key: wrong})) as gguf, pytest.raises(ModelFileError, match=key):
            Model.load(gguf)


def test_a_token_touches_a_row_of_the_tables_and_all_else(write: Callable[..., Path]) -> None:
    with open_gguf(write()) as gguf:
        weights, touched = Model.estimate(gguf)[0], Model.token_bytes(gguf)
        matrices = ModelMatrices(gguf, ModelConfig.from_gguf(gguf))
    table, embedding = matrices.given[0], matrices.embedding
    assert weights - touched == table.num_bytes - table.group_bytes - embedding.group_bytes  # which is the head too
