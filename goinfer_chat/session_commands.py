"""`goinfer-chat sessions`: the kept conversations from outside, without a model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from engine.errors import UsageError
from goinfer_chat.listing import HEADINGS, cells_of, columns, hit_lines, name_of, when
from goinfer_chat.terminal import Stream, true_text

if TYPE_CHECKING:
    from goinfer_chat.store import Conversation, Store, StoredMessage


def _take_session_dir(context: typer.Context, folder: str | None) -> str | None:
    before = context.obj if isinstance(context.obj, dict) else {}
    context.obj = {**before, "session_dir": folder or before.get("session_dir")}
    return folder


SessionDir = Annotated[
    str | None,
    typer.Option("--session-dir", metavar="DIR", help="Folder of the kept conversations.", callback=_take_session_dir),
]
"""Every command has it, as flags may stand behind a command; the callback puts it where `_store` finds it."""

Key = Annotated[str, typer.Argument(metavar="NAME", help="Name, id, or the start of an id.", parser=true_text)]
At = Annotated[int | None, typer.Option("--at", metavar="ID", help="Down to this message, on whichever branch it is.")]
Json = Annotated[bool, typer.Option("--json", help="JSON, one object a line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def sessions_app() -> typer.Typer:
    """The command group, for the program's own application."""
    app = typer.Typer(
        add_completion=False, rich_markup_mode=None, help="Kept conversations; without a command, list them."
    )

    @app.callback(invoke_without_command=True)
    def default(
        context: typer.Context,
        _folder: SessionDir = None,
    ) -> int:
        return _list(context, None, as_json=False) if context.invoked_subcommand is None else 0

    @app.command("list")
    def list_command(
        context: typer.Context,
        limit: Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="So many at most.")] = None,
        as_json: Json = False,
        _folder: SessionDir = None,
    ) -> int:
        """Show conversations, the one used last first."""
        return _list(context, limit, as_json=as_json)

    @app.command("show")
    def show_command(
        context: typer.Context, key: Key, at: At = None, as_json: Json = False, _folder: SessionDir = None
    ) -> int:
        """Print a conversation."""
        return _show(context, key, at, as_json=as_json)

    @app.command("search")
    def search_command(
        context: typer.Context,
        words: Annotated[list[str], typer.Argument(metavar="WORDS...", help='Words, or a "phrase".', parser=true_text)],
        within: Annotated[
            str | None, typer.Option("--in", metavar="NAME", help="In this conversation only.", parser=true_text)
        ] = None,
        limit: Annotated[int, typer.Option("--limit", metavar="N", min=1, help="So many at most.")] = 20,
        as_json: Json = False,
        _folder: SessionDir = None,
    ) -> int:
        """Find messages that hold all the words, on any branch; newest first."""
        return _search(context, " ".join(words), within, limit, as_json=as_json)

    @app.command("rename")
    def rename_command(
        context: typer.Context,
        key: Key,
        name: Annotated[str, typer.Argument(metavar="NEW", parser=true_text)],
        _folder: SessionDir = None,
    ) -> int:
        """Give a conversation another name."""
        return _rename(context, key, name)

    @app.command("delete")
    def delete_command(
        context: typer.Context,
        keys: Annotated[list[str], typer.Argument(metavar="NAMES...", help="Names or ids.", parser=true_text)],
        yes: Yes = False,
        _folder: SessionDir = None,
    ) -> int:
        """Delete conversations with their caches; nothing of them is left."""
        return _delete(context, keys, yes=yes)

    @app.command("fork")
    def fork_command(
        context: typer.Context,
        key: Key,
        name: Annotated[str | None, typer.Argument(metavar="[NEW]", help="Its name.", parser=true_text)] = None,
        at: At = None,
        _folder: SessionDir = None,
    ) -> int:
        """Begin another conversation with the same words and the same cache."""
        return _fork(context, key, name, at)

    @app.command("export")
    def export_command(
        context: typer.Context,
        key: Key,
        form: Annotated[
            Literal["markdown", "json"], typer.Option("--format", help="markdown to read, json to import.")
        ] = "markdown",
        output: Annotated[
            str | None, typer.Option("--output", "-o", metavar="FILE", help="Where to; else standard output.")
        ] = None,
        kv: Annotated[bool, typer.Option("--kv", help="Also the cache, as FILE with the ending .giw-kv.")] = False,
        force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
        _folder: SessionDir = None,
    ) -> int:
        """Write a conversation as Markdown or JSON."""
        return _export(context, key, form, output, kv=kv, force=force)

    @app.command("import")
    def import_command(
        context: typer.Context,
        file: Annotated[str, typer.Argument(metavar="FILE", help="An export in JSON; - reads standard input.")],
        name: Annotated[
            str | None, typer.Option("--name", metavar="NAME", parser=true_text, help="Its name here.")
        ] = None,
        kv: Annotated[
            bool, typer.Option("--kv", help="Also the ids of replies and the cache beside FILE; for files of your own.")
        ] = False,
        _folder: SessionDir = None,
    ) -> int:
        """Take in a conversation that was exported as JSON."""
        return _import(context, file, name, kv=kv)

    @app.command("set-aside")
    def set_aside_command(context: typer.Context, yes: Yes = False, _folder: SessionDir = None) -> int:
        """Move a damaged store out of the way, so that a new one can begin."""
        return _set_aside(context, yes=yes)

    return app


