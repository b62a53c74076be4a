"""The row below the prompt: what the function keys do, which conversation goes on, how full its context is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.utils import get_cwidth

from goinfer_chat.agent import Agent
from goinfer_chat.settings import BY_FLAG, Settings
from goinfer_chat.slash.conversation import called
from goinfer_chat.terminal import sanitize
from goinfer_chat.view.cells import cut

MIN_ROWS: Final = 10
"""A lower terminal needs its rows for the words."""
MIN_COLUMNS: Final = 8
"""With less room for a figure or a name too little of it would be left to read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionKey:
    """A key that types a line for you, or goes to the next value of a setting."""

    key: str
    label: str
    line: str = ""
    setting: str = ""
    at_once: bool = False
    """Whether it also works during a reply; the others wait for the prompt, like all that is typed."""

    @property
    def works(self) -> bool:
        return bool(self.line) or self.setting in BY_FLAG

    def pressed(self, settings: Settings) -> Settings:
        """The settings with the next choice."""
        setting = BY_FLAG[self.setting]
        at = setting.choices.index(settings.value(setting.name))
        return settings.changed({setting.name: setting.choices[(at + 1) % len(setting.choices)]})

    def shown(self, settings: Settings) -> str:
        return self.label or f"{settings.value(BY_FLAG[self.setting].name)}"


FUNCTION_KEYS: Final = (
    FunctionKey(key="f1", label="help", line="/help"),
    FunctionKey(key="f2", label="", setting="panel", at_once=True),
    FunctionKey(key="f3", label="", setting="think"),
    FunctionKey(key="f4", label="", setting="keys"),
)


def toolbar(agent: Agent, columns: int, vi_mode: str = "") -> StyleAndTextTuples:
    """The row, cut to `columns`; with what vi's keys do just then, such as `insert`."""
    settings = agent.settings
    parts: StyleAndTextTuples = []
    left = columns
    for function_key in FUNCTION_KEYS:
        if not function_key.works:
            continue
        name = f" {function_key.key.upper()}"
        setting = function_key.setting
        label = f" {setting} {function_key.shown(settings)} " if setting else f" {function_key.shown(settings)} "
        if setting == "keys" and settings.keys == "vi" and vi_mode:
            label = f" keys vi, {vi_mode} "
        if len(name) + len(label) > left:
            return parts
        parts += [("class:bottom-toolbar.key", name), ("class:bottom-toolbar.text", label)]
        left -= len(name) + len(label)
    info = agent.engine.info
    used = (agent.live.info.context_tokens if agent.live else None) or 0
    of_size = f" of {info.context_size:,}" if info.context_size else ""
    for text in (f"| {used:,}{of_size} tokens ", f"| {sanitize(called(agent), terminal=True).replace(chr(10), ' ')}"):
        if left < MIN_COLUMNS:
            break
        text = cut(text, left)
        parts.append(("class:bottom-toolbar.text", text))
        left -= get_cwidth(text)
    return parts
