"""Text that comes back, matched to what is kept: which conversation a request goes on with, and the ids of its replies.

HTTP clients send the words of a conversation with each request and no name. So each message is known by a digest of
itself and of all messages before it. A reply that was given here is found by that digest, and goes into the next
prompt as the ids it was generated as: nothing is tokenized again, and the cache is reused right through it.

A request goes on with a conversation
- whose messages, all of them, are how the request begins; or
- of which it lacks the last reply only: the same question once more.

Everything else is a conversation of its own: it shares what others have read and takes nothing from them. So clients
that take turns, or branch off a common start, never cut each other's cache back. A conversation that is running is
not gone on with; whoever asks the same beside it gets a fork.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.api import Message, Reply
from engine.kv_cache import common_start

MAX_CONVERSATIONS = 256
MAX_IDS = 2_000_000
"""Ids of replies that are kept, about 16 MB each million."""
MAX_FILE_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a conversation stands: digests before and after its last reply."""

    question: bytes
    head: bytes


class Turn:
    """One request of a conversation, from `Transcripts.begin` to `end`."""

    def __init__(
        self,
        transcripts: Transcripts,
        name: str,
        messages: tuple[Message, ...],
        place: tuple[bytes, bytes],
        goes_on: bool,
    ) -> None:
        self.name = name
        self.messages = messages
        """The request's, with the kept replies in place of their text."""
        self.goes_on = goes_on
        self._transcripts = transcripts
        self._place = place

    def end(self, reply: Reply | None, *, keep_conversation: bool = True) -> None:
        """The request is over; a reply that was given is kept."""
        self._transcripts._end(self, reply, *self._place, keep_conversation=keep_conversation)