# -- looking -----------------------------------------------------------------------------------------------------------


def _list(context: typer.Context, limit: int | None, *, as_json: bool) -> int:
    from engine.kv_folder import list_kept
    from goinfer_chat.amounts import size

    out = Stream(sys.stdout)
    with _store(context) as store:
        conversations = store.recent(limit)
        if as_json:
            for conversation in conversations:
                _write_json(out, _as_json(store, conversation))
            return 0
        rows = [cells_of(store, conversation) for conversation in conversations]
    if not conversations:
        Stream(sys.stderr).line("no conversations are kept")
        return 0
    for line in columns([HEADINGS, *rows]):
        out.line(line)
    if kept := list_kept(_folder(context), set_aside=True):
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


def _folder(context: typer.Context) -> Path:
    """What a flag says, else what a variable or the settings file does."""
    from goinfer_chat.settings import resolve
    from goinfer_chat.store import session_folder

    return session_folder(context.obj["session_dir"] or resolve({}, os.environ).session_dir)


def _kv_cap_bytes() -> int:
    from goinfer_chat.settings import resolve

    return resolve({}, os.environ).kv_cap_bytes


def _show(context: typer.Context, key: str, at: int | None, *, as_json: bool) -> int:
    from goinfer_chat.store import HEAD
    from goinfer_chat.store.exports import message_as_json

    out = Stream(sys.stdout)
    with _store(context) as store:
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
            out.write(_json(dict(call)))
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


def _search(context: typer.Context, text: str, within: str | None, limit: int, *, as_json: bool) -> int:
    out = Stream(sys.stdout)
    with _store(context) as store:
        id = store.find(within).id if within is not None else None
        hits = store.search(text, id=id, limit=limit)
    for hit in hits:
        if as_json:
            found = {"conversation": hit.conversation.id, "name": hit.conversation.name, "message": hit.message.id}
            _write_json(out, found | {"role": hit.message.message.role, "snippet": hit.snippet})
        else:
            where, words = hit_lines(hit)
            out.line(where, dim=True)
            out.line(words)
    if not hits and not as_json:
        Stream(sys.stderr).line("nothing was found")
    return 0


# -- changing ----------------------------------------------------------------------------------------------------------


def _rename(context: typer.Context, key: str, name: str) -> int:
    with _store(context) as store:
        conversation = store.find(key)
        name = store.rename(conversation.id, name)
    Stream(sys.stderr).line(f"{name_of(conversation)} is called {name}")
    return 0


