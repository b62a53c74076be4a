"""The tools of a session: which there are, which the model may use, where they work, and what they changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Final, Self

from engine.errors import UsageError
from engine.json_schema import validator
from goinfer_chat.calls.approval import Approvals
from goinfer_chat.calls.approval_rules import KeptRules, Rule, check_rules
from goinfer_chat.settings import Settings
from goinfer_chat.settings_file import read_servers
from tools import Journal, Registry, Root, Tool, ToolContext, ToolError, ToolSetupError
from tools.environment import safe_environment
from tools.loading import load_entry_points, load_file
from tools.mcp_servers import McpServer, McpServers

ON: Final = "on"
OFF: Final = "off"


@dataclass(frozen=True, slots=True)
class Choice:
    """What --tools and /tools say: files that add tools, and which tools the model may use."""

    files: tuple[Path, ...] = ()
    names: tuple[str, ...] = ()
    """Empty: all there are, if any are `on`."""
    on: bool = False

    @classmethod
    def parse(cls, words: Iterable[str]) -> Choice:
        """`on`, `off`, names of tools, and Python files. A file alone turns everything on."""
        files, names, off = [], [], False
        for word in words:
            if word.endswith(".py") or "/" in word:
                files.append(Path(word).expanduser())
            elif word == OFF:
                off = True
            elif word != ON:
                names.append(word)
        return cls(tuple(files), tuple(names), on=not off)


@dataclass(slots=True)
class Toolbox:
    """Everything that tools need. A context manager; `open` makes it.

    notices   what could not be had: a package's tools, a server's tool
    """

    registry: Registry
    approvals: Approvals
    root: Root
    settings: Settings
    notices: list[str] = field(default_factory=list)
    in_use: tuple[str, ...] = ()
    """The tools the model may use, in the order of the registry."""
    _close: ExitStack = field(default_factory=ExitStack)
    _temporary: Path | None = None

    @classmethod
    def open(cls, settings: Settings) -> Toolbox:
        """Load all tools there are. Raises UsageError for a file, a server or a rule that cannot be used."""
        servers = servers_of(*read_servers(settings.config))
        with ExitStack() as undo:
            try:
                registry = Registry.built_in(validator)
                found, notices = load_entry_points()
                for path in Choice.parse(settings.tools).files:
                    found += load_file(path)
                for tool in found:
                    registry.add(tool)
                if servers:
                    connections = undo.enter_context(McpServers())
                    for server in servers:
                        offered, problems = connections.connect(server)
                        notices += [*problems, *_added(registry, offered)]
                root = undo.enter_context(Root(Path(settings.root or ".")))
            except ToolSetupError as error:
                raise UsageError(str(error)) from error
            approvals = Approvals(
                root.path,
                allow=tuple(map(Rule.parse, settings.allow)),
                deny=tuple(map(Rule.parse, settings.deny)),
                yes=settings.yes,
                kept=KeptRules.of_the_user(),
            )
            check_rules([*approvals.allow, *approvals.deny], registry.names)
            return cls(registry, approvals, root, settings, notices, _close=undo.pop_all())

    @classmethod
    def chosen(cls, settings: Settings) -> Toolbox:
        """All tools there are, of which those are in use that the settings name. Raises UsageError."""
        choice, toolbox = Choice.parse(settings.tools), cls.open(settings)
        try:
            toolbox.use(choice if settings.tools else replace(choice, on=False))
        except UsageError:
            toolbox.close()
            raise
        return toolbox

    def use(self, choice: Choice) -> None:
        """Choose what the model may use. Raises UsageError for a name that is not there."""
        try:
            chosen = self.registry.select(choice.names).names if choice.names else self.registry.names
        except ToolError as error:
            raise UsageError(str(error)) from None
        self.in_use = tuple(chosen) if choice.on else ()

    def offered(self, forced: str | None = None) -> list[Tool]:
        """The tools that go into a request; a forced one is among them. Raises UsageError for one that is not there."""
        names = [*self.in_use, *([forced] if forced and forced not in self.in_use else [])]
        try:
            return self.registry.select(names).tools
        except ToolError as error:
            raise UsageError(str(error)) from None

    def context(self, cancel: threading.Event, journal: Journal, key: str) -> ToolContext:
        """For one call."""
        settings = self.settings
        return ToolContext(
            root=self.root,
            cancel=cancel,
            timeout_seconds=settings.tool_timeout,
            environment=safe_environment(os.environ, settings.tool_env),
            journal=journal,
            key=key,
            test_command=settings.test_command,
        )

    def unkept_journal(self, conversation: str) -> Journal:
        """Of a conversation that is not kept: its copies go with the program."""
        if self._temporary is None:
            self._temporary = Path(self._close.enter_context(TemporaryDirectory(prefix="goinfer-chat-")))
        return Journal(self._temporary / conversation)

    def close(self) -> None:
        """May be called again."""
        self._close.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _added(registry: Registry, offered: Iterable[Tool]) -> list[str]:
    """Add a server's tools. What it calls as another is called costs that tool, not the others: why, for each."""
    problems = []
    for tool in offered:
        try:
            registry.add(tool)
        except ToolSetupError as error:
            problems.append(str(error))
    return problems


def servers_of(table: Mapping[str, Any], where: str) -> list[McpServer]:
    """The MCP servers of a settings file: `[mcp.NAME]` with `command` or `url`. Raises UsageError."""
    servers = []
    for name, values in table.items():
        at = f"{where}: [mcp.{name}]"
        if not isinstance(values, Mapping):
            raise UsageError(f"{at} is a table with command or url")
        known = {"command": list, "env": dict, "url": str, "headers": dict, "risk": str, "reads": list, "enabled": bool}
        for key, value in values.items():
            if key not in known:
                raise UsageError(f"{at}: unknown key {key}; known keys: {', '.join(known)}")
            if not isinstance(value, known[key]) or not _all_text(value):
                raise UsageError(f"{at}: {key} cannot be {value!r}")
        if not values.get("enabled", True):
            continue
        try:
            servers.append(
                McpServer(
                    name=name,
                    command=tuple(values.get("command", ())),
                    environment=_expanded(values.get("env", {}), at),
                    url=values.get("url"),
                    headers=_expanded(values.get("headers", {}), at),
                    risk=values.get("risk", "runs"),
                    reads=tuple(values.get("reads", ())),
                )
            )
        except ToolSetupError as error:
            raise UsageError(f"{where}: {error}") from None
    return servers


def _all_text(value: Any) -> bool:
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return all(isinstance(item, str) for item in items)


def _expanded(values: Mapping[str, str], where: str) -> dict[str, str]:
    """`$NAME` is replaced by an environment variable, so that no secret has to be in the file."""
    found = {}
    for key, value in values.items():
        found[key] = os.path.expandvars(value)
        if "$" in found[key]:
            raise UsageError(f"{where}: {key}: a variable in {value!r} is not set")
    return found