class Transcripts:
    """What a model has said to its clients. For one thread. With a `path` it is kept there over restarts."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._places: OrderedDict[str, _Place] = OrderedDict()  # used last, last
        self._replies: OrderedDict[bytes, Message] = OrderedDict()
        self._num_ids = 0
        self._raw: OrderedDict[str, tuple[int, ...]] = OrderedDict()
        self._busy: set[str] = set()
        if path is not None:
            self._load(path)

    def begin(self, messages: Sequence[Message], setting: Any = None) -> Turn:
        """Find the conversation of a request. `setting`: JSON that stands before all messages, such as tools."""
        base = _hash(b"", setting)
        known: list[Message] = []
        digest, digests = b"", []
        for message in messages:
            digest = _hash(digest, _canonical(message))
            digests.append(digest)
            kept = self._replies.get(digest)
            if kept is not None:
                self._replies.move_to_end(digest)
            known.append(message if kept is None else replace(kept, name=message.name))
        name = self._find(base, digests)
        turn = Turn(self, name or _new_name(), tuple(known), (base, digest), name is not None)
        self._busy.add(turn.name)
        return turn

    def begin_raw(self, prompt_ids: Sequence[int]) -> tuple[str, bool]:
        """The conversation of a prompt without messages, which `end_raw` ends; and whether it was there.

        One goes on that is the prompt's start, or of which the prompt is the start.
        """
        best, length = None, 0
        for name, ids in self._raw.items():
            common = common_start(ids, prompt_ids, len(ids))
            if name not in self._busy and common > length and common in (len(ids), len(prompt_ids)):
                best, length = name, common
        name = best or _new_name()
        self._busy.add(name)
        return name, best is not None

    def end_raw(self, name: str, reply: Reply | None) -> None:
        self._busy.discard(name)
        if reply is not None:
            self._raw.pop(name, None)
            self._raw[name] = (*reply.prompt_ids, *reply.ids)
            while len(self._raw) > 16:
                self._raw.popitem(last=False)

    def _find(self, base: bytes, digests: Sequence[bytes]) -> str | None:
        idle = {name: place for name, place in self._places.items() if name not in self._busy}
        by_head = {place.head: name for name, place in idle.items()}
        by_question = {place.question: name for name, place in idle.items()}
        heads = (by_head.get(base + digest) for digest in reversed(digests))
        return next((name for name in heads if name is not None), by_question.get(base + digests[-1]))

    def _end(self, turn: Turn, reply: Reply | None, base: bytes, digest: bytes, *, keep_conversation: bool) -> None:
        self._busy.discard(turn.name)
        if reply is None:
            return
        if not reply.ids:  # cut off before its first token: the question asked again goes on with it
            if keep_conversation:
                self._stand(turn.name, _Place(base + digest, base + digest))
            return
        message = reply.as_message()
        head = _hash(digest, _canonical(message))
        place = _Place(base + digest, base + head)
        self._add(head, message)
        if keep_conversation:
            self._stand(turn.name, place)
        if self._path is not None:
            self._write(self._path, _line(turn.name if keep_conversation else None, place, head, message))

    def _add(self, digest: bytes, message: Message) -> None:
        old = self._replies.pop(digest, None)
        self._num_ids += len(message.ids or ()) - len((old.ids if old else None) or ())
        self._replies[digest] = message
        while self._num_ids > MAX_IDS:
            _, gone = self._replies.popitem(last=False)
            self._num_ids -= len(gone.ids or ())

    def _stand(self, name: str, place: _Place) -> None:
        self._places.pop(name, None)
        self._places[name] = place
        while len(self._places) > MAX_CONVERSATIONS:
            self._places.popitem(last=False)

    # ------------------------------------------------------------------ over restarts
    def _load(self, path: Path) -> None:
        """Take in what another start has written, and write it anew if it is more than is kept."""
        num_lines = 0
        with contextlib.suppress(OSError), open(_open(path, os.O_RDONLY), "rb") as file:
            for line in file:
                num_lines += 1
                with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):  # a line that was cut
                    self._take(json.loads(line))
        if num_lines > len(self._replies):
            self._rewrite(path)

    def _take(self, entry: dict[str, Any]) -> None:
        head = bytes.fromhex(entry["head"])
        message = Message(
            role="assistant",
            content=str(entry["text"]),
            ids=tuple(map(int, entry["ids"])),
            thinking=entry["thinking"],
            tool_calls=tuple(entry["calls"]),
        )
        self._add(head, message)
        if entry["name"] is not None:
            question, base = bytes.fromhex(entry["question"]), bytes.fromhex(entry["base"])
            self._stand(str(entry["name"]), _Place(base + question, base + head))

    def _write(self, path: Path, line: bytes) -> None:
        """A reply that cannot be written costs a later start that it tokenizes its text."""
        with contextlib.suppress(OSError), open(_open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab") as file:
            file.write(line)
            if file.tell() <= MAX_FILE_BYTES:
                return
        self._rewrite(path)

    def _rewrite(self, path: Path) -> None:
        names = {place.head: name for name, place in self._places.items()}
        by_digest = {head[-16:]: (name, self._places[name]) for head, name in names.items()}
        temporary = path.with_name(path.name + ".tmp")
        with contextlib.suppress(OSError):
            with open(_open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                for digest, message in self._replies.items():
                    name, place = by_digest.get(digest, (None, _Place(b"\0" * 32, b"\0" * 16 + digest)))
                    file.write(_line(name, place, digest, message))
            os.replace(temporary, path)


def _new_name() -> str:
    return f"http-{secrets.token_hex(8)}"


def _hash(before: bytes, value: Any) -> bytes:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return hashlib.blake2b(before + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _canonical(message: Message) -> list[Any]:
    """What makes a message the same. Clients strip replies, and write the arguments of calls anew."""
    content = message.content.strip() if message.role == "assistant" else message.content
    calls = [_canonical_call(call) for call in message.tool_calls]
    return [message.role, content, calls, message.tool_call_id, message.name if message.role != "assistant" else None]


def _canonical_call(call: Mapping[str, Any]) -> list[Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return [call.get("id"), function.get("name"), json.dumps(arguments, sort_keys=True)]


def _line(name: str | None, place: _Place, head: bytes, message: Message) -> bytes:
    entry = {
        "name": name,
        "base": place.head[:16].hex(),
        "question": place.question[16:].hex(),
        "head": head.hex(),
        "text": message.content,
        "ids": message.ids,
        "thinking": message.thinking,
        "calls": message.tool_calls,
    }
    return json.dumps(entry, separators=(",", ":")).encode() + b"\n"


def _open(path: Path, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o600)
