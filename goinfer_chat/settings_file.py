"""The settings file: TOML in the system's place for settings, keys named like the flags, profiles as tables.

    temperature = 0.2
    stop = ["###", "END"]

    [profile.work]
    model = "qwen2.5-coder-1.5b"

A key of the chosen profile counts before the same key above the profiles.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from engine.errors import UsageError
from goinfer_chat.files import NoFolderError, changing, make_folder, reason_of, write_private
from goinfer_chat.settings import BY_FLAG, SETTINGS, Setting, Settings, checked
from goinfer_chat.terminal import true_text
from goinfer_chat.values import checked_int, did_you_mean, parse_size, shown, written_size

VARIABLE: Final = "GOINFER_CHAT_CONFIG"
PROFILES: Final = "profile"
SERVERS: Final = "mcp"
"""Tables `[mcp.NAME]`: servers whose tools a model may call."""
_SECRETS: Final = ("key", "token", "secret", "password")


def settings_path(chosen: str | None = None) -> Path | None:
    """What --config says, else the system's place for settings; None where neither is known, or it says `none`."""
    if chosen is not None:
        return None if chosen == "none" else Path(chosen).expanduser()
    import platformdirs

    path = platformdirs.user_config_path("goinfer-chat") / "config.toml"
    return path if path.is_absolute() else None  # a user without a home


def read_settings_file(chosen: str | None, profile: str | None) -> dict[str, Any]:
    """The values the file gives, by setting name; none where there is no file, unless it was chosen.

    Raises UsageError that names the file and the key.
    """
    path = settings_path(chosen)
    tables = read_tables(path, must_be_there=chosen is not None) if path is not None else None
    if tables is None:
        if profile is not None:
            raise UsageError(f"no profile {profile!r}: there is no settings file {true_text(str(path))}")
        return {}
    assert path is not None
    where = true_text(str(path))
    values = _values(where, {key: value for key, value in tables.items() if key not in (PROFILES, SERVERS)})
    profiles = tables.get(PROFILES, {})
    if not isinstance(profiles, dict) or not all(isinstance(table, dict) for table in profiles.values()):
        raise UsageError(f"{where}: a profile is a table: [profile.NAME]")
    by_profile = {name: _values(f"{where}: [profile.{name}]", table) for name, table in profiles.items()}
    if profile is None:
        return values
    if profile not in by_profile:
        there = f"its profiles: {', '.join(by_profile)}" if by_profile else "it has none"
        raise UsageError(f"{where} has no profile {profile!r}{did_you_mean(profile, list(by_profile)) or '; ' + there}")
    return values | by_profile[profile]


def has_profile(chosen: str | None, profile: str) -> bool:
    """Raises UsageError where the file cannot be read."""
    path = settings_path(chosen)
    tables = read_tables(path, must_be_there=False) if path is not None else None
    profiles = (tables or {}).get(PROFILES, {})
    return isinstance(profiles, dict) and profile in profiles


def read_servers(chosen: str | None) -> tuple[dict[str, Any], str]:
    """The tables of MCP servers by name, and what the file is called. Raises UsageError."""
    path = settings_path(chosen)
    tables = read_tables(path, must_be_there=False) if path is not None else None
    servers = (tables or {}).get(SERVERS, {})
    where = true_text(str(path))
    if not isinstance(servers, dict):
        raise UsageError(f"{where}: a server is a table: [mcp.NAME]")
    return servers, where


def read_tables(path: Path, *, must_be_there: bool) -> dict[str, Any] | None:
    """The file as TOML; None where there is none. Raises UsageError."""
    where = true_text(str(path))
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (FileNotFoundError, NotADirectoryError):
        if must_be_there:
            raise UsageError(f"there is no settings file {where}") from None
        return None
    except OSError as error:
        raise UsageError(f"{where} cannot be read: {reason_of(error)}; --config none does without it") from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{where} is not UTF-8 text in TOML: {error}") from None
    except ValueError as error:  # also a number of more digits than Python reads
        raise UsageError(f"{where} is not TOML: {error}") from None


def _values(where: str, table: Mapping[str, Any]) -> dict[str, Any]:
    values = {}
    for key, value in table.items():
        setting = _setting(where, key)
        try:
            values[setting.name] = checked(setting, _value(setting, value))
        except UsageError as error:
            raise UsageError(f"{where}: {key}: {error}") from None
    return values


def _setting(where: str, key: str) -> Setting:
    setting = BY_FLAG.get(key.replace("_", "-"))
    if setting is not None and setting.in_file:
        return setting
    if setting is not None:
        raise UsageError(f"{where}: {key} has its place on the command line, as --{setting.flag}")
    if any(secret in key.lower() for secret in _SECRETS):
        raise UsageError(f"{where}: there is no setting {key}; no secret belongs in this file")
    in_file = [setting.flag for setting in SETTINGS if setting.in_file]
    raise UsageError(
        f"{where}: there is no setting {key}{did_you_mean(key, in_file) or '; goinfer-chat config lists them'}"
    )


def _value(setting: Setting, value: Any) -> Any:
    match value:
        case str():
            return setting.parse(value)
        case bool() if not setting.switch:
            raise UsageError(f"{shown(value)} is not a value it can have")
        case bool():
            return setting.parse(shown(value))
        case float():
            return setting.parse(str(value))  # 3.0 is no whole number in TOML
        case int():
            return setting.parse(shown(checked_int(value)))
        case list() if setting.repeatable:
            return setting.parse(json.dumps(value))
        case _:
            raise UsageError("it takes neither a table nor a date nor a list")


# -- writing -----------------------------------------------------------------------------------------------------------


