"""`goinfer-chat sessions`: its commands and their flags. What they do is in session_actions.py."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from goinfer_chat.cli import number_flag
from goinfer_chat.flag_completion import offer_of, sessions
from goinfer_chat.terminal import true_text


def _take_session_dir(context: typer.Context, folder: str | None) -> str | None:
    before = context.obj if isinstance(context.obj, dict) else {}
    context.obj = {**before, "session_dir": folder or before.get("session_dir")}
    return folder


_KEPT = offer_of(sessions)

SessionDir = Annotated[
    str | None,
    typer.Option(
        "--session-dir", metavar="DIR", help="Folder where conversations are kept.", callback=_take_session_dir
    ),
]
"""Every command has it, as flags may stand behind a command; the callback puts it where `_folder_of` finds it."""

Key = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A conversation's name, its id, or the start of its id.",
        parser=true_text,
        autocompletion=offer_of(sessions),
    ),
]
At = Annotated[int | None, number_flag("--at", "Only down to this message, on whichever branch it is.", metavar="ID")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def sessions_app() -> typer.Typer:
    """The command group, for the program's own application."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        help="List, show, search and change the kept conversations. Without a command: list them.",
    )

    @app.callback(invoke_without_command=True)
    def default(context: typer.Context, _folder: SessionDir = None) -> int:
        if context.invoked_subcommand is not None:
            return 0
        from goinfer_chat import session_actions as actions

        return actions.list_conversations(_folder_of(context), None, as_json=False)

    _add_reading(app)
    _add_changing(app)
    _add_files(app)
    return app


def _add_reading(app: typer.Typer) -> None:
    @app.command("list")
    def list_command(
        context: typer.Context,
        limit: Annotated[int | None, number_flag("--limit", "Show at most N.", least=1)] = None,
        as_json: Json = False,
        _folder: SessionDir = None,
    ) -> int:
        """List conversations, the most recently used first."""
        from goinfer_chat import session_actions as actions

        return actions.list_conversations(_folder_of(context), limit, as_json=as_json)

    @app.command("show")
    def show_command(
        context: typer.Context, key: Key, at: At = None, as_json: Json = False, _folder: SessionDir = None
    ) -> int:
        """Print the messages of a conversation."""
        from goinfer_chat import session_actions as actions

        return actions.show(_folder_of(context), key, at, as_json=as_json)

    @app.command("search")
    def search_command(
        context: typer.Context,
        words: Annotated[list[str], typer.Argument(metavar="WORDS...", help='Words, or a "phrase".', parser=true_text)],
        within: Annotated[
            str | None,
            typer.Option(
                "--in",
                metavar="NAME",
                help="Search only this conversation.",
                parser=true_text,
                autocompletion=offer_of(sessions),
            ),
        ] = None,
        limit: Annotated[int, number_flag("--limit", "Show at most N.", least=1)] = 20,
        as_json: Json = False,
        _folder: SessionDir = None,
    ) -> int:
        """Find messages that contain all the words, on any branch; newest first."""
        from goinfer_chat import session_actions as actions

        return actions.search(_folder_of(context), " ".join(words), within, limit, as_json=as_json)


def _add_changing(app: typer.Typer) -> None:
    @app.command("rename")
    def rename_command(
        context: typer.Context,
        key: Key,
        name: Annotated[str, typer.Argument(metavar="NEW", parser=true_text)],
        _folder: SessionDir = None,
    ) -> int:
        """Rename a conversation."""
        from goinfer_chat import session_actions as actions

        return actions.rename(_folder_of(context), key, name)

    @app.command("delete")
    def delete_command(
        context: typer.Context,
        keys: Annotated[
            list[str],
            typer.Argument(
                metavar="NAMES...", help="Names or ids.", parser=true_text, autocompletion=offer_of(sessions)
            ),
        ],
        yes: Yes = False,
        _folder: SessionDir = None,
    ) -> int:
        """Delete conversations and their caches for good."""
        from goinfer_chat import session_actions as actions

        return actions.delete(_folder_of(context), keys, yes=yes)

    @app.command("fork")
    def fork_command(
        context: typer.Context,
        key: Key,
        name: Annotated[str | None, typer.Argument(metavar="[NEW]", help="Name of the copy.", parser=true_text)] = None,
        at: At = None,
        _folder: SessionDir = None,
    ) -> int:
        """Copy a conversation, with its cache."""
        from goinfer_chat import session_actions as actions

        return actions.fork(_folder_of(context), key, name, at)


def _add_files(app: typer.Typer) -> None:
    @app.command("export")
    def export_command(
        context: typer.Context,
        key: Key,
        form: Annotated[
            Literal["markdown", "json"],
            typer.Option("--format", help="markdown is for reading, json can be imported again."),
        ] = "markdown",
        output: Annotated[
            str | None,
            typer.Option(
                "--output", "-o", metavar="FILE", help="Write to this file; if not given, to standard output."
            ),
        ] = None,
        kv: Annotated[
            bool, typer.Option("--kv", help="Also write the cache, beside FILE with the ending .giw-kv.")
        ] = False,
        force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False,
        _folder: SessionDir = None,
    ) -> int:
        """Export a conversation as Markdown or JSON."""
        from goinfer_chat import session_actions as actions

        return actions.export(_folder_of(context), key, form, output, kv=kv, force=force)

    @app.command("import")
    def import_command(
        context: typer.Context,
        file: Annotated[str, typer.Argument(metavar="FILE", help="A JSON export; - reads standard input.")],
        name: Annotated[
            str | None, typer.Option("--name", metavar="NAME", parser=true_text, help="Name to give it here.")
        ] = None,
        kv: Annotated[
            bool,
            typer.Option(
                "--kv", help="Also take the token ids of replies and the cache beside FILE; only for files you trust."
            ),
        ] = False,
        _folder: SessionDir = None,
    ) -> int:
        """Import a conversation that was exported as JSON."""
        from goinfer_chat import session_actions as actions

        return actions.import_file(_folder_of(context), file, name, kv=kv)

    @app.command("set-aside")
    def set_aside_command(context: typer.Context, yes: Yes = False, _folder: SessionDir = None) -> int:
        """Move a damaged store out of the way, so that a new one can be made."""
        from goinfer_chat import session_actions as actions

        return actions.move_aside(_folder_of(context), yes=yes)


def _folder_of(context: typer.Context) -> Path:
    """What a flag says, else what a variable or the settings file does."""
    from goinfer_chat.resolving import resolve
    from goinfer_chat.store import session_folder

    return session_folder(context.obj["session_dir"] or resolve({}, os.environ).session_dir)
