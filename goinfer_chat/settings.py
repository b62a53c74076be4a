"""What a person can choose, in one table, from which flags, variables, keys of the settings file and slash commands
are all made.

Secrets are not settings: they would end up in files, in lists of processes and on screens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Final, Literal, get_args

from engine.api import KVType, SamplingParams, SpeculationMode
from engine.errors import UsageError
from goinfer_chat.terminal import true_text
from goinfer_chat.values import (
    one_of,
    optional,
    parse_bool,
    parse_float,
    parse_int,
    parse_size,
    parse_stop,
)

ENVIRONMENT_PREFIX: Final = "GOINFER_CHAT_"
BACKENDS: Final = ("cpu", "torch", "remote")
DEVICES: Final = ("auto", "cpu", "cuda", "mps")
SPECULATION: Final = ("auto", *get_args(SpeculationMode))
Keys = Literal["emacs", "vi"]
Think = Literal["auto", "on", "off"]
Theme = Literal["auto", "light", "dark", "none"]
PanelSize = Literal["off", "line", "panel"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every choice, checked. Raises UsageError when a value cannot be obeyed."""

    model: str = "smollm2-135m"
    backend: str = "cpu"
    device: str = "auto"
    base_url: str | None = None
    system: str | None = None
    context_size: int | None = None
    threads: int | None = None
    chat_template: str | None = None
    """A file whose template takes the place of the model's."""
    kv_sessions: int = 4
    kv_cap_bytes: int = 8_000_000_000
    kv_type: KVType = "f16"
    speculation: SpeculationMode | Literal["auto"] = "auto"
    """`auto`: from the smaller model if there is one, else from the conversation."""
    draft: str | None = None
    from_disk: bool = False
    max_concurrent: int = 4
    prefill_chunk: int | None = None
    session_dir: str | None = None
    continue_last: bool = False
    resume: str | None = None
    save: str | None = None
    ephemeral: bool = False
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    """`on`, `off`, names of tools, Python files that make some."""
    root: str | None = None
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    yes: bool = False
    parallel_calls: bool = True
    max_steps: int = 25
    token_budget: int | None = None
    tool_timeout: float = 120.0
    tool_env: tuple[str, ...] = ()
    test_command: str | None = None
    json: bool = False
    events: bool = False
    ids: bool = False
    quiet: bool = False
    keys: Keys = "emacs"
    toolbar: bool = True
    history: int = 2000
    shell: bool = False
    think: Think = "auto"
    think_tokens: int | None = None
    theme: Theme = "auto"
    panel: PanelSize | None = None
    """None: what was chosen last."""
    raw: bool = False
    plain: bool = False
    config: str | None = None
    profile: str | None = None

    def __post_init__(self) -> None:
        for name, word, known in (
            ("backend", self.backend, BACKENDS),
            ("device", self.device, DEVICES),
            ("kv", self.kv_type, get_args(KVType)),
            ("spec", self.speculation, SPECULATION),
            ("theme", self.theme, get_args(Theme)),
            ("panel", self.panel, (None, *get_args(PanelSize))),
        ):
            if word not in known:
                raise UsageError(f"unknown {name} {word!r}; choose from: {', '.join(filter(None, known))}")
        if not self.model:
            raise UsageError("the name of the model is empty")
        for flag, value in (
            ("ctx", self.context_size),
            ("threads", self.threads),
            ("max-tokens", self.max_tokens),
            ("think-tokens", self.think_tokens),
            ("max-steps", self.max_steps),
            ("token-budget", self.token_budget),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{flag} must be 1 or more, not {value}")
        for flag, count in (("history", self.history), ("kv-sessions", self.kv_sessions)):
            if count < 0:
                raise UsageError(f"{flag} must be 0 (keep none) or more, not {count}")
        if self.continue_last + self.ephemeral + (self.resume is not None) + (self.save is not None) > 1:
            raise UsageError("give only one of --continue, --resume, --save and --ephemeral")
        if not 0 < self.tool_timeout < 1e6:
            raise UsageError(f"tool-timeout must be more than 0 seconds, not {self.tool_timeout:g}")
        if not all(self.stop):
            raise UsageError("a stop string must not be empty")
        if (self.ids or self.events) and not self.json:
            raise UsageError(f"--{'ids' if self.ids else 'events'} adds to the objects of --json; give both")

    def value(self, name: str) -> Any:
        """The value of a setting by its name, whichever object holds it."""
        return getattr(self.sampling if name in _SAMPLING_NAMES else self, name)

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """These settings with some values replaced. Raises UsageError."""
        sampling = {name: value for name, value in values.items() if name in _SAMPLING_NAMES}
        others = {name: value for name, value in values.items() if name not in _SAMPLING_NAMES}
        return replace(self, sampling=replace(self.sampling, **sampling), **others)


_SAMPLING_NAMES: Final = frozenset(field.name for field in fields(SamplingParams))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: where a value goes, what it is called outside, how text becomes a value."""

    flag: str
    """The name outside: `--top-k`, GOINFER_CHAT_TOP_K, `/top-k`, and `top-k` in the settings file."""
    parse: Callable[[str], Any]
    help: str
    argument: str = "N"
    field: str = ""
    """The field of Settings or SamplingParams; empty when it is the flag with underscores."""
    in_chat: bool = False
    """Whether a slash command changes it while a model is loaded."""
    switch: bool = False
    repeatable: bool = False
    toggles: bool = False
    """Whether its command without an argument turns it over."""
    choices: tuple[str, ...] = ()
    """All the values there are, where they are words."""
    topic: str = "program"
    in_file: bool = True
    """Whether it may stand in the settings file."""

    @property
    def name(self) -> str:
        return self.field or self.flag.replace("-", "_")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.flag.upper().replace("-", "_")


def _sampling(
    flag: str, parse: Callable[[str], Any], help: str, argument: str = "N", repeatable: bool = False
) -> Setting:
    return Setting(
        flag=flag, parse=parse, help=help, argument=argument, repeatable=repeatable, in_chat=True, topic="sampling"
    )


def _texts(flag: str, help: str, argument: str) -> Setting:
    return Setting(flag=flag, parse=parse_stop, help=help, argument=argument, repeatable=True, topic="tools")


def _switch(flag: str, help: str, topic: str = "output", in_chat: bool = False) -> Setting:
    return Setting(flag=flag, parse=parse_bool, help=help, switch=True, topic=topic, in_chat=in_chat)


def _words(
    flag: str, choices: tuple[str, ...], help: str, topic: str, *, field: str = "", in_chat: bool = True
) -> Setting:
    return Setting(
        flag=flag,
        field=field,
        parse=one_of(choices),
        help=help,
        argument="|".join(choices),
        choices=choices,
        in_chat=in_chat,
        topic=topic,
    )


SETTINGS: Final = (
    # `str`: a name for the file system keeps the bytes it was given.
    Setting(
        flag="model",
        parse=str,
        help="The model: a name of the catalogue, a file on the hub, or a path.",
        argument="MODEL",
        topic="model",
    ),
    Setting(
        flag="backend",
        parse=true_text,
        help=f"What runs the model: {', '.join(BACKENDS)}.",
        argument="NAME",
        topic="model",
    ),
    _words(
        "device",
        DEVICES,
        "Where --backend torch runs; auto takes a GPU if one has room for the model.",
        topic="model",
        in_chat=False,
    ),
    Setting(
        flag="base-url",
        parse=true_text,
        help="Address of the server for --backend remote, such as http://127.0.0.1:8000/v1.",
        argument="URL",
        topic="model",
    ),
    Setting(flag="system", parse=true_text, help="System prompt.", argument="TEXT", topic="conversations"),
    Setting(
        flag="ctx",
        field="context_size",
        parse=optional(parse_int),
        help="Size of the context in tokens; less if memory is short.",
        topic="model",
    ),
    Setting(flag="threads", parse=optional(parse_int), help="Number of CPU threads to use.", topic="model"),
    Setting(
        flag="chat-template",
        parse=str,
        help="Use this chat template instead of the model's own.",
        argument="FILE",
        topic="model",
    ),
    _words(
        "kv",
        get_args(KVType),
        "Number format of the cache: q8_0 takes half the memory of f16, but replies may differ.",
        topic="model",
        field="kv_type",
        in_chat=False,
    ),
    Setting(
        flag="kv-sessions",
        parse=parse_int,
        help="Number of conversations kept ready in memory; 0 turns reuse off.",
        topic="conversations",
    ),
    Setting(
        flag="kv-cap",
        field="kv_cap_bytes",
        parse=parse_size,
        help="Disk space for caches, such as 500MB; the least recently used are removed first.",
        argument="SIZE",
        topic="conversations",
    ),
    _words(
        "spec",
        SPECULATION,
        "How to guess tokens ahead: faster, with exactly the same replies.",
        topic="model",
        field="speculation",
    ),
    Setting(
        flag="draft",
        parse=true_text,
        help="A smaller model with the same vocabulary, to guess tokens ahead.",
        argument="MODEL",
        topic="model",
    ),
    _switch(
        "from-disk",
        "Read weights from disk as they are needed: a model larger than memory runs, slowly.",
        topic="model",
    ),
    Setting(
        flag="session-dir",
        parse=str,
        help="Folder where conversations are kept.",
        argument="DIR",
        topic="conversations",
    ),
    Setting(
        flag="continue",
        field="continue_last",
        parse=parse_bool,
        help="Continue the most recently used conversation.",
        switch=True,
        topic="conversations",
    ),
    Setting(
        flag="resume",
        parse=true_text,
        help="Continue this conversation.",
        argument="NAME",
        topic="conversations",
        in_file=False,
    ),
    Setting(
        flag="save",
        parse=true_text,
        help="Start a new conversation with this name, and keep it.",
        argument="NAME",
        topic="conversations",
        in_file=False,
    ),
    _switch("ephemeral", "Do not keep this chat.", topic="conversations"),
    _sampling("temperature", parse_float, "0 always takes the likeliest token; higher is more varied.", "X"),
    _sampling("top-k", parse_int, "Choose among the N likeliest tokens; 0: among all."),
    _sampling(
        "top-p", parse_float, "Choose among the likeliest tokens that together have probability X; 1: among all.", "X"
    ),
    _sampling("min-p", parse_float, "Drop tokens less likely than X times the likeliest; 0 drops none.", "X"),
    _sampling("repeat-penalty", parse_float, "Make tokens seen recently less likely; 1 is off.", "X"),
    _sampling("presence-penalty", parse_float, "Lower the score of each token seen recently by X; 0 is off.", "X"),
    _sampling("frequency-penalty", parse_float, "Lower it by X for each time the token was seen; 0 is off.", "X"),
    _sampling("penalty-window", parse_int, "How many of the last tokens the penalties look at."),
    _sampling("seed", optional(parse_int), "The same seed gives the same reply; none: a new one each turn."),
    _sampling("max-tokens", optional(parse_int), "Most tokens in a reply; none: up to the end of the context."),
    _sampling("stop", parse_stop, "End the reply before this text; may be repeated.", "TEXT", repeatable=True),
    _words(
        "think", get_args(Think), "Whether a thinking model reasons first; auto leaves it to the model.", "thinking"
    ),
    Setting(
        flag="think-tokens",
        parse=optional(parse_int),
        help="Most tokens of reasoning before the model has to answer; none: no limit.",
        in_chat=True,
        topic="thinking",
    ),
    _texts(
        "tools", "Tools the model may use: on, a tool's name, or a FILE.py that defines some; may be repeated.", "TOOLS"
    ),
    Setting(
        flag="root",
        parse=str,
        help="The folder that tools work in; the current folder if not given.",
        argument="DIR",
        topic="tools",
        in_file=False,
    ),
    _texts("allow", "Run calls that match RULE without asking; may be repeated.", "RULE"),
    _texts("deny", "Never run calls that match RULE; may be repeated.", "RULE"),
    Setting(
        flag="yes",
        parse=parse_bool,
        help="Run every call that is not denied, without asking.",
        switch=True,
        topic="tools",
        in_file=False,
    ),
    _switch("parallel-calls", "Let one reply call several tools.", topic="tools", in_chat=True),
    Setting(
        flag="max-steps",
        parse=parse_int,
        help="Most requests to the model in one turn with tools.",
        in_chat=True,
        topic="tools",
    ),
    Setting(
        flag="token-budget",
        parse=optional(parse_int),
        help="Most tokens read and written in one turn with tools; none: no limit.",
        in_chat=True,
        topic="tools",
    ),
    Setting(
        flag="tool-timeout",
        parse=parse_float,
        help="Most seconds that one call may take.",
        argument="X",
        in_chat=True,
        topic="tools",
    ),
    _texts("tool-env", "An environment variable to pass on to programs that tools start; may be repeated.", "NAME"),
    Setting(
        flag="test-command",
        parse=true_text,
        help="The command for run_tests; if not given, chosen from the files of the project.",
        argument="COMMAND",
        topic="tools",
    ),
    _words("keys", get_args(Keys), "Key bindings of the prompt.", topic="prompt"),
    _switch("toolbar", "Show the row below the prompt.", topic="prompt", in_chat=True),
    Setting(
        flag="history",
        parse=parse_int,
        help="How many lines of earlier sessions Up can find; 0 keeps none.",
        topic="prompt",
    ),
    _words(
        "theme", get_args(Theme), "Colours for a light or a dark background; auto has some that suit both.", "screen"
    ),
    Setting(
        flag="panel",
        parse=optional(one_of(get_args(PanelSize))),
        help="How much to show while a turn runs; if not given, as chosen last.",
        argument="|".join(get_args(PanelSize)),
        choices=get_args(PanelSize),
        in_chat=True,
        topic="screen",
    ),
    Setting(
        flag="raw",
        parse=parse_bool,
        help="Show replies as plain text, not rendered as Markdown.",
        switch=True,
        toggles=True,
        in_chat=True,
        topic="screen",
    ),
    _switch("plain", "For screen readers: text runs from top to bottom, and nothing is redrawn.", topic="screen"),
    _switch("shell", "Let a script run commands with /shell.", topic="scripts"),
    _switch("json", "Print one JSON object per turn.", topic="scripts"),
    _switch("events", "With --json, also print an object for everything that happens during a turn.", topic="scripts"),
    _switch("ids", "Add token ids to --json.", topic="scripts"),
    _switch("quiet", "Print only replies and errors.", topic="scripts"),
    Setting(
        flag="config",
        parse=str,
        help="The settings file to use; none: no file at all.",
        argument="FILE",
        topic="program",
        in_file=False,
    ),
    Setting(
        flag="profile",
        parse=true_text,
        help="Use this profile of the settings file.",
        argument="NAME",
        topic="program",
        in_file=False,
    ),
)
BY_FLAG: Final = MappingProxyType({setting.flag: setting for setting in SETTINGS})


def checked(setting: Setting, value: Any) -> Any:
    """The value, if a setting can have it. Raises UsageError."""
    Settings(json=True).changed({setting.name: value})
    return value
