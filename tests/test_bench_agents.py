"""`bench agents`: the load has the size it says, and slots change where prompts come from and not what is said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tiny_models import write_tiny_model

from engine import load
from engine.errors import UsageError
from goinfer_chat.bench.agents import Load, lines, measure
from goinfer_chat.settings import Settings

LOAD = Load(conversations=3, turns=4, scale=0.02)


def make(settings: Settings, folder: Path) -> object:
    return load(
        settings.model,
        context_size=settings.context_size,
        kv_sessions=settings.kv_sessions,
        max_concurrent=settings.max_concurrent,
        kv_folder=folder,
    )


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", "qwen2", context_size=2048)


def test_agents_with_a_slot_each_and_with_fewer(tiny: Path) -> None:
    shares: list[float] = []
    arms = measure(LOAD, (2, 4), Settings(model=str(tiny)), make, lambda what, share: shares.append(share))  # type: ignore[arg-type]
    assert [arm.slots for arm in arms] == [2, 4]
    for arm in arms:
        assert len(arm.turns) == 12
        for turn in (2, 3, 4):
            for one in arm.of_turn(turn):
                assert one.usage["prefill_tokens"] < 80 < one.usage["prefill_reused_tokens"]
    fewer, each = arms
    assert each.cache.get("restore", 0) == 0
    assert each.cache["hit"] == 9
    assert fewer.cache["restore"] >= 3
    assert shares[-1] == 1
    assert [one.usage["prompt_tokens"] for one in sorted(fewer.turns, key=lambda one: one.turn)][-1] > 200
    text = lines(arms, LOAD)
    assert text[0].split()[:2] == ["turn", "prompt"]
    assert "2 slots" in text[-2]
    assert json.dumps([arm.as_object() for arm in arms])


def test_a_load_that_cannot_be_is_refused(tiny: Path) -> None:
    for wrong in ({"scale": 0}, {"scale": 2}, {"turns": 0}, {"conversations": 0}):
        with pytest.raises(UsageError):
            Load(**wrong)
    settings = Settings(model=str(tiny), context_size=512)
    with pytest.raises(UsageError, match="choose a smaller --scale"):
        measure(Load(scale=0.2), (1,), settings, make, lambda what, share: None)  # type: ignore[arg-type]