def template() -> str:
    """A settings file that changes nothing: every key with what it means and its default, as comments."""
    lines = [
        "# Settings of goinfer-chat. A flag counts before an environment variable, a variable before this file.",
        "# Take the # from a line to set it. No secret belongs here.",
    ]
    in_file = [setting for setting in SETTINGS if setting.in_file]
    for topic, settings in groupby(sorted(in_file, key=lambda setting: _topic_order(setting.topic)), _topic):
        lines += ["", f"# -- {topic} --", ""]
        for setting in settings:
            lines += [f"# {setting.help}", f"# {setting.flag} = {_default(setting)}"]
    lines += ["", "# goinfer-chat --profile work takes these before those above.", "# [profile.work]", "# top-k = 20"]
    lines += ["", "# An MCP server: a command that starts it, or its url; $NAME is a variable of the environment."]
    lines += ["# [mcp.files]", '# command = ["some-server", "--option"]', '# env = { API_KEY = "$API_KEY" }']
    lines += ['# reads = ["look"]  # tools of it that only read; about the others you are asked']
    return "\n".join(lines) + "\n"


def _topic(setting: Setting) -> str:
    return setting.topic


def _topic_order(topic: str) -> int:
    return list(dict.fromkeys(setting.topic for setting in SETTINGS)).index(topic)


def _default(setting: Setting) -> str:
    value = Settings().value(setting.name)
    if value is None:
        return to_toml("none" if setting.argument == "N" or setting.choices else setting.argument)
    if setting.choices:
        return f"{to_toml(value)}  # {setting.argument}"
    return to_toml(written_size(value) if setting.parse is parse_size else value)


def to_toml(value: Any) -> str:
    """A value of a setting in TOML; "none" for no value."""
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case tuple() | list():
            return f"[{', '.join(map(to_toml, value))}]"
        case _:
            # JSON's escapes are TOML's too, but for DEL, which TOML wants escaped.
            return json.dumps("none" if value is None else str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def save_settings(path: Path, values: Mapping[str, Any], profile: str | None = None) -> None:
    """Put values (by flag) into the file, or into a profile of it. Comments and the rest stay as they are.

    Raises UsageError where the file cannot be written, or is written in a way that only its author can change.
    """
    where = true_text(str(path))
    target = Path(os.path.realpath(path))  # a link to it stays one
    try:
        make_folder(target.parent)
        with changing(target):
            after = _changed_text(path, where, values, profile)
            write_private(target, iter([after.encode()]))
    except (OSError, UnicodeEncodeError) as error:
        raise not_written(path, error) from None


def not_written(path: Path, error: Exception) -> UsageError:
    """The message about a settings file that could not be written."""
    advice = "; --config FILE names another place" if isinstance(error, NoFolderError) else ""
    return UsageError(f"{true_text(str(path))} cannot be written: {reason_of(error)}{advice}")


def _changed_text(path: Path, where: str, values: Mapping[str, Any], profile: str | None) -> str:
    before = read_tables(path, must_be_there=False)
    text = path.read_text(encoding="utf-8-sig") if before is not None else template()
    after = "\n".join(_with_values(text.splitlines(), values, profile)) + "\n"
    if not _is_changed_to(after, before or {}, values, profile):
        raise UsageError(
            f"{where}: change {', '.join(values)} there yourself: it is written in a way that only you can change"
        )
    return after


def _with_values(lines: list[str], values: Mapping[str, Any], profile: str | None) -> Iterator[str]:
    """The lines with each value in place of its key's line, of its commented line, or at the end of its table."""
    header = None if profile is None else f"[{PROFILES}.{_key(profile)}]"
    start, end = _table(lines, header)
    body = lines[start:end]
    for flag, value in values.items():
        line = f"{flag} = {to_toml(value)}"
        at = _line_of(body, flag, "") if _line_of(body, flag, "") is not None else _line_of(body, flag, "#")
        if at is None:
            body.insert(len(body) - _num_blank(body), line)
        else:
            body[at] = line
    yield from lines[:start]
    if header is not None and start == len(lines):
        yield from ("", header)
    yield from body
    yield from lines[end:]


def _key(name: str) -> str:
    bare = name.isascii() and name.replace("-", "").replace("_", "").isalnum()
    return name if bare else to_toml(name)


def _table(lines: list[str], header: str | None) -> tuple[int, int]:
    """First and last line (exclusive) of a table's body; at the end of the file where there is none."""
    starts = [index for index, line in enumerate(lines) if line.lstrip().startswith("[")]
    if header is None:
        return 0, starts[0] if starts else len(lines)
    for index, following in zip(starts, [*starts[1:], len(lines)]):
        if lines[index].split("#")[0].strip() == header:
            return index + 1, following
    return len(lines), len(lines)


def _line_of(lines: list[str], flag: str, mark: str) -> int | None:
    for index, line in enumerate(lines):
        key, equals, _ = line.strip().removeprefix(mark).strip().partition("=")
        if equals and line.strip().startswith(mark) and key.strip().strip("\"'").replace("_", "-") == flag:
            return index
    return None


def _num_blank(lines: Iterable[str]) -> int:
    count = 0
    for line in reversed(list(lines)):
        if line.strip():
            break
        count += 1
    return count


def _is_changed_to(text: str, before: Mapping[str, Any], values: Mapping[str, Any], profile: str | None) -> bool:
    """Whether the new text says what the old one said, and the values. False where that is too deep to compare."""
    try:
        wanted = json.loads(json.dumps(before, default=str))
        table = wanted if profile is None else wanted.setdefault(PROFILES, {}).setdefault(profile, {})
        for flag, value in values.items():
            table.pop(flag.replace("-", "_"), None)
            table[flag] = tomllib.loads(f"value = {to_toml(value)}")["value"]
        return bool(json.loads(json.dumps(tomllib.loads(text), default=str)) == wanted)
    except (ValueError, RecursionError):
        return False
