"""Rules about calls that need no question: which tools, and which commands, may run or may not.

A rule is a tool's name; a name and the first words of a command, `run_command:git status`; a risk (`reads`, `writes`,
`runs`); or `all`. Those that a person gave for a folder at the prompt are kept in a file that is the person's alone.
"""

from __future__ import annotations

import json
import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

from engine.errors import UsageError
from goinfer_chat.files import changing, make_folder, reason_of, write_private
from tools import Risk, Tool

FILE: Final = "approvals.json"
_SHELLS: Final = frozenset(("sh", "bash", "dash", "zsh", "ksh", "fish", "su", "ssh"))
_RUN_ANYTHING: Final = _SHELLS | {"env", "sudo", "doas", "nice", "nohup", "setsid", "time", "timeout", "watch", "xargs"}
"""Programs whose arguments are another program to run."""
_MAX_PREFIX: Final = 60
"""Characters of the words that can be allowed: a question shows them whole."""


@dataclass(frozen=True, slots=True)
class Rule:
    what: str
    """A tool's name, a risk, or `all`."""
    words: tuple[str, ...] = ()
    """The first words of a command."""

    @classmethod
    def parse(cls, text: str) -> Rule:
        """Raises UsageError."""
        what, colon, command = text.partition(":")
        try:
            words = tuple(shlex.split(command))
        except ValueError as error:
            raise UsageError(f"{text!r} is not a rule: {error}") from None
        if not what.strip() or (colon and not words):
            raise UsageError(f"{text!r} is not a rule; a rule is like edit_file, writes, all or run_command:git status")
        return cls(what.strip(), words)

    def __str__(self) -> str:
        return f"{self.what}:{shlex.join(self.words)}" if self.words else self.what

    def allows(self, tool: Tool, arguments: Mapping[str, Any]) -> bool:
        """A rule with words allows no shell line: what follows the first words could be anything."""
        if not self._names(tool):
            return False
        return not self.words or (not arguments.get("shell") and self._begins(_words(tool, arguments)))

    def denies(self, tool: Tool, arguments: Mapping[str, Any]) -> bool:
        """In a shell line the words may stand anywhere."""
        if not self._names(tool):
            return False
        words = _words(tool, arguments)
        starts = range(len(words)) if arguments.get("shell") else range(1)
        return not self.words or any(self._begins(words[start:]) for start in starts)

    def _names(self, tool: Tool) -> bool:
        return self.what in (tool.name, tool.risk, "all")

    def _begins(self, words: Sequence[str]) -> bool:
        return tuple(words[: len(self.words)]) == self.words


def _words(tool: Tool, arguments: Mapping[str, Any]) -> list[str]:
    """The words of a call's command line; none where it has none."""
    line = arguments.get(tool.command) if tool.command else None
    if not isinstance(line, str):
        return []
    with suppress(ValueError):
        return (
            list(shlex.shlex(line, posix=True, punctuation_chars=True)) if arguments.get("shell") else shlex.split(line)
        )
    return line.split()


def command_prefix(tool: Tool, arguments: Mapping[str, Any]) -> str | None:
    """The words that can be allowed from here on: the program and what it is to do, options on the way included.

    None for a shell line, for a program that runs whatever it is told to, and for words too long to be looked at.
    """
    words = [] if arguments.get("shell") else _words(tool, arguments)
    if not words or os.path.basename(words[0]) in _RUN_ANYTHING:
        return None
    # The word behind `python -c` or `git -C` says what is run: two words alone would allow anything.
    what = next((index for index, word in enumerate(words[1:], 1) if not word.startswith("-")), len(words))
    prefix = shlex.join(words[: what + 1])
    return prefix if len(prefix) <= _MAX_PREFIX and prefix.isprintable() else None


def check_rules(rules: Sequence[Rule], names: Sequence[str]) -> None:
    """Raises UsageError for a rule about a tool that is not there: a mistyped --deny would protect nothing."""
    known = (*names, *get_args(Risk), "all")
    for rule in rules:
        if rule.what not in known:
            raise UsageError(f"the rule {str(rule)!r} names no tool and no risk; choose from: {', '.join(known)}")


class KeptRules:
    """The rules a person gave for folders, in a file that only its owner may write."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of_the_user(cls) -> KeptRules:
        import platformdirs

        return cls(platformdirs.user_config_path("goinfer-chat") / FILE)

    def of(self, folder: Path) -> tuple[Rule, ...]:
        """What may run in this folder. Raises UsageError for a file that cannot be trusted or read."""
        rules = self._read().get(str(folder), [])
        return tuple(Rule.parse(rule) for rule in rules)

    def add(self, folder: Path, rule: Rule) -> None:
        """Raises UsageError."""
        with self._changing():
            folders = self._read()
            rules = folders.setdefault(str(folder), [])
            if str(rule) not in rules:
                rules.append(str(rule))
            self._write(folders)

    def clear(self, folder: Path) -> int:
        """Forget the rules of a folder. Returns how many there were. Raises UsageError."""
        if not self.of(folder):  # nothing is written, and no folder made
            return 0
        with self._changing():
            folders = self._read()
            rules = folders.pop(str(folder), [])
            self._write(folders)
        return len(rules)

    def _read(self) -> dict[str, list[str]]:
        try:
            with open(os.open(self.path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)), encoding="utf-8") as file:
                info = os.fstat(file.fileno())
                text = file.read()
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path} cannot be read: {error}") from None
        if info.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or (hasattr(os, "getuid") and info.st_uid != os.getuid()):
            raise UsageError(f"{self.path} could be changed by other users, so its rules do not count; remove it")
        try:
            folders = json.loads(text)["folders"]
            if all(isinstance(rule, str) for rules in folders.values() for rule in rules):
                return {folder: list(rules) for folder, rules in folders.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise UsageError(f"{self.path} holds no rules; mend or remove it")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        try:
            make_folder(self.path.parent)
            with changing(self.path):
                yield
        except OSError as error:
            raise UsageError(f"{self.path} cannot be written: {reason_of(error)}") from None

    def _write(self, folders: Mapping[str, list[str]]) -> None:
        text = json.dumps({"folders": dict(folders)}, indent=2) + "\n"
        write_private(self.path, iter([text.encode()]))