def _delete(context: typer.Context, keys: Sequence[str], *, yes: bool) -> int:
    side = Stream(sys.stderr)
    with _store(context) as store:
        conversations = {conversation.id: conversation for key in keys for conversation in [store.find(key)]}
        names = ", ".join(map(name_of, conversations.values()))
        if not yes and not _agreed(f"Delete {names}, with nothing left of it", side):
            return 0
        for conversation in conversations.values():
            if store.delete(conversation.id):
                side.line(f"deleted {name_of(conversation)}")
            else:
                side.line(
                    f"deleted {name_of(conversation)}; the last traces on the disk go when the other goinfer-chat ends "
                    "that is reading"
                )
    return 0


def _fork(context: typer.Context, key: str, name: str | None, at: int | None) -> int:
    from goinfer_chat.store import HEAD

    side = Stream(sys.stderr)
    with _store(context) as store:
        conversation = store.find(key)
        fork = store.fork(conversation.id, name=name, at=HEAD if at is None else at)
    if fork.kv_problem:
        side.line(fork.kv_problem)
    Stream(sys.stdout).line(name_of(fork.conversation))
    return 0


# -- files -------------------------------------------------------------------------------------------------------------


def _export(context: typer.Context, key: str, form: str, output: str | None, *, kv: bool, force: bool) -> int:
    from goinfer_chat.files import copy_private, reason_of, write_private
    from goinfer_chat.store.exports import to_json, to_markdown
    from goinfer_chat.terminal import sanitize

    if kv and (output is None or form != "json"):
        raise UsageError("--kv needs --format json and a file: --output FILE")
    with _store(context) as store:
        conversation = store.find(key)
        if form == "json":
            text = to_json(conversation, store.tree(conversation.id))
        else:
            text = sanitize(to_markdown(conversation, store.path(conversation.id)), terminal=False)
        if output is None:
            Stream(sys.stdout).write(text)
            return 0
        file = Path(output).expanduser()
        if file.parent.resolve() == store.folder.resolve():
            raise UsageError(f"{_shown(file)} would lie among the kept conversations; name another folder")
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


def _import(context: typer.Context, file: str, name: str | None, *, kv: bool) -> int:
    from dataclasses import replace

    from goinfer_chat.files import reason_of
    from goinfer_chat.store.exports import MAX_IMPORT_BYTES, from_json, without_ids

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
    with _store(context) as store:
        added = store.add(new, kv_file=_beside(path) if kv else None, number_name=name is None)
    if added.kv_problem:
        Stream(sys.stderr).line(added.kv_problem)
    Stream(sys.stdout).line(name_of(added.conversation))
    return 0


def _set_aside(context: typer.Context, *, yes: bool) -> int:
    from goinfer_chat.store import set_aside

    side = Stream(sys.stderr)
    folder = _folder(context)
    if not yes and not _agreed(f"Move the conversations of {_shown(folder)} out of the way", side):
        return 0
    for path in set_aside(folder):
        side.line(f"moved to {_shown(path)}")
    return 0


def _beside(file: Path) -> Path:
    from engine.kv_folder import SUFFIX

    return file.with_suffix(SUFFIX)


# ----------------------------------------------------------------------------------------------------------------------


@contextmanager
def _store(context: typer.Context) -> Iterator[Store]:
    from goinfer_chat.store import Store

    with Store(_folder(context)) as store:
        yield store


def _agreed(question: str, side: Stream) -> bool:
    """Raises UsageError where there is nobody to ask."""
    if not sys.stdin.isatty():
        raise UsageError("there is no terminal to ask at; --yes does it without asking")
    side.write(f"{question}? [y/N] ")
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _shown(path: Any) -> str:
    return true_text(str(path))


def _json(value: dict[str, Any]) -> str:
    from goinfer_chat.view.render import to_json

    return to_json(value)


def _write_json(out: Stream, value: dict[str, Any]) -> None:
    out.write(_json(value))
