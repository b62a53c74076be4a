"""Model files on a hub, through huggingface_hub: what a repository holds, and fetching a file of it with resume.

HF_ENDPOINT names the hub and HF_TOKEN opens private and gated repositories, as everywhere in that library. It is
imported only when a hub is asked: it takes half a second, and a model that is here needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from threading import Thread
from typing import TypeVar

from engine.errors import DownloadError, ModelNotFoundError, UsageError
from goinfer_chat import __version__
from goinfer_chat.models import transfer
from goinfer_chat.models.fetch import Content, Progress, bytes_in, partial_of, require_space

T = TypeVar("T")

LISTING_SECONDS = 5.0
"""How long a hub may take to say what a repository holds; then another source is tried."""

_SHARD = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubFile:
    """One file of a repository at one commit."""

    repo: str
    commit: str
    name: str
    content: Content
    """Without a SHA-256 where the hub states none: a file small enough to lie in git itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubSource:
    """Where a model of the catalogue lies on the hub."""

    repo: str
    file: str
    revision: str | None = None

    def __str__(self) -> str:
        return "the hub"

    def fetch(self, target: Path, content: Content, progress: Progress) -> None:
        """Append what is missing to the partial file of `target`; raises DownloadError or ModelNotFoundError."""
        file = next((file for file in list_files(self.repo, self.revision) if file.name == self.file), None)
        if file is None or file.content != content:
            raise DownloadError(f"hf:{self.repo} does not hold the {self.file} that is wanted")
        download(file, target, progress)


def list_files(repo: str, revision: str | None = None) -> list[HubFile]:
    """The GGUF files of a repository, sorted by name.

    Raises ModelNotFoundError for a repository that is not there, DownloadError when the hub cannot be asked.
    """
    from huggingface_hub import HfApi

    def ask() -> list[HubFile]:
        api = HfApi(library_name="goinfer-chat", library_version=__version__)
        info = api.model_info(repo, revision=revision, files_metadata=True, timeout=LISTING_SECONDS)
        return [
            HubFile(
                repo=repo,
                commit=info.sha or revision or "main",
                name=sibling.rfilename,
                content=Content(num_bytes=sibling.size or 0, sha256=sibling.lfs.sha256 if sibling.lfs else None),
            )
            for sibling in info.siblings or ()
            if _is_model(sibling.rfilename)
        ]

    with _errors(repo):
        return sorted(_within(LISTING_SECONDS, ask), key=lambda file: file.name)


def _is_model(name: str) -> bool:
    # A name comes from the network and becomes a path. A projector is a part of a vision model, not a language model.
    path = PurePosixPath(name)
    inside = not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
    return inside and path.suffix.lower() == ".gguf" and "mmproj" not in path.name.lower()


def group_shards(names: Iterable[str]) -> dict[str, list[str]]:
    """Files by the model they belong to, whose name is theirs without `-00001-of-00002` and `.gguf`."""
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        shard = _SHARD.fullmatch(name)
        models.setdefault(shard["stem"] if shard else name[: -len(".gguf")], []).append(name)
    return models


def is_whole(names: Sequence[str]) -> bool:
    """Whether these files of one model are all of its shards."""
    shard = _SHARD.fullmatch(names[0])
    return len(names) == (int(shard["count"]) if shard else 1)


def choose(repo: str, names: Sequence[str], selector: str | None) -> list[str]:
    """The files of the one model that `selector` means: a file's name, or a quantization such as Q4_K_M in it.

    A whole word counts more than a part of one, so F16 does not mean BF16. Raises ModelNotFoundError that lists the
    choices when there is none or more than one.
    """
    models = group_shards(names)
    if selector is None:
        matches = list(models)
    elif exact := [model for model, files in models.items() if selector in files or selector == model]:
        matches = exact
    else:
        word = re.compile(rf"(?<![a-z0-9]){re.escape(selector.lower())}(?![a-z0-9_])")
        matches = [model for model in models if word.search(model.lower())]
        matches = matches or [model for model in models if selector.lower() in model.lower()]
    if len(matches) == 1:
        return models[matches[0]]
    if not models:
        raise ModelNotFoundError(f"hf:{repo} holds no GGUF file; look for a repository whose name ends in -GGUF")
    wanted = f"none of its models is called {selector}" if not matches else f"it holds {len(matches)} models"
    if matches and selector is not None:
        wanted = f"{len(matches)} of its models match {selector}"
    choices = ", ".join(PurePosixPath(model).name for model in matches or models)
    raise ModelNotFoundError(f"hf:{repo}: {wanted}; name one as hf:{repo}:NAME: {choices}")


def download(file: HubFile, target: Path, progress: Progress) -> None:
    """Append what is missing to the partial file of `target`. Raises DownloadError or ModelNotFoundError."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    partial, num_bytes = partial_of(target), file.content.num_bytes
    if bytes_in(partial) > num_bytes:
        partial.unlink()
    require_space(target.parent, num_bytes - bytes_in(partial))
    with _errors(file.repo):
        transfer.download(
            hf_hub_url(file.repo, file.name, revision=file.commit),
            partial,
            progress,
            client=get_session(),
            headers=build_hf_headers(library_name="goinfer-chat", library_version=__version__),
            num_bytes=num_bytes,
            check=hf_raise_for_status,
        )


def _within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, or TimeoutError.

    A time limit of a connection counts for each address a name has, and a hub has eight or so; this one is for all.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001 - handed to the waiting thread
            future.set_exception(error)

    Thread(target=run, daemon=True).start()
    return future.result(seconds)


@contextmanager
def _errors(repo: str) -> Iterator[None]:
    """Turn the library's exceptions into ours, one line each."""
    import httpx2
    from huggingface_hub import constants
    from huggingface_hub import errors as hub

    where = f"hf:{repo}"
    try:
        yield
    except hub.GatedRepoError as error:
        raise DownloadError(
            f"{where} is gated: accept its terms on {constants.ENDPOINT}/{repo} and set HF_TOKEN"
        ) from error
    except (hub.RepositoryNotFoundError, hub.RevisionNotFoundError, hub.EntryNotFoundError) as error:
        raise ModelNotFoundError(
            f"{where}: not found on {constants.ENDPOINT}; check the spelling, and set HF_TOKEN if it is private"
        ) from error
    except hub.HFValidationError as error:
        raise UsageError(f"{where}: write hf:OWNER/REPO or hf:OWNER/REPO:FILE") from error
    except hub.OfflineModeIsEnabled as error:
        raise DownloadError(f"{where}: HF_HUB_OFFLINE is set, so the hub is not asked") from error
    except hub.HfHubHTTPError as error:
        status = error.response.status_code
        hint = "; check HF_TOKEN" if status in (401, 403) else ""
        raise DownloadError(f"{where}: {constants.ENDPOINT} answered {status}{hint}") from error
    except TimeoutError as error:
        raise DownloadError(f"{where}: no answer from {constants.ENDPOINT} within {LISTING_SECONDS:.0f} s") from error
    except httpx2.HTTPError as error:
        reason = str(error) or type(error).__name__
        raise DownloadError(f"{where}: {constants.ENDPOINT} cannot be reached: {reason}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        # A page of a proxy or of a hotel's network in place of the hub's JSON.
        raise DownloadError(f"{where}: what {constants.ENDPOINT} answers is not a hub's answer") from error
