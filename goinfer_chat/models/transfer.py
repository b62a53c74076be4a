"""One file over HTTP in as many requests as it takes: each goes on at the byte where the last one stopped."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from engine.errors import DownloadError
from goinfer_chat.models.fetch import Progress, bytes_in

if TYPE_CHECKING:
    import httpx2

CONNECT_SECONDS = 5.0
STALLED_SECONDS = 30.0
TRIES = 5
"""Tries in a row that bring no byte, after which a download is given up."""


def download(
    url: str,
    path: Path,
    progress: Progress,
    *,
    client: httpx2.Client,
    headers: Mapping[str, str] | None = None,
    num_bytes: int | None = None,
    check: Callable[[httpx2.Response], object],
) -> None:
    """Append what is missing to the file at `path`. `num_bytes` None: the server says how long it is.

    `check` raises an httpx2.HTTPError for an answer that is no success; one that is final (such as 404) goes to the
    caller. Raises DownloadError when several tries in a row bring nothing.
    """
    import httpx2

    timeout = httpx2.Timeout(STALLED_SECONDS, connect=CONNECT_SECONDS)
    # Compressed on the way, the bytes of a range would not be those of the file.
    plain = {**(headers or {}), "Accept-Encoding": "identity"}
    fruitless = 0
    while num_bytes is None or bytes_in(path) < num_bytes:
        start, reason = bytes_in(path), "the connection was closed early"
        try:
            rest = {"Range": f"bytes={start}-"} if start else {}
            with client.stream("GET", url, headers=plain | rest, timeout=timeout) as response:
                check(response)
                num_bytes = num_bytes or _stated_bytes(response)
                _append(response, path, start, num_bytes, progress)
        except httpx2.HTTPError as error:
            status: int | None = error.response.status_code if hasattr(error, "response") else None
            if status is not None and status != 429 and status < 500:
                raise
            reason = f"the server answered {status}" if status else str(error) or type(error).__name__
        fruitless = 0 if bytes_in(path) > start else fruitless + 1
        if fruitless == TRIES:
            of_all = f" of {num_bytes:,}" if num_bytes else ""
            raise DownloadError(
                f"{path.name.removesuffix('.partial')}: {reason}, {TRIES} times; {bytes_in(path):,}{of_all} bytes are "
                "kept: run the same command again to go on"
            )
        if fruitless:
            time.sleep(2 ** (fruitless - 1) / 2)


def _stated_bytes(response: httpx2.Response) -> int:
    """The length of the whole file: of a part it stands behind the slash in `Content-Range: bytes 5-9/10`."""
    name = "Content-Range" if response.status_code == 206 else "Content-Length"
    stated = response.headers.get(name, "").rpartition("/")[2]
    if not stated.isdecimal() or len(stated) > 18:
        raise DownloadError(f"{response.url.host} does not say how long the file is")
    return int(stated)


def _append(response: httpx2.Response, path: Path, start: int, num_bytes: int, progress: Progress) -> None:
    """Write the bytes from `start` on, as far as they come; from the first on where the server ignored the range."""
    with path.open("ab") as output:
        if response.status_code != 206:
            start = 0
            output.truncate(0)
        progress(start, num_bytes)
        for chunk in response.iter_bytes():
            start += len(chunk)
            if start > num_bytes:
                raise DownloadError(
                    f"{path.name}: {response.url.host} sends more than the {num_bytes:,} bytes it stated"
                )
            output.write(chunk)
            progress(start, num_bytes)
