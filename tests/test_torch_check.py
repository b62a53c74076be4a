"""`goinfer-chat check --backend torch`: a table of what PyTorch makes of a model, and whether that is right."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tiny_models import write_tiny_model

from engine import parity
from engine.errors import UsageError
from goinfer_chat import torch_check
from goinfer_chat.loading import load_engine
from goinfer_chat.settings import Settings

pytest.importorskip("torch", reason="PyTorch is not installed: pip install 'goinfer-chat[torch]'")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    sizes = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "ffn_size": 96}
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", **sizes)
    return Settings(model=str(path), backend="torch", device="cpu", threads=1)


def test_the_table_has_what_computes_how_near_it_is_and_what_is_the_same(
    settings: Settings, capsys: pytest.CaptureFixture[str]
) -> None:
    assert torch_check.check_torch(settings, load_engine) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Tiny llama, Q8_0: 560 positions of a text"
    rows = [line for line in lines if " MB" in line]
    assert rows[0].startswith("torch 2.")
    assert rows[1].endswith("within bounds")
    assert [line.rpartition(": ")[2] for line in lines[-7:]] == ["the same"] * 7


def test_what_is_out_of_bounds_or_differs_is_said_and_is_code_1(
    settings: Settings, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = parity.Reader.logits

    def worse(self: parity.Reader, ids: list[int], probes: list[int], chunk: int = 512) -> np.ndarray:
        return read(self, ids, probes, chunk) * (1.5 if self._model.threads == 1 and chunk == 512 else 1)

    monkeypatch.setattr(torch_check, "POSITIONS", 100)
    monkeypatch.setattr(torch_check, "BOUNDS", dict.fromkeys(("cpu", "torch"), (0.0, 0.0)))
    monkeypatch.setattr(parity.Reader, "logits", worse)
    assert torch_check.check_torch(Settings(**vars_of(settings), json=True), load_engine) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["holds"] is False
    assert found["compared"][1]["within"] is False
    assert found["same"]["logits, read in chunks of 7"] is False
    assert found["same"]["words, with guesses"] is True


def vars_of(settings: Settings) -> dict[str, object]:
    return {name: getattr(settings, name) for name in ("model", "backend", "device", "threads")}


def test_logits_are_compared_in_units_of_their_spread() -> None:
    reference = np.array([[0.0, 2.0, 4.0], [1.0, 3.0, -1.0]], np.float32)
    same = parity.compare(reference, reference)
    assert (same.largest, same.mean, same.same_best, same.divergence) == (0, 0, 1, 0)
    found = reference.copy()
    found[1] = [3.0, 1.0, -1.0]
    other = parity.compare(found, reference)
    assert other.largest == pytest.approx(2 / reference.std())
    assert other.mean == pytest.approx(4 / 6 / reference.std())
    assert other.same_best == 0.5
    odds = np.exp(reference[1]) / np.exp(reference[1]).sum()
    assert other.divergence == pytest.approx(2 * (odds[1] - odds[0]) / 2)


def test_a_device_that_is_not_there_is_an_error(settings: Settings) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="device cuda cannot be used"):
        torch_check.check_torch(Settings(**vars_of(settings) | {"device": "cuda"}), load_engine)
