"""Text to the clipboard: by a program of the desktop where there is one here, else by the terminal (OSC 52)."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

MAX_OSC_BYTES: Final = 74_994
"""Of text: xterm and others take 100,000 bytes of base64 and drop a longer sequence."""


def copy_with_program(text: str, environ: Mapping[str, str] = os.environ) -> str | None:
    """The name of the program that took it; None where there is none. Over SSH the clipboard is not on this machine."""
    if "SSH_CONNECTION" in environ:
        return None
    for command in _programs(environ):
        if shutil.which(command[0], path=environ.get("PATH")) is None:
            continue
        with suppress(OSError, subprocess.TimeoutExpired):
            # Some of them stay to serve the clipboard: what they print must not keep anybody waiting.
            done = subprocess.run(
                command,
                check=False,
                input=text.encode(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=2,
            )
            if done.returncode == 0:
                return command[0]
    return None


def _programs(environ: Mapping[str, str]) -> Sequence[tuple[str, ...]]:
    if sys.platform == "darwin":
        return [("pbcopy",)]
    wayland = [("wl-copy",)] if "WAYLAND_DISPLAY" in environ else []
    x11 = [("xclip", "-selection", "clipboard"), ("xsel", "--input", "--clipboard")] if "DISPLAY" in environ else []
    return [*wayland, *x11, *([("clip.exe",)] if "WSL_DISTRO_NAME" in environ else [])]


def osc52(text: str) -> str | None:
    """The sequence that asks the terminal to take the text; None when it is too long for that."""
    data = text.encode()
    if len(data) > MAX_OSC_BYTES:
        return None
    return f"\x1b]52;c;{base64.b64encode(data).decode()}\x07"
