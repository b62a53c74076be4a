"""The commands below `goinfer-chat bench`: flags in, tables or JSON out."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, TypeVar, get_args

import typer

from engine.api import SpeculationMode
from engine.errors import UsageError
from goinfer_chat.cli import Flags, flag_parser, given_flags, number_flag, with_settings
from goinfer_chat.loading import find_model
from goinfer_chat.resolving import resolve
from goinfer_chat.settings import SETTINGS, Settings
from goinfer_chat.terminal import Stream
from goinfer_chat.values import parse_float, parse_int

if TYPE_CHECKING:
    from engine.api import Engine
    from goinfer_chat.bench.agents import Load
    from goinfer_chat.bench.asking import Progress
    from goinfer_chat.bench.clients import ClientsRow
    from goinfer_chat.bench.peer_process import PeerChoice
    from goinfer_chat.bench.traffic import WayRow
    from goinfer_chat.modes import EngineFactory

_FLAGS: Final = ("model", "backend", "device", "ctx", "threads", "json", "quiet")
_SETTINGS: Final = tuple(s for s in SETTINGS if s.flag in _FLAGS)
_SPEED_SETTINGS: Final = tuple(s for s in _SETTINGS if s.flag not in ("backend", "device", "ctx"))
_TRAFFIC_SETTINGS: Final = tuple(s for s in SETTINGS if s in _SETTINGS or s.flag in ("draft", "max-tokens"))


class _HasObject(Protocol):
    def as_object(self) -> dict[str, Any]: ...


Row = TypeVar("Row", bound=_HasObject)

PeerName = Annotated[
    str | None,
    typer.Option("--peer", metavar="NAME", help="Also measure this program, in turn with ours: llama.cpp or openvino."),
]
ReusingPeer = Annotated[
    str | None, typer.Option("--peer", metavar="NAME", help="Also measure this program, in turn with ours: llama.cpp.")
]
PeerPython = Annotated[
    str | None,
    typer.Option("--peer-python", metavar="PATH", help="The Python that the peer is installed in. [default: this one]"),
]
Spec = Annotated[
    str,
    typer.Option("--spec", metavar="NAME", help="Compare this way of guessing with plain decoding: ngram or model."),
]
Repeat = Annotated[int, number_flag("--repeat", "How many times to measure everything.")]


SettingsOf = Callable[[typer.Context, Flags], Settings]


def bench_app(make_engine: EngineFactory, environ: Mapping[str, str]) -> typer.Typer:
    """The commands, with what makes an engine and the environment that settings come from."""
    app = typer.Typer(
        help="Measure how fast a model runs here, compared with the limits of the machine.", rich_markup_mode=None
    )

    def settings_of(context: typer.Context, flags: Flags) -> Settings:
        return resolve(given_flags(context, flags), environ)

    _add_speed(app, make_engine, settings_of)
    _add_traffic(app, make_engine, settings_of)
    _add_several(app, make_engine, settings_of)
    return app


def _add_speed(app: typer.Typer, make_engine: EngineFactory, settings_of: SettingsOf) -> None:
    @app.command("speed")
    @partial(with_settings, settings=_SPEED_SETTINGS)
    def speed_command(
        context: typer.Context,
        flags: Flags,
        prefill: Annotated[
            str, typer.Option(metavar="N,N", help="Lengths of the prompts in tokens; or none.")
        ] = "512,3020",
        depth: Annotated[
            str, typer.Option(metavar="N,N", help="Tokens in the cache when decoding starts.")
        ] = "128,2048",
        rows: Annotated[
            str, typer.Option(metavar="N,N", help="Numbers of rows per step, to see what each costs.")
        ] = "none",
        tokens: Annotated[int, number_flag("--tokens", "How many tokens to decode each time.")] = 64,
        repeat: Repeat = 5,
        peer: PeerName = None,
        peer_python: PeerPython = None,
    ) -> int:
        """Measure prefill and decode, compared with the limits of the machine."""
        from goinfer_chat.bench.speed import Plan

        plan = Plan(
            prefill=parse_counts(prefill),
            depths=parse_counts(depth),
            rows=parse_counts(rows),
            tokens=tokens,
            repeat=repeat,
        )
        return _speed(settings_of(context, flags), plan, _peer(peer, peer_python))

    @app.command("replay")
    @partial(with_settings, settings=_SETTINGS)
    def replay_command(
        context: typer.Context,
        flags: Flags,
        turns: Annotated[int, number_flag("--turns", "Number of turns in the session.")] = 10,
        reuse: Annotated[bool, typer.Option(help="Reuse what was read before, or read everything each turn.")] = True,
        both: Annotated[bool, typer.Option("--both", help="Also measure without reuse, and show both.")] = False,
        restart: Annotated[bool, typer.Option("--restart", help="Restart the engine before each turn.")] = False,
        tool_schemas: Annotated[int, number_flag("--tool-schemas", "Number of tools in the prompt, 4 to 25.")] = 4,
        repeat: Repeat = 3,
        peer: ReusingPeer = None,
        peer_python: PeerPython = None,
    ) -> int:
        """Measure the time to the first token, turn by turn, in a coding agent's session."""
        _at_least_one(repeat)
        if both and not reuse:
            raise UsageError("--both measures with and without reuse; leave out --no-reuse")
        if restart and not reuse:
            raise UsageError("--restart measures what is reused from the disk; leave out --no-reuse")
        choice = _peer(peer, peer_python)
        if choice is not None and choice.name != "llama.cpp":
            raise UsageError(f"{choice.name} is measured by bench speed only; bench replay takes: llama.cpp")
        plan = ReplayPlan(turns, tool_schemas, repeat, reuse=reuse, both=both, restart=restart)
        return _replay(settings_of(context, flags), make_engine, plan, choice)


