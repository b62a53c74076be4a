"""The command line: `goinfer-chat` and its commands.

Nothing heavy is imported before a command needs it, so that --help answers at once.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from engine.errors import GoinferError, UsageError
from goinfer_chat import __version__
from goinfer_chat.flag_completion import completions, models, offer_of
from goinfer_chat.loading import load_engine
from goinfer_chat.resolving import resolve, unknown_variables
from goinfer_chat.settings import BY_FLAG, SETTINGS, Setting, Settings
from goinfer_chat.start import INTERRUPTED, interrupts_end_the_program, interrupts_raise
from goinfer_chat.terminal import OutputError, ReaderGoneError, Stream, open_closed_descriptors
from goinfer_chat.values import parse_bool, parse_int, parse_size, written_size

if TYPE_CHECKING:
    from goinfer_chat.modes import EngineFactory

Flags = dict[str, Any]
"""Values by setting name; None where a flag was not given."""

EPILOG = (
    "Each flag can also be set by an environment variable (--top-k by GOINFER_CHAT_TOP_K) or in the settings file "
    "(`goinfer-chat config` prints one to start from). A flag wins over a variable, a variable over the file."
)


def main(make_engine: EngineFactory = load_engine) -> NoReturn:
    """Runs the command line of this process and ends it with the exit codes of docs/cli.md."""
    open_closed_descriptors()
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for as long as the program runs
    try:
        app = build_app(make_engine)
        interrupts_raise()
        code = _run(app)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        interrupts_end_the_program()
    if _turn_is_running():
        # Its thread would run into memory that Python takes down at exit.
        os._exit(code)
    sys.exit(code)


def _turn_is_running() -> bool:
    if "goinfer_chat.turn" not in sys.modules:
        return False
    from goinfer_chat.turn import turn_is_running

    return turn_is_running()


def _run(app: typer.Typer) -> int:
    try:
        if sys.stdout is None:
            raise GoinferError("standard output is closed, so a reply has nowhere to go")
        if sys.argv[1:] == ["--version"]:
            # Asked by itself it does not wait for what Typer imports to read flags.
            Stream(sys.stdout).line(f"goinfer-chat {__version__}")
            return 0
        return int(typer.main.get_command(app).main(prog_name="goinfer-chat", standalone_mode=False) or 0)
    except typer.Abort:
        return INTERRUPTED
    except typer.TyperException as error:
        return _failed(UsageError(f"{error.format_message().rstrip('.')}; {_advice(error)}"))
    except SystemExit as error:
        # Typer ends so when the reader of a help text is gone; other codes come from signals.
        return ReaderGoneError.exit_code if error.code == 1 else int(error.code or 0)
    except Exception as error:  # noqa: BLE001 - the last place an error can be shown
        return _failed(error)


def _advice(error: typer.TyperException) -> str:
    """Somebody who types a question where a command is expected is shown how to ask it."""
    usage = "goinfer-chat --help shows the usage"
    is_lone_word = error.format_message().startswith("No such command") and "Did you mean" not in error.format_message()
    return f'goinfer-chat run "QUESTION" asks a question, and {usage}' if is_lone_word else usage


def _failed(error: Exception) -> int:
    """Shows an error where its reader looks: as JSON among the replies, else on standard error."""
    from goinfer_chat.view.render import error_object, exit_code, report_error, to_json

    as_json = is_on("json", sys.argv[1:], os.environ) and not isinstance(error, OutputError)
    with suppress(OutputError):
        if as_json:
            Stream(sys.stdout).write(to_json(error_object(error)))
        elif not isinstance(error, ReaderGoneError):
            report_error(error, Stream(sys.stderr))
    return exit_code(error)


def build_app(make_engine: EngineFactory) -> typer.Typer:
    app = typer.Typer(
        rich_markup_mode=None,
        help="Chat with a language model in the terminal. Without a command: start a chat.",
        epilog=EPILOG,
    )

    _add_default(app, make_engine)
    _add_turns(app, make_engine)
    _add_models(app)
    _add_check(app, make_engine)

    from goinfer_chat.bench.commands import bench_app
    from goinfer_chat.config_command import config_app
    from goinfer_chat.serve_command import serve_command
    from goinfer_chat.session_commands import sessions_app

    app.command("serve", epilog=EPILOG)(serve_command(make_engine, os.environ))
    app.add_typer(sessions_app(), name="sessions")
    app.add_typer(config_app(), name="config")
    app.add_typer(bench_app(make_engine, os.environ), name="bench")
    return app


def _add_default(app: typer.Typer, make_engine: EngineFactory) -> None:
    """What runs before every command, and in place of one."""

    @app.callback(invoke_without_command=True)
    @with_settings
    def default(
        context: typer.Context,
        flags: Flags,
        version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
    ) -> int:
        if version:
            typer.echo(f"goinfer-chat {__version__}")
            raise typer.Exit
        context.obj = flags
        if not is_on("quiet", sys.argv[1:], os.environ):
            for notice in unknown_variables(os.environ):
                Stream(sys.stderr).line(notice)
        match context.invoked_subcommand:
            case None:
                from goinfer_chat.modes import chat

                return chat(resolve(flags, os.environ), make_engine)
            case ("models" | "pull" | "sessions") as name if any(
                value is not None for flag, value in flags.items() if (name, flag) != ("sessions", "session_dir")
            ):
                raise UsageError(f"{name} takes none of the flags that stand before it; leave them out")
            case _:
                return 0


def _add_turns(app: typer.Typer, make_engine: EngineFactory) -> None:
    """The commands that ask a model, and the list of what it may call."""

    @app.command("chat", epilog=EPILOG)
    @with_settings
    def chat_command(context: typer.Context, flags: Flags) -> int:
        """Chat at a prompt, or with the lines of standard input. This is the default command."""
        from goinfer_chat.modes import chat

        return chat(resolve(given_flags(context, flags), os.environ), make_engine)

    @app.command("run", epilog=EPILOG)
    @with_settings
    def run_command(
        context: typer.Context,
        flags: Flags,
        question: Annotated[str | None, typer.Argument(help="The question; - reads it from standard input.")] = None,
        tool: Annotated[
            str | None, typer.Option(metavar="TOOL", help="Have the model call this tool, and print the call.")
        ] = None,
        execute: Annotated[
            bool, typer.Option("--execute", help="With --tool: also run the call, and print its result.")
        ] = False,
        attach: Annotated[
            list[str] | None,
            typer.Option(metavar="FILE[#10-40]", help="Attach a file, or some lines of it; may be repeated."),
        ] = None,
        schema: Annotated[
            str | None, typer.Option(metavar="FILE", help="Make the reply JSON that is valid under this JSON schema.")
        ] = None,
    ) -> int:
        """Answer one question, or each line of standard input, and exit."""
        settings = resolve(given_flags(context, flags), os.environ)
        return _run_question(settings, make_engine, question, tool=tool, execute=execute, attach=attach, schema=schema)

    @app.command("agent", epilog=EPILOG)
    @with_settings
    def agent_command(
        context: typer.Context,
        flags: Flags,
        task: Annotated[str | None, typer.Argument(help="The task; - reads it from standard input.")] = None,
    ) -> int:
        """Work on a task in this folder with tools, until it is done."""
        from goinfer_chat.calls.modes import run_agent

        return run_agent(resolve(given_flags(context, flags), os.environ), make_engine, task)

    @app.command("tools", epilog=EPILOG)
    @with_settings
    def tools_command(context: typer.Context, flags: Flags) -> int:
        """List the tools a model may call, with their risk and their arguments."""
        from goinfer_chat.calls.modes import show_tools

        return show_tools(resolve(given_flags(context, flags), os.environ))


def _add_models(app: typer.Typer) -> None:
    @app.command("models")
    def models_command(
        supported: Annotated[
            bool, typer.Option("--supported", help="List the architectures and tensor types that run instead.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="With --supported: print JSON.")] = False,
    ) -> int:
        """List the models on this machine and those that can be downloaded."""
        from goinfer_chat.models.command import show_models, show_supported

        if as_json and not supported:
            raise UsageError("models --json needs --supported")
        return show_supported(Stream(sys.stdout), as_json=as_json) if supported else show_models(Stream(sys.stdout))

    @app.command("pull")
    def pull_command(
        model: Annotated[
            str,
            typer.Argument(
                help="A name that `models` lists, hf:OWNER/REPO[:FILE or QUANT], or a path.",
                autocompletion=offer_of(models),
            ),
        ],
    ) -> int:
        """Download a model, verify it, and print the path of its file."""
        from goinfer_chat.models.command import pull_model

        return pull_model(model, Stream(sys.stdout), Stream(sys.stderr))


def _add_check(app: typer.Typer, make_engine: EngineFactory) -> None:
    @app.command("check", epilog=EPILOG)
    @with_settings
    def check_command(
        context: typer.Context,
        flags: Flags,
        perplexity: Annotated[
            str | None, typer.Option(metavar="FILE", help="Measure perplexity on this UTF-8 text instead.")
        ] = None,
    ) -> int:
        """Measure how fast a model runs on this machine (two minutes); or how well it predicts a text."""
        settings = resolve(given_flags(context, flags), os.environ)
        if perplexity is None and settings.backend == "torch":
            from goinfer_chat.torch_check import check_torch

            return check_torch(settings, make_engine)
        if perplexity is None:
            from goinfer_chat.bench.check import check_machine

            return check_machine(settings, make_engine)
        from goinfer_chat.perplexity_check import check_perplexity

        return check_perplexity(settings, make_engine, perplexity)


def _run_question(
    settings: Settings,
    make_engine: EngineFactory,
    question: str | None,
    *,
    tool: str | None,
    execute: bool,
    attach: list[str] | None,
    schema: str | None,
) -> int:
    """`run` in one of its three forms. Returns the exit code. Raises UsageError for flags that exclude each other."""
    if tool is None and execute:
        raise UsageError("--execute runs the call of --tool; give both")
    if tool is not None and schema is not None:
        raise UsageError("a reply cannot be both a call of --tool and JSON of --schema; give only one of them")
    if tool is None and schema is None:
        from goinfer_chat.modes import run

        return run(settings, make_engine, question, attach or ())
    if attach:
        raise UsageError("--attach goes with neither --tool nor --schema")
    from goinfer_chat.calls.modes import run_forced, run_with_schema

    if schema is not None:
        return run_with_schema(settings, make_engine, question, schema)
    assert tool is not None
    return run_forced(settings, make_engine, question, tool, execute)


def given_flags(context: typer.Context, flags: Flags) -> Flags:
    """Flags before the name of a command count too, unless they are given again behind it."""
    before: Flags = context.obj
    return before | {name: value for name, value in flags.items() if value is not None}


def is_on(switch: str, arguments: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether a switch is on, before the command line is read and also where it cannot be."""
    if given := [argument for argument in arguments if argument in (f"--{switch}", f"--no-{switch}")]:
        return given[-1] == f"--{switch}"
    try:
        return parse_bool(environ.get(BY_FLAG[switch].variable, ""))
    except UsageError:
        return False


