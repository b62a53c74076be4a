"""`goinfer-chat config`: the settings file, and what is set where."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from engine.errors import UsageError
from goinfer_chat.files import make_folder, write_new
from goinfer_chat.resolving import from_environment, resolve
from goinfer_chat.settings import SETTINGS
from goinfer_chat.terminal import Stream, true_text

Config = Annotated[str | None, typer.Option("--config", metavar="FILE", help="Use this settings file.")]


def config_app() -> typer.Typer:
    """The command group, for the program's own application."""
    app = typer.Typer(
        add_completion=False,
        rich_markup_mode=None,
        help="Show or create the settings file. Without a command: print a commented one that changes nothing.",
    )

    @app.callback(invoke_without_command=True)
    def default(context: typer.Context) -> int:
        if context.invoked_subcommand is None:
            from goinfer_chat.settings_file import template

            Stream(sys.stdout).write(template())
        return 0

    @app.command("path")
    def path_command(context: typer.Context, config: Config = None) -> int:
        """Print the path of the settings file, whether or not it exists."""
        Stream(sys.stdout).line(true_text(str(_path(_flags(context) | _given(config)))))
        return 0

    @app.command("init")
    def init_command(context: typer.Context, config: Config = None) -> int:
        """Create the commented settings file, unless there is one, and print its path."""
        return _init(_path(_flags(context) | _given(config)))

    @app.command("show")
    def show_command(context: typer.Context, config: Config = None) -> int:
        """Show the settings that are not at their defaults, and what set each."""
        return _show(_flags(context) | _given(config))

    return app


def _flags(context: typer.Context) -> dict[str, Any]:
    """The flags before the command."""
    root: Mapping[str, Any] | None = context.find_root().obj
    return {name: value for name, value in (root or {}).items() if value is not None}


def _given(config: str | None) -> dict[str, Any]:
    return {} if config is None else {"config": config}


def _path(flags: Mapping[str, Any]) -> Path:
    from goinfer_chat.settings_file import VARIABLE, settings_path

    path = settings_path(flags.get("config") or os.environ.get(VARIABLE) or None)
    if path is None:
        raise UsageError("no place for a settings file is known; --config FILE names one")
    return path


def _init(path: Path) -> int:
    from goinfer_chat.settings_file import not_written, template

    try:
        make_folder(path.parent)
    except OSError as error:
        raise not_written(path, error) from None
    write_new(path, template())
    Stream(sys.stdout).line(true_text(str(path)))
    return 0


def _show(flags: Mapping[str, Any]) -> int:
    from goinfer_chat.settings_file import read_settings_file, to_toml

    settings = resolve(flags, os.environ)  # what cannot be obeyed is an error here too
    variables = from_environment(os.environ)
    profile = settings.profile
    common = read_settings_file(settings.config, None)
    kept = read_settings_file(settings.config, profile)
    out = Stream(sys.stdout)
    for setting in SETTINGS:
        name = setting.name
        if name in flags:
            source = f"--{setting.flag}"
        elif name in variables:
            source = setting.variable
        elif name in kept:
            source = "the file" if profile is None or common.get(name) == kept[name] else f"profile {profile}"
        else:
            continue
        out.line(f"{setting.flag} = {to_toml(settings.value(name))}  # {source}")
    return 0
