"""What a shell offers behind the flags, asked as a shell asks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from store_helpers import kept

from goinfer_chat.store import Store


def offered(typed: str, **env: str) -> list[str]:
    words = typed.split(" ")
    asked = {"_GOINFER_CHAT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-m", "goinfer_chat"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "error"} | asked | env,
        timeout=30,
    )
    assert done.stderr == ""
    return [line for line in done.stdout.split("\n") if line]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("goinfer-chat --keys ", ["emacs", "vi"]),
        ("goinfer-chat run --think o", ["on", "off"]),
        ("goinfer-chat --model qwen2.5-coder-0", ["qwen2.5-coder-0.5b"]),
        ("goinfer-chat sess", ["sessions"]),
        ("goinfer-chat --think-t", ["--think-tokens"]),
        ("goinfer-chat --system ", []),
    ],
)
def test_a_shell_is_offered_words_of_the_table(typed: str, expected: list[str]) -> None:
    assert offered(typed) == expected


def test_conversations_and_profiles_are_offered_by_name(tmp_path: Path) -> None:
    folder, file = tmp_path / "sessions", tmp_path / "config.toml"
    with Store(folder) as store:
        kept(store, ("hi", "hello"), name="my-work")
        kept(store, ("hi", "hello"), name="my other work")
    file.write_text("[profile.fast]\n[profile.exact]\n")
    env = {"GOINFER_CHAT_SESSION_DIR": str(folder), "GOINFER_CHAT_CONFIG": str(file)}
    assert offered("goinfer-chat --resume my", **env) == ["my-work"]  # a shell would part the other one at its blanks
    assert offered("goinfer-chat --profile ", **env) == ["fast", "exact"]


def test_a_broken_settings_file_and_no_folder_offer_nothing_and_say_nothing(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[")
    env = {"GOINFER_CHAT_SESSION_DIR": str(tmp_path / "none"), "GOINFER_CHAT_CONFIG": str(file)}
    assert offered("goinfer-chat --profile ", **env) == offered("goinfer-chat --resume ", **env) == []