def _add_traffic(app: typer.Typer, make_engine: EngineFactory, settings_of: SettingsOf) -> None:
    @app.command("copy")
    @partial(with_settings, settings=_TRAFFIC_SETTINGS)
    def copy_command(context: typer.Context, flags: Flags, spec: Spec = "off", repeat: Repeat = 3) -> int:
        """Measure decoding of a reply that repeats code from the prompt."""
        _at_least_one(repeat)
        return _traffic(settings_of(context, flags), make_engine, "copy", spec, repeat)

    @app.command("chat")
    @partial(with_settings, settings=_TRAFFIC_SETTINGS)
    def chat_command(context: typer.Context, flags: Flags, spec: Spec = "off", repeat: Repeat = 3) -> int:
        """Measure decoding of replies to ordinary questions."""
        _at_least_one(repeat)
        return _traffic(settings_of(context, flags), make_engine, "chat", spec, repeat)


def _add_several(app: typer.Typer, make_engine: EngineFactory, settings_of: SettingsOf) -> None:
    @app.command("clients")
    @partial(with_settings, settings=_TRAFFIC_SETTINGS)
    def clients_command(
        context: typer.Context,
        flags: Flags,
        clients: Annotated[int, number_flag("--clients", "Number of conversations at the same time.")] = 4,
        spec: Spec = "off",
        repeat: Repeat = 3,
    ) -> int:
        """Measure several conversations at the same time, compared with one after the other."""
        _at_least_one(repeat)
        if not 2 <= clients <= 32:
            raise UsageError(f"clients must be between 2 and 32, not {clients}")
        return _clients(settings_of(context, flags), make_engine, clients, spec, repeat)

    @app.command("agents")
    @partial(with_settings, settings=_SETTINGS)
    def agents_command(
        context: typer.Context,
        flags: Flags,
        slots: Annotated[
            str, typer.Option(metavar="N,N", help="How many agents may run, and stay in memory, at a time.")
        ] = "2,4",
        conversations: Annotated[int, number_flag("--conversations", "Number of agents at the same time.")] = 3,
        turns: Annotated[int, number_flag("--turns", "Number of turns of each agent.")] = 10,
        scale: Annotated[
            float,
            typer.Option(
                metavar="X",
                help="Length of the texts; at 1, 6,000 tokens at first and 1,600 more each turn.",
                parser=flag_parser(parse_float),
            ),
        ] = 0.1,
    ) -> int:
        """Agents that run at the same time, over HTTP, with a slot each and with fewer."""
        from goinfer_chat.bench.agents import Load

        counts = parse_counts(slots)
        if not counts or not all(1 <= count <= 32 for count in counts):
            raise UsageError("slots must be between 1 and 32")
        load = Load(conversations=conversations, turns=turns, scale=scale)
        return _agents(settings_of(context, flags), make_engine, load, counts)