def with_settings(function: Callable[..., int], settings: Sequence[Setting] = SETTINGS) -> Callable[..., int]:
    """Replaces the parameter `flags` by a flag for each setting; the function gets their values, None if not given."""

    def command(**given: Any) -> int:
        flags = {setting.name: given.pop(setting.name) for setting in settings}
        for setting in settings:
            if setting.repeatable:
                flags[setting.name] = tuple(chain(*flags[setting.name])) if flags[setting.name] else None
        return function(flags=flags, **given)

    parameters = dict(inspect.signature(function, eval_str=True).parameters)
    del parameters["flags"]
    parameters |= {setting.name: _parameter(setting) for setting in settings}
    by_keyword = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters.values()]
    command.__signature__ = inspect.Signature(by_keyword)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in by_keyword}
    command.__doc__ = function.__doc__
    return command


def flag_parser(parse: Callable[[str], Any]) -> Callable[[Any], Any]:
    """The parser of a flag's value as Typer wants it, which gives it the default too."""

    def parsed(value: Any) -> Any:
        try:
            return parse(value) if isinstance(value, str) else value
        except UsageError as error:
            raise typer.BadParameter(str(error)) from None

    return parsed


def number_flag(flag: str, help: str, *, metavar: str = "N", least: int | None = None) -> Any:
    """A flag whose value is a whole number."""

    def parse(text: str) -> int:
        value = parse_int(text)
        if least is not None and value < least:
            raise UsageError(f"must be {least} or more, not {value}")
        return value

    return typer.Option(flag, metavar=metavar, help=help, parser=flag_parser(parse))


def _parameter(setting: Setting) -> inspect.Parameter:
    default = Settings().value(setting.name)
    known = default is not None and not setting.switch and not setting.repeatable
    if setting.parse is parse_size:
        default = written_size(default)
    help = f"{setting.help} [default: {default}]" if known else setting.help
    flag = f"--{setting.flag}"
    kind: Any = str
    if setting.switch:
        option = typer.Option(f"{flag}/--no-{setting.flag}", help=help, show_default=False)
        kind = bool
    else:
        option = typer.Option(
            flag,
            help=help,
            metavar=setting.argument,
            parser=flag_parser(setting.parse),
            show_default=False,
            autocompletion=completions(setting),
        )
        kind = list[str] if setting.repeatable else str
    return inspect.Parameter(
        setting.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )
