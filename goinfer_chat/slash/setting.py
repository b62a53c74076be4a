"""Slash commands about settings: show them, change them, keep them."""

from __future__ import annotations

from typing import Any, Final

from engine.api import ModelInfo, Prospect
from engine.errors import UsageError
from goinfer_chat.agent import Agent
from goinfer_chat.foresight import foresee, standing
from goinfer_chat.settings import BY_FLAG, SETTINGS, Setting, Settings
from goinfer_chat.slash.conversation import called
from goinfer_chat.slash.registry import Command, Outcome
from goinfer_chat.terminal import true_text
from goinfer_chat.values import did_you_mean, shown

_IN_CHAT: Final = tuple(setting for setting in SETTINGS if setting.in_chat)

_IN_PROMPT: Final = ("think",)
"""Settings that go into the prompt, beside the system prompt: a chat template sees them."""

_REMEMBERED: Final = ("panel",)
"""Kept from start to start without being saved."""


def _value(agent: Agent, setting: Setting) -> str:
    return shown(agent.settings.value(setting.name))


def _standing(agent: Agent, setting: Setting) -> str:
    return (agent.doubt if setting.flag == "think" else "") or f"{setting.flag} {_value(agent, setting)}"


def _change(agent: Agent, setting: Setting, text: str) -> None:
    agent.settings = _changed(agent, setting, text)


def _changed(agent: Agent, setting: Setting, text: str) -> Settings:
    """The settings with this one set. Raises UsageError that names it."""
    try:
        value = setting.parse(text)
    except UsageError as error:
        raise UsageError(f"{setting.flag}: {error}") from None
    return agent.settings.changed({setting.name: value})


# -- one at a time -----------------------------------------------------------------------------------------------------


def _set(agent: Agent, argument: str) -> Outcome:
    if not argument:
        return Outcome(rows=[(setting.flag, _value(agent, setting)) for setting in _IN_CHAT])
    name, _, text = argument.partition(" ")
    setting = _settable(name.lstrip("-/").replace("_", "-").lower())
    if setting.flag == "system":
        return _system(agent, text.strip())
    if text.strip():
        _change(agent, setting, text.strip())
    return Outcome(_standing(agent, setting))


def _settable(name: str) -> Setting:
    """Raises UsageError that suggests a near one."""
    setting = BY_FLAG.get(name)
    if setting is None:
        known = [setting.flag for setting in _IN_CHAT]
        raise UsageError(f"there is no setting {true_text(name)}{did_you_mean(name, known) or '; /set lists them'}")
    if not setting.in_chat and name != "system":
        raise UsageError(f"{name} cannot be changed in a chat; start with --{name}")
    return setting


def _setting(setting: Setting) -> Command:
    def run(agent: Agent, argument: str) -> Outcome:
        if argument:
            _change(agent, setting, argument)
        elif setting.toggles:
            _change(agent, setting, "off" if agent.settings.value(setting.name) else "on")
        return Outcome(_standing(agent, setting))

    return Command(
        name=setting.flag,
        arguments=f"[{setting.argument}]" if not setting.switch else "[on|off]",
        help=setting.help,
        topic=setting.topic,
        run=run,
        costs=lambda agent, argument: _cost_of(agent, setting, argument),
        complete=lambda agent: setting.choices or (("on", "off") if setting.switch else (_value(agent, setting),)),
    )


def _system(agent: Agent, argument: str) -> Outcome:
    if argument:
        agent.set_system(None if argument == "none" else argument)
    system = agent.settings.system
    text = "There is no system prompt." if system is None else f"System prompt: {system}"
    return Outcome(text)


# -- what they cost ----------------------------------------------------------------------------------------------------


def _cost_of_set(agent: Agent, argument: str) -> Prospect | None:
    name, _, text = argument.partition(" ")
    setting = _settable(name.lstrip("-/").replace("_", "-").lower())
    return _cost_of_system(agent, text.strip()) if setting.flag == "system" else _cost_of(agent, setting, text.strip())


