"""PyTorch against the kernels, and against itself: the same files, K/V and words, within stated bounds or bit by bit.

A device with memory of its own is played by the CPU: the sizes of a GPU's work, its forms of weights, its pool.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from forward_models import MODELS
from forward_runner import Runner, running, tokens
from kernel_calls import assert_same_bits
from tiny_models import random_blocks, write_tiny_model

import engine
from engine.api import KVType, Message, SamplingParams
from engine.config import ModelConfig
from engine.errors import OutOfMemoryError, UnsupportedModelError, UsageError
from engine.gguf_file import GGUFFile, open_gguf
from engine.kv_cache import KVPool
from engine.kv_file import KVFile
from engine.kv_layout import Identity
from engine.local import LocalEngine
from engine.model import LoadOptions
from engine.quant import TensorType, dequantize

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'goinfer-chat[torch]'")

from engine.torch_backend import device as devices  # noqa: E402
from engine.torch_backend import weights  # noqa: E402
from engine.torch_backend.delta import runs_of_tile  # noqa: E402
from engine.torch_backend.dequantize import dequantize as dequantize_in_torch  # noqa: E402
from engine.torch_backend.kv import DevicePool  # noqa: E402
from engine.torch_backend.matrices import Form  # noqa: E402
from engine.torch_backend.model import TorchModel  # noqa: E402

CPU = devices.device("cpu")
LIKE_A_GPU = dataclasses.replace(CPU, forms=("f16", "blocks"), rows=64, queries=16, own_memory=True)

every_model = pytest.mark.parametrize("name", MODELS)
every_device = pytest.mark.parametrize(
    ("device", "form"), [(CPU, "f32"), (LIKE_A_GPU, "f16"), (LIKE_A_GPU, "blocks")], ids=["cpu", "f16", "blocks"]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Callable[..., Path]:
    """The file of one of MODELS, written once; with weights in f32 on demand."""

    def path_of(name: str, *, exact: bool = False) -> Path:
        path = folder / f"{name}{' exact' if exact else ''}.gguf"
        kinds = {"tensor_types": TensorType.F32} if exact else {}
        return path if path.exists() else write_tiny_model(path, **{**MODELS[name], **kinds})

    return path_of


def on_torch(
    gguf: GGUFFile,
    device: devices.Device = CPU,
    form: Form = "f32",
    kv_type: KVType = "f16",
    blocks: int = 48,
    threads: int = 1,
) -> Runner:
    """A model with a pool of its own; the test is skipped where the backend says that it does not know the model."""
    try:
        model: Any = TorchModel(gguf, device, form, LoadOptions(threads=threads, max_positions=1024, kv_type=kv_type))
    except UnsupportedModelError as error:
        if "the torch backend does not know" not in str(error):
            raise
        pytest.skip(str(error))
    return Runner(model, model.new_pool(blocks, 24, 6))


def differences(ours: np.ndarray, theirs: np.ndarray) -> tuple[float, float]:
    """The largest and the mean difference of logits, in units of their spread."""
    away = np.abs(ours - theirs) / theirs.std()
    return float(away.max()), float(away.mean())


# ---------------------------------------------------------------- against the kernels
@pytest.mark.parametrize("type", TensorType, ids=lambda type: type.name)
def test_weights_are_the_same_bits(type: TensorType) -> None:
    raw = random_blocks(type, (5, 512), np.random.default_rng(0))
    assert_same_bits(dequantize_in_torch(type, torch.from_numpy(raw.copy())).numpy(), dequantize(type, raw))


@every_model
def test_exact_weights_give_logits_and_kv_within_millionths(name: str, tiny: Callable[..., Path]) -> None:
    """With f32 weights and K/V neither side rounds anything: what is left is the order of sums.

    Where a running state gives nearly nothing, the norm behind it makes that large, and what is left of it: in f64 both
    sides are found equally far away there, up to 40 millionths.
    """
    ids, probes = tokens(600), range(0, 600, 9)
    with open_gguf(tiny(name, exact=True)) as gguf:
        runner = on_torch(gguf, kv_type="f32")
        table = runner.table()
        theirs, cache = runner.feed(table, ids, 512, probes), runner.cache(table)
    with running(tiny(name, exact=True), kv_type="f32") as kernels:
        table = kernels.table()
        ours, expected = kernels.feed(table, ids, 512, probes), kernels.cache(table)
        has_states = kernels.model.config.delta is not None
    largest, mean = differences(ours, theirs)
    assert largest < (1e-4 if has_states else 3e-5)
    assert mean < 4e-6
    for found, wanted in zip(chain(*cache), chain(*expected), strict=True):
        assert np.abs(found - wanted).max() < 1e-4 * wanted.std()


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@every_model
def test_kv_are_rounded_alike(name: str, kv_type: KVType, tiny: Callable[..., Path]) -> None:
    """A number that lies between two of the type's may go either way: by one step, and seldom.

    Over K and V in f16 the kernels' attention is in integers of 14 bits (`kernels/fixed.py`), and PyTorch's is not.
    """
    ids = tokens(70)
    with open_gguf(tiny(name, exact=True)) as gguf:
        runner = on_torch(gguf, kv_type=kv_type)
        table = runner.table()
        theirs, cache = runner.feed(table, ids, 64, range(70)), runner.cache(table)
    with running(tiny(name, exact=True), kv_type=kv_type) as kernels:
        table = kernels.table()
        ours, expected = kernels.feed(table, ids, 64, range(70)), kernels.cache(table)
        first = kernels.model.config.attention_layers[0]
    assert differences(ours, theirs)[1] < {"f16": 3e-3, "q8_0": 4e-3}[kv_type]
    for found, wanted in zip(cache, expected):
        same = np.mean(found[0] == wanted[0])  # of the first layer, before differences add up, if it has K and V
        # A scale that goes the other way takes 32 numbers along.
        assert same > {"f16": 0.98 if first else 0.995, "q8_0": 0.97}[kv_type]
        assert np.abs(found[0].astype(np.float32) - wanted[0]).max() <= np.abs(wanted[0]).max() / 100


@every_model
def test_quantized_weights_differ_by_the_rounding_of_activations(name: str, tiny: Callable[..., Path]) -> None:
    """The kernels round activations to int8 and PyTorch does not: this is the price of that, in random models."""
    ids = tokens(70)
    with open_gguf(tiny(name)) as gguf:
        runner = on_torch(gguf)
        theirs = runner.feed(runner.table(), ids, 64, range(70))
    with running(tiny(name)) as kernels:
        ours = kernels.feed(kernels.table(), ids, 64, range(70))
        experts, has_states = kernels.model.config.experts, kernels.model.config.delta is not None
    away = np.abs(ours - theirs) / theirs.std()
    # A row may be near a tie between two experts, and then goes another way, and those that see it with it. And a state
    # may give nearly nothing, which the norm behind it makes as large as what others give: noise of the size of the
    # rounding, added to PyTorch's activations, takes a row as far.
    assert np.mean(away.max(-1) > 0.25) <= (0.5 if has_states else 0.35 if experts else 0)
    assert np.median(away) < (0.06 if has_states else 0.03)


@pytest.mark.parametrize("form", ["f16", "blocks"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma3"])
def test_half_precision_differs_by_thousandths(name: str, form: Form, tiny: Callable[..., Path]) -> None:
    ids = tokens(70)
    with open_gguf(tiny(name)) as gguf:
        found = []
        for device, kind in ((CPU, "f32"), (LIKE_A_GPU, form)):
            runner = on_torch(gguf, device, kind)
            found.append(runner.feed(runner.table(), ids, 64, range(70)))
    largest, mean = differences(found[1], found[0])
    assert 0 < mean < 2e-3
    assert largest < 2e-2


def test_activations_too_large_for_half_precision_do_not_overflow(tiny: Callable[..., Path]) -> None:
    with open_gguf(tiny("gemma3")) as gguf:
        model: Any = on_torch(gguf, LIKE_A_GPU, "f16").model
        matrix = model._weights.layers[0].output.matrix
        x = torch.ones((64, 128)) * torch.tensor([1.0, 1e6, 1e30, 0.0])[torch.arange(64) % 4][:, None]
        out = matrix.times(x)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out[1], out[0] * 1e6, rtol=2e-3, atol=1e3)
    assert not out[3].any()


@pytest.mark.parametrize("name", ["qwen35", "qwen3next"])
def test_running_states_are_the_kernels_within_millionths(name: str, tiny: Callable[..., Path]) -> None:
    """Number by number, so that they lie alike too, in memory and in files."""
    ids = tokens(150)
    with open_gguf(tiny(name, exact=True)) as gguf:
        runner = on_torch(gguf, kv_type="f32")
        table = runner.table()
        runner.feed(table, ids, 64)
        found = runner.state(table)
    with running(tiny(name, exact=True), kv_type="f32") as kernels:
        table = kernels.table()
        kernels.feed(table, ids, 64)
        expected = kernels.state(table)
    assert np.abs(found - expected).max() < 4e-5 * expected.std()


# ---------------------------------------------------------------- the contract, as far as it holds
@every_device
@every_model
def test_chunks_and_other_conversations_do_not_show(
    name: str, device: devices.Device, form: Form, tiny: Callable[..., Path]
) -> None:
    with open_gguf(tiny(name)) as gguf:
        assert_chunks_do_not_show(on_torch(gguf, device, form))


def test_chunks_and_other_conversations_do_not_show_where_two_threads_share_a_product(folder: Path) -> None:
    path = write_tiny_model(folder / "wide.gguf", "llama", num_layers=1, hidden_size=512, ffn_size=1024)
    with open_gguf(path) as gguf:
        runner = on_torch(gguf, threads=2)
        assert torch.get_num_threads() == runner.model.threads == 2
        assert_chunks_do_not_show(runner)


def assert_chunks_do_not_show(runner: Runner) -> None:
    """The bits of a row are those of its own conversation, however it came to be in a step."""
    texts = [tokens(150, seed=1), tokens(70, seed=2), tokens(40, seed=3)]
    steps = [
        [(0, 50), (1, 3)],
        [(1, 1), (0, 1)],
        [(0, 39), (2, 1), (1, 1)],
        [(2, 10), (1, 50)],
        [(1, 1), (0, 1), (2, 1)],
        [(1, 14), (0, 19), (2, 28)],
        [(0, 40)],
    ]
    alone = []
    for ids in texts:
        table = runner.table()
        alone.append(runner.feed(table, ids, 512, range(200)))
    tables = [runner.table() for _ in texts]
    for step in steps:
        rows = [(n, len(tables[n]) + i) for n, count in step for i in range(count)]
        wanted = [row for row, (_, position) in enumerate(rows) if position % 3 != 1]
        parts = [(tables[n], texts[n][len(tables[n]) : len(tables[n]) + count]) for n, count in step]
        logits = runner.step(*parts, want=wanted)
        assert_same_bits(logits, np.array([alone[n][position] for n, position in (rows[w] for w in wanted)]))


@pytest.mark.parametrize(
    ("device", "form", "kv_type"), [(CPU, "f32", "f16"), (LIKE_A_GPU, "f16", "q8_0")], ids=["cpu", "like a gpu"]
)
def test_steps_across_parts_of_512_positions_do_not_show(
    device: devices.Device, form: Form, kv_type: KVType, tiny: Callable[..., Path]
) -> None:
    ids, probes = tokens(560), [*range(0, 480, 60), *range(500, 530), 559]
    with open_gguf(tiny("gemma3")) as gguf:
        runner = on_torch(gguf, device, form, kv_type)
        expected = runner.feed(runner.table(), ids, 512, probes)
        for chunk, late in ((7, 460), (1, 540), (200, 0)):
            table = runner.table()
            found = [runner.feed(table, ids[:late], 64, probes)[:-1]] if late else []
            assert_same_bits(np.concatenate([*found, runner.feed(table, ids[late:], chunk, probes)]), expected)
            table.release()


@pytest.mark.parametrize("size", [1, 3, 4, 16])
def test_runs_leave_in_each_slot_the_rows_up_to_its_end(size: int) -> None:
    """Whatever tiles a step is cut into; segments without rows are copies."""
    states = np.array([[(0, 0), (1, 5), (2, 9)], [(3, 1), (4, 1), (5, 4)], [(6, 2), (6, 2), (6, 2)]])
    tables = np.repeat([0, 1, 2], [9, 4, 2])
    slots = [[f"before {slot}"] for slot in range(7)]
    for first in range(0, len(tables), size):
        last = min(first + size, len(tables))
        for run in runs_of_tile(tables, states, first, last):
            slots[run.target] = [*slots[run.source], *map(str, range(first + run.first, first + run.last))]
    rows = [str(row) for row in range(15)]
    assert slots[:3] == [["before 0", *rows[:end]] for end in (0, 5, 9)]
    assert slots[3:6] == [["before 3", *rows[9:end]] for end in (10, 10, 13)]
    assert slots[6] == ["before 6", *rows[13:]]


# ---------------------------------------------------------------- the cache of a device
def test_a_device_with_memory_of_its_own_has_the_same_blocks(tiny: Callable[..., Path], tmp_path: Path) -> None:
    """Byte for byte, forked, copied and through a file."""
    ids = [int(i) for i in tokens(150)]
    with open_gguf(tiny("llama")) as gguf:
        own = on_torch(gguf, dataclasses.replace(CPU, own_memory=True))
        shared = on_torch(gguf)
        identity = Identity.of(own.model.config, gguf.content_hash(), numerics=own.model.numerics)
        table, other = own.table(), shared.table()
        expected = own.feed(table, ids, 64)
        assert_same_bits(shared.feed(other, ids, 64), expected)
        assert isinstance(own.pool, DevicePool)
        assert type(shared.pool) is KVPool
        for mine, theirs in zip(table.blocks, other.blocks):
            assert np.array_equal(own.pool.read(mine), shared.pool.read(theirs))
        fork = table.fork(140)
        assert_same_bits(own.step((fork, ids[140:]), want=[9]), expected)
        with KVFile.open(tmp_path / "one.giw-kv", identity) as file:
            file.save(table, own.pool)
        for runner in (own, shared):
            back = runner.table()
            with KVFile.open(tmp_path / "one.giw-kv", identity) as file:
                assert file.restore(back, runner.pool, 149) == 149
            assert_same_bits(runner.step((back, ids[149:]), want=[0]), expected)


def test_tokens_that_the_file_says_are_not_said_are_not_said(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", metadata={"tokenizer.ggml.suppress_tokens": [3, 99]})
    with open_gguf(path) as gguf:
        runner = on_torch(gguf)
        logits = runner.step((runner.table(), tokens(9)))
    assert np.all(logits[:, [3, 99]] == np.float32(-1e30))
    assert np.all(np.abs(np.delete(logits, [3, 99], axis=1)) < 1e3)


# ---------------------------------------------------------------- what it refuses
@pytest.mark.parametrize(("known", "name"), [("_KNOWN_FACTS", "unrotated_layers"), ("_KNOWN_SIZES", "rope_scale")])
def test_a_fact_of_an_architecture_that_it_does_not_know_is_refused_by_name(
    known: str, name: str, tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, known, getattr(weights, known) - {name})
    said = rf"the torch backend does not know smollm3 \({name.replace('_', ' ')}\)"
    with open_gguf(tiny("smollm3")) as gguf, pytest.raises(UnsupportedModelError, match=said):
        TorchModel(gguf, CPU, "f32", LoadOptions(max_positions=64))


def test_a_tensor_that_it_would_pass_over_is_refused(tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "m.gguf", tensors={"blk.0.attn_sinks.weight": np.ones(256, np.float32)})
    with open_gguf(path) as gguf, pytest.raises(UnsupportedModelError, match=r"tensor blk\.0\.attn_sinks\.weight"):
        TorchModel(gguf, CPU, "f32", LoadOptions(max_positions=64))


def test_a_device_that_is_not_there_is_named(tiny: Callable[..., Path]) -> None:
    for name, there in (("cuda", torch.cuda.is_available()), ("mps", torch.backends.mps.is_available())):
        if not there:
            with pytest.raises(UsageError, match=f"device {name} cannot be used: .*--device cpu"):
                engine.load(tiny("llama"), backend="torch", device=name)
    with pytest.raises(UsageError, match="device cuda needs --backend torch"):
        engine.load(tiny("llama"), device="cuda")
    with pytest.raises(UsageError, match="unknown device 'tpu'"):
        engine.load(tiny("llama"), backend="torch", device="tpu")


def test_without_pytorch_the_error_says_what_to_install(
    tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UsageError, match=r"not installed: pip install 'goinfer-chat\[torch\]'"):
        engine.load(tiny("llama"), backend="torch")


def test_the_form_of_weights_is_the_best_that_fits(tiny: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    free = [0]

    class Small(devices.Device):
        def available_memory(self) -> int:
            return free[0] if self.own_memory else 1 << 40

    facts = {field.name: getattr(LIKE_A_GPU, field.name) for field in dataclasses.fields(LIKE_A_GPU)}
    gpu, cpu = Small(**facts), Small(**facts | {"forms": ("f32",), "own_memory": False})
    monkeypatch.setattr(devices, "device", lambda name: cpu if name == "cpu" else gpu)
    with open_gguf(tiny("llama")) as gguf:
        context = 8 * devices.block_bytes(gguf, "f16")
        half, blocks = (devices.weight_bytes(gguf, form) + context for form in ("f16", "blocks"))
        for free[0], form in ((half, "f16"), (half - 1, "blocks"), (blocks, "blocks")):
            assert devices.choose("auto", gguf, "f16").form == form
        free[0] = blocks - 1
        found = devices.choose("auto", gguf, "f16")
        assert found.device is cpu
        assert "has no room for the model" in found.notices[0]
        # A model that guesses beside it has to fit too, with a context of its own.
        for free[0], form in ((2 * half, "f16"), (2 * half - 1, "blocks")):
            assert devices.choose("auto", gguf, "f16", gguf).form == form
        free[0] = half
        assert devices.choose("auto", gguf, "f16", gguf).device is cpu
    free[0] = 0
    with open_gguf(tiny("qwen35")) as gguf:
        states = 3 * ModelConfig.from_gguf(gguf).state_bytes
        least = devices.weight_bytes(gguf, "blocks") + 8 * devices.block_bytes(gguf, "f16") + states
        for free[0], device in ((least, gpu), (least - 1, cpu)):
            assert devices.choose("auto", gguf, "f16").device is device


# ---------------------------------------------------------------- the engine on it
QUESTION = "Copy this list, please: one two three four five six. One two three four"


@pytest.fixture(scope="module")
def played(tiny: Callable[..., Path]) -> Callable[..., LocalEngine]:
    """An engine on the CPU, or on what is like a GPU."""

    def load(patch: pytest.MonkeyPatch, like_a_gpu: bool, name: str = "llama", **settings: Any) -> LocalEngine:
        if like_a_gpu:
            patch.setattr(devices, "device", lambda name: LIKE_A_GPU)
        path = settings.pop("path", None) or tiny(name)
        return engine.load(path, backend="torch", device="cpu", threads=1, context_size=512, **settings)

    return load


def converse(loaded: LocalEngine, name: str, turns: Sequence[str], **sampling: Any) -> list[tuple[int, ...]]:
    messages: list[Message] = []
    found = []
    for text in turns:
        messages.append(Message(role="user", content=text))
        reply = loaded.chat(messages, max_tokens=12, conversation=name, sampling=SamplingParams(**sampling))
        messages.append(Message(role="assistant", content=reply.text, ids=reply.ids))
        found.append(reply.ids)
    return found


@pytest.mark.parametrize("like_a_gpu", [False, True], ids=["cpu", "like a gpu"])
@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_reuse_speculation_and_restarts_keep_every_word(
    name: str, like_a_gpu: bool, played: Callable[..., LocalEngine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, chosen = [QUESTION, "Again, please: one two three four", "And again"], {"temperature": 0.8, "seed": 7}
    played = partial(played, monkeypatch, like_a_gpu, name)
    with closing(played(kv_sessions=0, speculation="off")) as plain:
        expected = converse(plain, "a", turns, **chosen)
        assert plain.info.backend == "torch"
        assert plain.info.computed_by.startswith("torch 2.")
    with closing(played(speculation="ngram", kv_folder=tmp_path)) as guessing:
        assert converse(guessing, "a", turns, **chosen) == expected
    with closing(played(speculation="ngram", kv_folder=tmp_path)) as restarted:
        assert restarted.info.kept_tokens
        messages = [Message(role="user", content=turns[0]), Message(role="assistant", content="", ids=expected[0])]
        messages.append(Message(role="user", content=turns[1]))
        reply = restarted.chat(messages, max_tokens=12, conversation="a", sampling=SamplingParams(**chosen))
        assert reply.ids == expected[1]
        assert reply.stats.restored_tokens


def test_replies_held_to_a_schema_are_valid(
    played: Callable[..., LocalEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = {"enum": ["red", "green", "blue"]}
    with closing(played(monkeypatch, False)) as loaded:
        reply = loaded.chat("A colour", max_tokens=20, json_schema=schema, sampling=SamplingParams(temperature=0))
    assert reply.text in ('"red"', '"green"', '"blue"')


def test_a_device_without_room_for_the_cache_says_so() -> None:
    with pytest.raises(OutOfMemoryError, match=r"KV cache needs .* MiB on cpu"):
        DevicePool(1 << 40, 1 << 10, torch.device("cpu"))
