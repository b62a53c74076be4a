"""Tools of the person's own: from a file that was named, and from packages that offer some."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from tools.errors import ToolSetupError
from tools.tool import Tool

ENTRY_POINTS: Final = "goinfer_chat.tools"
"""An entry point of this group names a Tool, a list of tools, or a module that holds some."""


def load_file(path: Path) -> list[Tool]:
    """Run a Python file and return the tools that it makes. Raises ToolSetupError."""
    if not path.is_file():
        raise ToolSetupError(f"{path}: there is no such file")
    name = f"goinfer_chat_tools_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ToolSetupError(f"{path} is not a Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except ToolSetupError as error:
        raise ToolSetupError(f"{path}: {error}") from error
    except BaseException as error:
        raise ToolSetupError(f"{path}: {type(error).__name__}: {error}") from error
    tools = _tools_in(module, str(path))
    if not tools:
        raise ToolSetupError(f"{path} makes no tool; put @tool above a function: from tools import tool")
    return tools


def load_entry_points() -> tuple[list[Tool], list[str]]:
    """The tools of installed packages, and what is wrong with those that cannot be loaded."""
    tools: list[Tool] = []
    problems = []
    for entry in entry_points(group=ENTRY_POINTS):
        source = f"{entry.dist.name if entry.dist else 'package'}: {entry.name}"
        try:
            tools += _tools_in(entry.load(), source)
        except BaseException as error:  # noqa: BLE001 - a package that is broken costs its own tools
            problems.append(f"the tools of {source} cannot be loaded: {type(error).__name__}: {error}")
    return tools, problems


def _tools_in(found: Any, source: str) -> list[Tool]:
    values: Iterable[Any]
    if isinstance(found, Tool):
        values = [found]
    elif isinstance(found, Iterable):
        values = list(found)
    else:
        values = list(vars(found).values())
    unique = {id(value): value for value in values if isinstance(value, Tool)}
    return [replace(tool, source=source) for tool in unique.values()]