def _cost_of_system(agent: Agent, argument: str) -> Prospect | None:
    if not argument:
        return None
    return _cost_under(agent, agent.settings.changed({"system": None if argument == "none" else argument}))


def _cost_of(agent: Agent, setting: Setting, text: str) -> Prospect | None:
    if setting.flag not in _IN_PROMPT or not text:
        return None
    return _cost_under(agent, _changed(agent, setting, text))


def _cost_under(agent: Agent, settings: Settings) -> Prospect | None:
    return foresee(agent, standing(agent), settings=settings) if settings != agent.settings else None


# -- all of them -------------------------------------------------------------------------------------------------------


def _params(agent: Agent, _argument: str) -> Outcome:
    info = agent.engine.info
    used = (agent.live.info.context_tokens if agent.live else None) or 0
    rows = [(setting.flag, _value(agent, setting)) for setting in _IN_CHAT]
    rows += [
        ("system", agent.settings.system or "none"),
        ("model", info.name + (_facts(info) if info.num_parameters else "")),
        ("context", f"{used:,} of {info.context_size:,} tokens used" if info.context_size else f"{used:,} tokens used"),
        *([("cache", _cache(info, used))] if info.kv_bytes_per_token else []),
        ("conversation", called(agent)),
        ("engine", f"{info.backend}, {info.computed_by}"),
    ]
    width = max(len(name) for name, _ in rows)
    return Outcome("\n".join(f"{name:<{width}}  {value}" for name, value in rows))


def _facts(info: ModelInfo) -> str:
    return f" ({info.architecture}, {info.quantization}, {info.num_parameters:,} parameters)"


def _cache(info: ModelInfo, used: int) -> str:
    """What the K/V of a position take, those of this conversation, and those of a full context."""
    each = info.kv_bytes_per_token
    kv_type = f"{info.kv_type}, " if info.kv_type else ""
    line = f"{kv_type}{each:,} bytes a token, {used * each:,} in all, {info.context_size * each:,} when full"
    if info.state_bytes:
        line += f"; states of {info.state_bytes:,} bytes, {info.state_slots} at most"
    return line


def _save(agent: Agent, argument: str) -> Outcome:
    from goinfer_chat.settings_file import has_profile, read_settings_file, save_settings, settings_path

    settings = agent.settings
    profile = argument or settings.profile
    path = settings_path(settings.config)
    if path is None:
        raise UsageError("no place for a settings file is known; start with --config FILE")
    there = path.exists()
    is_new = profile is not None and not (there and has_profile(settings.config, profile))
    saved = Settings().changed(read_settings_file(settings.config, None if is_new else profile) if there else {})
    changed: dict[str, Any] = {
        setting.flag: settings.value(setting.name)
        for setting in _IN_CHAT
        if setting.flag not in _REMEMBERED and settings.value(setting.name) != saved.value(setting.name)
    }
    where = true_text(str(path))
    under = f" under [profile.{profile}]" if profile else ""
    if not changed and not is_new:
        return Outcome(f"{where} has all of them already{under}.")
    save_settings(path, changed, profile)
    return Outcome(f"Written to {where}{under}: {', '.join(changed) or 'nothing that differs from the keys above it'}.")


def setting_commands() -> list[Command]:
    return [
        Command(
            name="set",
            arguments="[NAME [VALUE]]",
            help="Show or change a setting; without a name, show all that can be changed here.",
            topic="settings",
            run=_set,
            costs=_cost_of_set,
            complete=lambda _agent: [setting.flag for setting in _IN_CHAT] + ["system"],
        ),
        Command(
            name="save-settings",
            arguments="[PROFILE]",
            help="Save what was changed in this chat to the settings file, or to a profile in it.",
            topic="settings",
            run=_save,
        ),
        Command(
            name="system",
            arguments="[TEXT | none]",
            help="Show or change the system prompt; after a change the conversation is reread.",
            topic="settings",
            run=_system,
            costs=_cost_of_system,
        ),
        Command(
            name="params",
            help="Show all settings, the model, and how full the context is.",
            topic="settings",
            run=_params,
        ),
        *(_setting(setting) for setting in _IN_CHAT),
    ]
