"""What a person can choose, in one table: it makes the flags, the environment variables and the slash commands.

A flag counts before its variable (`--top-k` before GOINFER_CHAT_TOP_K), a variable before the default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final, get_args

from engine.api import KVType, SamplingParams, SpeculationMode
from engine.errors import UsageError
from goinfer_chat.terminal import true_text

ENVIRONMENT_PREFIX: Final = "GOINFER_CHAT_"
BACKENDS: Final = ("cpu",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Every choice, checked. Raises UsageError when a value cannot be obeyed."""

    model: str = "smollm2-135m"
    backend: str = "cpu"
    system: str | None = None
    context_size: int | None = None
    threads: int | None = None
    chat_template: str | None = None
    """A file whose template takes the place of the model's."""
    kv_sessions: int = 4
    kv_cap_bytes: int = 8_000_000_000
    kv_type: KVType = "f16"
    speculation: SpeculationMode = "off"
    session_dir: str | None = None
    continue_last: bool = False
    resume: str | None = None
    save: str | None = None
    ephemeral: bool = False
    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    json: bool = False
    ids: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise UsageError(f"unknown backend {self.backend!r}; there is: {', '.join(BACKENDS)}")
        if not self.model:
            raise UsageError("the name of the model is empty")
        for flag, value in (("ctx", self.context_size), ("threads", self.threads), ("max-tokens", self.max_tokens)):
            if value is not None and value < 1:
                raise UsageError(f"{flag} must be 1 or more, not {value}")
        if self.kv_sessions < 0:
            raise UsageError(f"kv-sessions must be 0 (keep none) or more, not {self.kv_sessions}")
        if self.kv_type not in get_args(KVType):
            raise UsageError(f"unknown kv {self.kv_type!r}; there is: {', '.join(get_args(KVType))}")
        if self.speculation not in get_args(SpeculationMode):
            raise UsageError(f"unknown spec {self.speculation!r}; there is: {', '.join(get_args(SpeculationMode))}")
        if self.continue_last + self.ephemeral + (self.resume is not None) + (self.save is not None) > 1:
            raise UsageError("only one of --continue, --resume, --save and --ephemeral can be obeyed")
        if not all(self.stop):
            raise UsageError("a stop string must not be empty")
        if self.ids and not self.json:
            raise UsageError("--ids adds to the objects of --json; give both")

    def value(self, name: str) -> Any:
        """The value of a setting by its name, whichever object holds it."""
        return getattr(self.sampling if name in _SAMPLING_NAMES else self, name)

    def changed(self, values: Mapping[str, Any]) -> Settings:
        """These settings with some values replaced. Raises UsageError."""
        sampling = {name: value for name, value in values.items() if name in _SAMPLING_NAMES}
        others = {name: value for name, value in values.items() if name not in _SAMPLING_NAMES}
        return replace(self, sampling=replace(self.sampling, **sampling), **others)


_SAMPLING_NAMES: Final = frozenset(field.name for field in fields(SamplingParams))


def parse_int(text: str) -> int:
    try:
        return int(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise UsageError(f"{text!r} is not a whole number") from None


def parse_size(text: str) -> int:
    """Bytes: a number, or one with a decimal unit such as 500MB or 1.5 GB."""
    units = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    number = text.rstrip("BKMGTbkmgt ")
    try:
        size = int(float(number.replace(",", "")) * units[text[len(number) :].strip().upper()])
    except (ValueError, KeyError, OverflowError):
        raise UsageError(f"{text!r} is no size; such as 500MB or 8GB") from None
    if size < 0:
        raise UsageError(f"a size is 0 or more, not {text}")
    return size


def parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"{text!r} is not a number") from None


