"""A text in the person's own editor."""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from engine.errors import UsageError
from goinfer_chat.files import reason_of


def edited(text: str, environ: Mapping[str, str] = os.environ) -> str:
    """The text as VISUAL, EDITOR or vi left it, without line ends behind. Raises UsageError where that failed."""
    chosen = environ.get("VISUAL") or environ.get("EDITOR") or "vi"
    try:
        command = shlex.split(chosen) or ["vi"]  # of blanks alone, which would run the message as a program
    except ValueError:
        command = [chosen]
    # Only its owner can enter the folder, and it goes with whatever the editor leaves beside the file.
    with tempfile.TemporaryDirectory(prefix="goinfer-chat-") as folder:
        file = Path(folder) / "message.md"
        file.write_text(text, encoding="utf-8")
        try:
            code = subprocess.run([*command, str(file)], check=False).returncode
            if code:
                raise UsageError(f"the editor {command[0]} ended with code {code}; the message is as it was")
            return file.read_text(encoding="utf-8", errors="replace").rstrip("\r\n")
        except OSError as error:
            raise UsageError(f"the editor {command[0]} cannot be used: {reason_of(error)}; set EDITOR") from None
