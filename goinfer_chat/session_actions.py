"""What the commands of `goinfer-chat sessions` do: the kept conversations from outside, without a model.

Each takes the folder of the conversations and returns the exit code. What was asked for goes to standard output, what
was done to standard error. Each raises UsageError for a conversation that is not there, and StoreError.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from engine.errors import UsageError
from engine.kv_folder import SUFFIX, list_kept
from goinfer_chat.amounts import size
from goinfer_chat.files import copy_private, reason_of, write_private
from goinfer_chat.listing import HEADINGS, TRACES_LEFT, cells_of, columns, definitions, hit_rows, name_of, when
from goinfer_chat.resolving import resolve
from goinfer_chat.store import HEAD, Conversation, Store, StoredMessage, set_aside
from goinfer_chat.store.exports import MAX_IMPORT_BYTES, from_json, message_as_json, to_markdown, without_ids
from goinfer_chat.store.exports import to_json as conversation_as_json
from goinfer_chat.terminal import Stream, sanitize, true_text
from goinfer_chat.view.render import to_json

# -- looking -----------------------------------------------------------------------------------------------------------


def list_conversations(folder: Path, limit: int | None, *, as_json: bool) -> int:
    """A row for each, the one used last first, and below them what their caches take.

    On a terminal the last columns are left out where they do not fit; `--json` has everything.
    """
    out = Stream(sys.stdout)
    with Store(folder) as store:
        conversations = store.recent(limit)
        if as_json:
            for conversation in conversations:
                _write_json(out, _as_json(store, conversation))
            return 0
        rows = [cells_of(store, conversation) for conversation in conversations]
    if not conversations:
        Stream(sys.stderr).line("no conversations are kept")
        return 0
    for line in columns([HEADINGS, *rows], out.size[0] if out.terminal else None):
        out.line(line)
    if kept := list_kept(folder, set_aside=True):
        total = sum(file.num_bytes for file in kept)
        Stream(sys.stderr).line(f"caches: {size(total)} of at most {size(_kv_cap_bytes())} (--kv-cap)", dim=True)
    return 0


def _as_json(store: Store, conversation: Conversation) -> dict[str, Any]:
    kv_format = store.kv_format(conversation.id)
    return asdict(conversation) | {
        "kv_bytes": store.kv_bytes(conversation.id),
        "kv_bytes_per_token": kv_format.position_bytes if kv_format else None,
        "kv_type": kv_format.kv_type if kv_format else None,
    }


def _kv_cap_bytes() -> int:
    return resolve({}, os.environ).kv_cap_bytes


def show(folder: Path, key: str, at: int | None, *, as_json: bool) -> int:
    """The messages of the branch that the conversation stands at, or of the one that ends at message `at`."""
    out = Stream(sys.stdout)
    with Store(folder) as store:
        conversation = store.find(key)
        path = store.path(conversation.id, HEAD if at is None else at)
        tree = store.tree(conversation.id)
        unanswered = [stored for stored in store.left_open(conversation.id) if stored.parent == conversation.head]
    if as_json:
        for stored in path:
            _write_json(out, message_as_json(stored))
        return 0
    out.line(f"{name_of(conversation)} | {conversation.id} | {when(conversation.updated)}", dim=True)
    if conversation.system is not None:
        out.line("system", dim=True)
        out.line(conversation.system)
    for stored in path:
        out.line(_heading(stored, tree), dim=True)
        for text in (stored.message.thinking, stored.message.content):
            if text:
                out.line(text)
        for call in stored.message.tool_calls:
            out.write(to_json(dict(call)))
    for stored in unanswered if at is None else ():
        out.line(f"{_heading(stored, tree)} | got no answer", dim=True)
        out.line(stored.message.content)
    return 0


def _heading(stored: StoredMessage, tree: Sequence[StoredMessage]) -> str:
    """Who, which message, and which others stand in its place on other branches."""
    parts = [f"{stored.message.role} {stored.message.name or ''}".rstrip(), f"message {stored.id}"]
    if others := [str(other.id) for other in tree if other.parent == stored.parent and other.id != stored.id]:
        parts.append(f"instead of {', '.join(others)}")
    if stored.finish_reason not in (None, "stop"):
        parts.append(str(stored.finish_reason))
    return " | ".join(parts)


def search(folder: Path, text: str, within: str | None, limit: int, *, as_json: bool) -> int:
    """The newest messages that hold all words of the text; `within`: in this conversation only."""
    out = Stream(sys.stdout)
    with Store(folder) as store:
        id = store.find(within).id if within is not None else None
        hits = store.search(text, id=id, limit=limit)
    for hit in hits:
        if as_json:
            found = {"conversation": hit.conversation.id, "name": hit.conversation.name, "message": hit.message.id}
            _write_json(out, found | {"role": hit.message.message.role, "snippet": hit.snippet})
        else:
            (where, _), words = hit_rows(hit)
            out.line(f"{where} | message {hit.message.id}", dim=True)
            for line in definitions([words], out.size[0]) if out.terminal else [f"    {hit.snippet}"]:
                out.line(line)
    if not hits and not as_json:
        Stream(sys.stderr).line("nothing was found")
    return 0


# -- changing ----------------------------------------------------------------------------------------------------------


def rename(folder: Path, key: str, name: str) -> int:
    with Store(folder) as store:
        conversation = store.find(key)
        name = store.rename(conversation.id, name)
    Stream(sys.stderr).line(f"{name_of(conversation)} is called {name}")
    return 0


def delete(folder: Path, keys: Sequence[str], *, yes: bool) -> int:
    """`yes`: without a question; a person who says no to it changes nothing."""
    side = Stream(sys.stderr)
    with Store(folder) as store:
        conversations = {conversation.id: conversation for key in keys for conversation in [store.find(key)]}
        names = ", ".join(map(name_of, conversations.values()))
        if not yes and not _agreed(f"Delete {names}, with nothing left of it", side):
            return 0
        for conversation in conversations.values():
            if store.delete(conversation.id):
                side.line(f"deleted {name_of(conversation)}")
            else:
                side.line(f"deleted {name_of(conversation)}; {TRACES_LEFT}")
    return 0


def fork(folder: Path, key: str, name: str | None, at: int | None) -> int:
    """A copy down to message `at`; its name is printed."""
    side = Stream(sys.stderr)
    with Store(folder) as store:
        conversation = store.find(key)
        fork = store.fork(conversation.id, name=name, at=HEAD if at is None else at)
    if fork.kv_problem:
        side.line(fork.kv_problem)
    Stream(sys.stdout).line(name_of(fork.conversation))
    return 0


# -- files -------------------------------------------------------------------------------------------------------------


def export(folder: Path, key: str, form: str, output: str | None, *, kv: bool, force: bool) -> int:
    """To the file `output`, or to standard output. `kv`: the cache too, beside it; `force`: files may be replaced."""
    if kv and (output is None or form != "json"):
        raise UsageError("--kv needs --format json and a file: --output FILE")
    with Store(folder) as store:
        conversation = store.find(key)
        if form == "json":
            text = conversation_as_json(conversation, store.tree(conversation.id))
        else:
            text = sanitize(to_markdown(conversation, store.path(conversation.id)), terminal=False)
        if output is None:
            Stream(sys.stdout).write(text)
            return 0
        file = Path(output).expanduser()
        if file.parent.resolve() == store.folder.resolve():
            raise UsageError(f"{_shown(file)} is in the folder of the kept conversations; choose another folder")
        try:
            write_private(file, iter([text.encode()]), replace=force)
            if kv and not copy_private(store.kv_path(conversation.id), _beside(file), replace=force):
                Stream(sys.stderr).line("the conversation has no cache on the disk")
        except FileExistsError as error:
            raise UsageError(
                f"{_shown(error.filename2 or error.filename)} already exists; --force replaces it"
            ) from None
        except OSError as error:
            raise UsageError(f"{_shown(error.filename or file)} cannot be written: {reason_of(error)}") from None
    return 0


def import_file(folder: Path, file: str, name: str | None, *, kv: bool) -> int:
    """From a file, or `-` for standard input. `kv`: with the ids of replies, and the cache that lies beside it."""
    if kv and file == "-":
        raise UsageError("--kv needs a file, beside which the cache stands")
    path = Path(file).expanduser()
    try:
        if file == "-":
            data = sys.stdin.buffer.read(MAX_IMPORT_BYTES + 1)
        else:
            with path.open("rb") as opened:
                data = opened.read(MAX_IMPORT_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{_shown(file)} cannot be read: {reason_of(error)}") from None
    new = from_json(data) if kv else without_ids(from_json(data))
    if name is not None:
        new = replace(new, name=name)
    if kv and not _beside(path).is_file():
        raise UsageError(f"there is no cache {_shown(_beside(path))}")
    with Store(folder) as store:
        added = store.add(new, kv_file=_beside(path) if kv else None, number_name=name is None)
    if added.kv_problem:
        Stream(sys.stderr).line(added.kv_problem)
    Stream(sys.stdout).line(name_of(added.conversation))
    return 0


def move_aside(folder: Path, *, yes: bool) -> int:
    """A database that cannot be used, out of the way; `yes`: without a question."""
    side = Stream(sys.stderr)
    if not yes and not _agreed(f"Move the conversations of {_shown(folder)} out of the way", side):
        return 0
    for path in set_aside(folder):
        side.line(f"moved to {_shown(path)}")
    return 0


def _beside(file: Path) -> Path:
    return file.with_suffix(SUFFIX)


# ----------------------------------------------------------------------------------------------------------------------


def _agreed(question: str, side: Stream) -> bool:
    """Raises UsageError where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal on which to ask; --yes does it without asking")
    side.write(f"{question}? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _shown(path: Any) -> str:
    return true_text(str(path))


def _write_json(out: Stream, value: dict[str, Any]) -> None:
    out.write(to_json(value))