def parse_bool(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off", ""):
        return False
    raise UsageError(f"{text!r} is neither on nor off")


def parse_stop(text: str) -> tuple[str, ...]:
    r"""One stop string as it is, several as a JSON array such as `["###", "\n\n"]`, or `none`."""
    text = true_text(text)
    if text == "none":
        return ()
    if not text.startswith("["):
        return (text,)
    try:
        values = json.loads(text)
    except ValueError:
        return (text,)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise UsageError("several stop strings are a JSON array of strings")
    return tuple(values)


def optional(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The same parser, which also takes `none`."""
    return lambda text: None if text.lower() in ("none", "random", "auto") else parse(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One row: where a value goes, what it is called outside, how text becomes a value."""

    flag: str
    """The name outside: `--top-k`, GOINFER_CHAT_TOP_K, `/top-k`."""
    parse: Callable[[str], Any]
    help: str
    argument: str = "N"
    field: str = ""
    """The field of Settings or SamplingParams; empty when it is the flag with underscores."""
    in_chat: bool = False
    """Whether a slash command changes it while a model is loaded."""
    switch: bool = False
    repeatable: bool = False

    @property
    def name(self) -> str:
        return self.field or self.flag.replace("-", "_")

    @property
    def variable(self) -> str:
        return ENVIRONMENT_PREFIX + self.flag.upper().replace("-", "_")


def _chat(flag: str, parse: Callable[[str], Any], help: str, argument: str = "N", repeatable: bool = False) -> Setting:
    return Setting(flag=flag, parse=parse, help=help, argument=argument, repeatable=repeatable, in_chat=True)


def _switch(flag: str, help: str) -> Setting:
    return Setting(flag=flag, parse=parse_bool, help=help, switch=True)


SETTINGS: Final = (
    # `str`: a name for the file system keeps the bytes it was given.
    Setting(flag="model", parse=str, help="Catalogue name, hub file or path of the model.", argument="MODEL"),
    Setting(flag="backend", parse=true_text, help=f"What computes: {', '.join(BACKENDS)}.", argument="NAME"),
    Setting(flag="system", parse=true_text, help="System prompt.", argument="TEXT"),
    Setting(flag="ctx", field="context_size", parse=optional(parse_int), help="Context in tokens, as memory allows."),
    Setting(flag="threads", parse=optional(parse_int), help="Threads of the engine."),
    Setting(flag="chat-template", parse=str, help="A template in place of the model's own.", argument="FILE"),
    Setting(
        flag="kv",
        field="kv_type",
        parse=true_text,
        help="How the cache keeps keys and values: q8_0 takes half of f16 and changes the words.",
        argument="|".join(get_args(KVType)),
    ),
    Setting(flag="kv-sessions", parse=parse_int, help="Conversations that stay read in memory; 0 turns reuse off."),
    Setting(
        flag="kv-cap",
        field="kv_cap_bytes",
        parse=parse_size,
        help="Caches on the disk at most, such as 500MB; those not used for longest go.",
        argument="SIZE",
    ),
    Setting(
        flag="spec",
        field="speculation",
        parse=true_text,
        help="Guess tokens ahead; the words are the same.",
        argument="|".join(get_args(SpeculationMode)),
        in_chat=True,
    ),
    Setting(flag="session-dir", parse=str, help="Folder of the kept conversations.", argument="DIR"),
    Setting(
        flag="continue",
        field="continue_last",
        parse=parse_bool,
        help="Go on with the conversation used last.",
        switch=True,
    ),
    Setting(flag="resume", parse=true_text, help="Go on with this conversation.", argument="NAME"),
    Setting(flag="save", parse=true_text, help="Begin a conversation of this name and keep it.", argument="NAME"),
    _switch("ephemeral", "Keep nothing of this chat."),
    _chat("temperature", parse_float, "0 is greedy; higher is more varied.", "X"),
    _chat("top-k", parse_int, "Keep the k most likely tokens; 0 keeps all."),
    _chat("top-p", parse_float, "Keep the likeliest tokens that sum to p; 1 keeps all.", "X"),
    _chat("min-p", parse_float, "Drop tokens less likely than p times the best; 0 drops none.", "X"),
    _chat("repeat-penalty", parse_float, "Make seen tokens less likely; 1 is off.", "X"),
    _chat("presence-penalty", parse_float, "Subtract this once from seen tokens; 0 is off.", "X"),
    _chat("frequency-penalty", parse_float, "Subtract this for each time a token was seen; 0 is off.", "X"),
    _chat("penalty-window", parse_int, "How many of the last tokens count as seen."),
    _chat("seed", optional(parse_int), "Same seed, same words; none draws one each turn."),
    _chat("max-tokens", optional(parse_int), "Tokens of a reply at most; none goes to the end of the context."),
    _chat("stop", parse_stop, "End the reply before this text; may be repeated.", "TEXT", repeatable=True),
    _switch("json", "One JSON object for each turn."),
    _switch("ids", "Add token ids to --json."),
    _switch("quiet", "Nothing but replies and errors."),
)


_WHICH: Final = frozenset({"continue_last", "resume", "save", "ephemeral"})
"""Which conversation goes on: one choice, so a flag of them counts before the variables of all."""


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values that variables give, by setting name; an empty one gives none.

    Raises UsageError that names the variable.
    """
    values = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable)
        if not text:
            continue
        try:
            values[setting.name] = setting.parse(text)
        except UsageError as error:
            raise UsageError(f"{setting.variable}: {error}") from None
    return values


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Settings from flags (a value of None was not given), then variables, then defaults. Raises UsageError."""
    given = {name: value for name, value in flags.items() if value is not None}
    found = from_environment(environ)
    if _WHICH & given.keys():
        found = {name: value for name, value in found.items() if name not in _WHICH}
    return Settings().changed(found | given)
