"""A conversation's file that another backend wrote: it is gone on from, that is said, and nothing else is touched."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from forward_runner import Runner, running, tokens
from tiny_models import write_tiny_model

import engine
from engine.api import Event, Finished, Message, Notice, Reply, Request, SamplingParams
from engine.gguf_file import open_gguf
from engine.kv_file import KVFile
from engine.kv_layout import MAX_HEADER_BYTES, SEVERAL, Identity, read_header
from engine.local import LocalEngine
from engine.model import LoadOptions

torch = pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'goinfer-chat[torch]'")

from engine.torch_backend.device import device  # noqa: E402
from engine.torch_backend.model import TorchModel  # noqa: E402

SYSTEM = Message(role="system", content="You are terse, and you like the sea, ships, and what is on board of them.")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "llama")


def loaded(path: Path, folder: Path | None, backend: str) -> LocalEngine:
    return engine.load(path, backend=backend, threads=1, context_size=512, kv_folder=folder, speculation="off")


def ask(loaded: LocalEngine, messages: Sequence[Message], conversation: str = "a") -> tuple[Reply, list[str]]:
    """The reply, and what was said of files."""
    request = Request(
        messages=tuple(messages),
        sampling=SamplingParams(temperature=0),
        max_tokens=8,
        conversation=conversation,
    )
    events: list[Event] = list(loaded.generate(request))
    finished = events[-1]
    assert isinstance(finished, Finished)
    return finished.reply, [event.text for event in events if isinstance(event, Notice)]


def numerics(folder: Path) -> int:
    (file,) = folder.glob("a.giw-kv")
    return read_header(file.read_bytes()[:MAX_HEADER_BYTES])[1].numerics_version


def test_a_conversation_goes_on_with_the_cache_of_another_backend_and_it_is_said(path: Path, tmp_path: Path) -> None:
    messages = [SYSTEM, Message(role="user", content="Name a ship.")]
    with closing(loaded(path, tmp_path, "torch")) as one:
        own = one.identity().numerics_version
        messages.append(ask(one, messages)[0].as_message())
    assert numerics(tmp_path) == own != 1
    messages.append(Message(role="user", content="Another?"))
    for backend, maker in (("cpu", "torch, cpu"), ("torch", "more than one backend"), ("cpu", "more than one backend")):
        with closing(loaded(path, tmp_path, backend)) as other:
            reply, said = ask(other, messages)
            assert reply.stats.restored_tokens
            assert reply.stats.prefill_reused_tokens
            assert len(said) == 1
            assert f"computed by {maker}, so words may differ" in said[0]
            # Once: what goes on in memory is no resume.
            assert ask(other, [*messages, reply.as_message(), Message(role="user", content="Why?")])[1] == []
        assert numerics(tmp_path) == SEVERAL


def test_what_another_backend_computed_stays_in_its_conversation(path: Path, tmp_path: Path) -> None:
    messages = [SYSTEM, Message(role="user", content="Name a ship.")]
    with closing(loaded(path, None, "cpu")) as cold:
        expected = ask(cold, messages, "b")[0]
    with closing(loaded(path, tmp_path, "torch")) as one:
        ask(one, messages)
    with closing(loaded(path, tmp_path, "cpu")) as other:
        assert ask(other, messages)[0].stats.restored_tokens
        reply, said = ask(other, messages, "b")
        assert (reply.ids, reply.stats.prefill_reused_tokens, said) == (expected.ids, 0, [])


def test_a_cache_of_its_own_is_resumed_in_silence(path: Path, tmp_path: Path) -> None:
    messages = [Message(role="user", content="Name a ship.")]
    for _ in range(2):
        with closing(loaded(path, tmp_path, "torch")) as one:
            said = ask(one, messages)[1]
            assert not any("computed by" in text for text in said)
    assert said[0].startswith("resumed")


def test_logits_behind_an_adopted_cache_differ_as_the_backends_do(path: Path, tmp_path: Path) -> None:
    """The kernels on PyTorch's K/V are not farther from themselves than PyTorch is."""
    ids = [int(i) for i in tokens(150)]
    with open_gguf(path) as gguf:
        content = gguf.content_hash()
        runner = Runner(
            model := TorchModel(gguf, device("cpu"), "f32", LoadOptions(threads=1, max_positions=512)),
            model.new_pool(8),
        )  # type: ignore[arg-type]
        table = runner.table()
        theirs = runner.feed(table, ids, 64)
        with KVFile.open(tmp_path / "a.giw-kv", Identity.of(model.config, content, numerics=model.numerics)) as file:
            file.save(table, runner.pool)
    with running(path) as kernels:
        cold = kernels.feed(kernels.table(), ids, 64)
        table = kernels.table()
        with KVFile.open(tmp_path / "a.giw-kv", Identity.of(kernels.model.config, content)) as file:
            assert file.problem is None
            assert file.restore(table, kernels.pool, 149) == 149
        assert table.adopted
        adopted = kernels.step((table, ids[149:]), want=[0])
    spread = cold.std()
    assert 0 < np.abs(adopted - cold).mean() / spread < 2 * np.abs(theirs - cold).mean() / spread < 0.1
