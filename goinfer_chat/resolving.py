"""The settings that hold: a flag wins over its variable (`--top-k` over GOINFER_CHAT_TOP_K), a variable over the
settings file, and that over the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.errors import UsageError
from goinfer_chat.settings import ENVIRONMENT_PREFIX, SETTINGS, Settings, checked
from goinfer_chat.values import did_you_mean

WHICH: Final = frozenset({"continue_last", "resume", "save", "ephemeral"})
"""Which conversation goes on. This is one choice: any of these flags wins over the variables of all four, and any of
the variables over all four keys of the file."""


OTHER_VARIABLES: Final = ("API_KEY", "DEBUG", "KERNELS", "MODELS", "TOOL_CALL", "WEIGHTS_GB")
"""What variables of this program are called, behind the prefix, that are no settings."""


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A line about each variable that has our prefix and no meaning: it may be mistyped. An empty one is not set."""
    known = [*(setting.variable.removeprefix(ENVIRONMENT_PREFIX) for setting in SETTINGS), *OTHER_VARIABLES]
    given = [name.removeprefix(ENVIRONMENT_PREFIX) for name in environ if name.startswith(ENVIRONMENT_PREFIX)]
    return [
        f"the variable {ENVIRONMENT_PREFIX}{name} sets nothing{did_you_mean(name, known, ENVIRONMENT_PREFIX)}"
        for name in given
        if name not in known and environ[ENVIRONMENT_PREFIX + name]
    ]


def from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """The values that variables give, by setting name; an empty variable counts as not set.

    Raises UsageError that names the variable.
    """
    values = {}
    for setting in SETTINGS:
        text = environ.get(setting.variable)
        if not text:
            continue
        try:
            values[setting.name] = checked(setting, setting.parse(text))
        except UsageError as error:
            raise UsageError(f"{setting.variable}: {error}") from None
    return values


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """The settings that hold. `flags`: values by setting name, None where a flag was not given. Raises UsageError."""
    from goinfer_chat.settings_file import read_settings_file

    given = {name: value for name, value in flags.items() if value is not None}
    found = from_environment(environ)
    chosen = found | given
    kept = read_settings_file(chosen.get("config"), chosen.get("profile"))
    for stronger, weaker in ((given, found), (given | found, kept)):
        if WHICH & stronger.keys():
            for name in WHICH & weaker.keys():
                del weaker[name]
    return Settings().changed(kept | found | given)
