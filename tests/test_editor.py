"""The person's own editor: which one is started, and with what."""

from __future__ import annotations

from pathlib import Path

import pytest

from goinfer_chat import editor


def test_an_editor_of_blanks_alone_counts_as_none_and_never_runs_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vi = tmp_path / "vi"
    vi.write_text('#!/bin/sh\nprintf "from vi" > "$1"\n', encoding="utf-8")
    vi.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert editor.edited("#!/bin/sh\nexit 3\n", {"EDITOR": " "}) == "from vi"