def parse_counts(text: str) -> tuple[int, ...]:
    """Numbers with commas between them; `none` is none. Raises UsageError."""
    return () if text == "none" else tuple(parse_int(part) for part in text.split(","))


def speculation_modes(spec: str) -> tuple[SpeculationMode, ...]:
    """Plain decoding, and what is measured in turn with it. Raises UsageError."""
    known: tuple[SpeculationMode, ...] = get_args(SpeculationMode)
    found = next((mode for mode in known if mode == spec), None)
    if found is None:
        raise UsageError(f"unknown speculation {spec!r}; choose from: {', '.join(known)}")
    return ("off",) if found == "off" else ("off", found)


def _at_least_one(repeat: int) -> None:
    if repeat < 1:
        raise UsageError(f"repeat must be 1 or more, not {repeat}")


def _peer(name: str | None, python: str | None) -> PeerChoice | None:
    from goinfer_chat.bench.peer_process import PeerChoice

    if name is None:
        if python is not None:
            raise UsageError("--peer-python says where a peer is; give --peer too")
        return None
    return PeerChoice(name=name, python=python or sys.executable)


def _streams(settings: Settings) -> tuple[Stream, Stream]:
    return Stream(sys.stdout), Stream(None if settings.quiet else sys.stderr)


def _show(settings: Settings, out: Stream, result: dict[str, Any], lines: Sequence[str]) -> int:
    if settings.json:
        from goinfer_chat.view.render import to_json

        out.write(to_json({"date": datetime.datetime.now().astimezone().date().isoformat(), **result}))
    else:
        for line in lines:
            out.line(line)
    return 0


def _speed(settings: Settings, plan: Any, peer: PeerChoice | None) -> int:
    from goinfer_chat.bench.speed import measure_speed

    out, side = _streams(settings)
    path = find_model(settings.model, side)
    result = measure_speed(path, plan, threads=settings.threads, peer=peer, progress=partial(_progress, side))
    side.clear_status()
    return _show(settings, out, result.as_object(), result.lines())


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """What `bench replay` measures."""

    turns: int
    tools: int
    """Schemas in the prompt."""
    repeat: int
    reuse: bool
    both: bool
    """Also without reuse."""
    restart: bool


def _replay(settings: Settings, make_engine: EngineFactory, plan: ReplayPlan, peer: PeerChoice | None) -> int:
    from goinfer_chat.bench.machine import describe
    from goinfer_chat.bench.peer_process import Peer
    from goinfer_chat.bench.replay import Replay, Restarts, beside_no_reuse, lines

    out, side = _streams(settings)
    machine = describe()
    with ExitStack() as close:
        engine = close.enter_context(closing(make_engine(settings, side)))
        info = engine.info
        other = None
        if peer is not None:
            path = find_model(settings.model, side)
            other = close.enter_context(Peer(peer, path, threads=info.threads, num_positions=info.context_size))
        restarts = close.enter_context(Restarts(partial(make_engine, settings, side))) if plan.restart else None
        play = partial(Replay, engine, num_turns=plan.turns, num_tools=plan.tools)
        progress = partial(_progress, side)
        rows = play(reuse=plan.reuse, peer=other, restarts=restarts).play(plan.repeat, progress)
        if plan.both:
            rows = beside_no_reuse(rows, play(reuse=False).play(plan.repeat, progress))
        name = f"{other.name} {other.version}" if other else None
    side.clear_status()
    about = {
        "model": info.name,
        "machine": machine.as_object(),
        "threads": info.threads,
        "peer": name,
        "reuse": plan.reuse,
    }
    about |= {"restart": plan.restart, "tools": plan.tools}
    restarted = ", started anew before each turn" if plan.restart else ""
    head = [
        f"{info.name}, {'with' if plan.reuse else 'without'} reuse{restarted}, {plan.tools} tools in the prompt",
        *machine.lines(info.threads),
        "",
    ]
    return _show(settings, out, about | {"turns": [row.as_object() for row in rows]}, head + lines(rows, name))


def _traffic(settings: Settings, make_engine: EngineFactory, kind: str, spec: str, repeat: int) -> int:
    from goinfer_chat.bench.traffic import CHAT, COPY, MAX_TOKENS, copied_share, lines, measure, ways_of

    def rows(engine: Engine, modes: Sequence[SpeculationMode], progress: Progress) -> list[WayRow]:
        return measure(
            COPY if kind == "copy" else CHAT,
            ways_of(engine, modes),
            engine.forget,
            max_tokens=settings.max_tokens or MAX_TOKENS,
            repeat=repeat,
            progress=progress,
            judge=copied_share if kind == "copy" else None,
        )

    return _ways(settings, make_engine, spec, rows, lines, {"traffic": kind}, kind)


def _clients(settings: Settings, make_engine: EngineFactory, clients: int, spec: str, repeat: int) -> int:
    from goinfer_chat.bench.clients import MAX_TOKENS, lines, measure

    def rows(engine: Engine, modes: Sequence[SpeculationMode], progress: Progress) -> list[ClientsRow]:
        max_tokens = settings.max_tokens or MAX_TOKENS
        return measure(engine, modes, clients, max_tokens=max_tokens, repeat=repeat, progress=progress)

    return _ways(settings, make_engine, spec, rows, lines, {"clients": clients}, f"{clients} conversations")


def _ways(
    settings: Settings,
    make_engine: EngineFactory,
    spec: str,
    measure: Callable[[Engine, Sequence[SpeculationMode], Progress], list[Row]],
    lines: Callable[[Sequence[Row]], list[str]],
    about: dict[str, Any],
    title: str,
) -> int:
    """Plain decoding and another way, measured in turn and shown."""
    from goinfer_chat.bench.machine import describe

    out, side = _streams(settings)
    modes = speculation_modes(spec)
    machine = describe()
    with closing(make_engine(settings, side)) as engine:
        info = engine.info
        rows = measure(engine, modes, partial(_progress, side))
    side.clear_status()
    about = {"model": info.name, "machine": machine.as_object(), "threads": info.threads} | about
    head = [f"{info.name}, {title}", *machine.lines(info.threads), ""]
    return _show(settings, out, about | {"ways": [row.as_object() for row in rows]}, head + lines(rows))


def _agents(settings: Settings, make_engine: EngineFactory, load: Load, slots: Sequence[int]) -> int:
    from engine.cpu import usable_threads
    from goinfer_chat.bench.agents import lines, measure
    from goinfer_chat.bench.machine import describe

    out, side = _streams(settings)
    machine = describe()
    arms = measure(
        load, slots, settings, lambda changed, folder: make_engine(changed, side, folder), partial(_progress, side)
    )
    side.clear_status()
    about = {"model": settings.model, "machine": machine.as_object(), "scale": load.scale}
    threads = machine.lines(settings.threads or usable_threads())
    head = [f"{settings.model}, {load.conversations} agents, scale {load.scale:g}", *threads, ""]
    return _show(settings, out, about | {"arms": [arm.as_object() for arm in arms]}, head + lines(arms, load))


def _progress(side: Stream, what: str, share: float) -> None:
    side.status(f"{what} ({share:.0%})")
