"""Flags and variables: which counts, what they may be, and what is said of those that are wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from engine.errors import UsageError
from goinfer_chat.cli import build_app
from goinfer_chat.loading import load_engine
from goinfer_chat.resolving import resolve, unknown_variables
from goinfer_chat.settings import ENVIRONMENT_PREFIX, SETTINGS, Setting, Settings
from goinfer_chat.values import parse_size, written_size

PROJECT = Path(__file__).parents[1]


def test_a_flag_counts_before_its_variable_and_a_variable_before_the_default() -> None:
    environ = {"GOINFER_CHAT_TOP_K": "7", "GOINFER_CHAT_SEED": "", "GOINFER_CHAT_STOP": '["a", "b"]'}
    assert resolve({}, environ) == Settings().changed({"top_k": 7, "stop": ("a", "b")})
    assert resolve({"top_k": 3, "seed": None}, environ).sampling.top_k == 3


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.flag)
def test_every_setting_has_a_variable_that_reaches_it(setting, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[profile.work]")
    special = {"backend": "cpu", "config": str(file), "profile": "work"}
    text = special.get(setting.flag, "on" if setting.switch else setting.choices[-1] if setting.choices else "1")
    values = {"GOINFER_CHAT_JSON": "on", "GOINFER_CHAT_CONFIG": str(file), setting.variable: text}
    assert resolve({}, values).value(setting.name) == setting.parse(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("1,000", 1000), ("500MB", 500 * 10**6), ("1.5 GB", 1_500_000_000), ("2tb", 2 * 10**12)],
)
def test_sizes_have_decimal_units(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(("size", "text"), [(8_000_000_000, "8GB"), (1_500_000, "1500KB"), (999, "999"), (0, "0")])
def test_a_size_is_written_as_a_person_would_and_read_back(size: int, text: str) -> None:
    assert written_size(size) == text
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "-5MB", "1e999", "nan", "many", "5MBMB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        parse_size(text)


def test_a_wrong_variable_is_named() -> None:
    with pytest.raises(UsageError, match="GOINFER_CHAT_TOP_K: 'many' is not a whole number"):
        resolve({}, {"GOINFER_CHAT_TOP_K": "many"})


def test_every_variable_that_the_program_reads_is_known_to_it() -> None:
    sources = [
        path.read_text() for folder in ("engine", "goinfer_chat", "tools") for path in (PROJECT / folder).rglob("*.py")
    ]
    found = {name for text in sources for name in re.findall(rf"\b{ENVIRONMENT_PREFIX}[A-Z_]+", text)}
    assert {f"{ENVIRONMENT_PREFIX}MODELS", f"{ENVIRONMENT_PREFIX}KERNELS", f"{ENVIRONMENT_PREFIX}TOOL_CALL"} <= found
    assert unknown_variables(dict.fromkeys([*found, *(setting.variable for setting in SETTINGS)], "1")) == []


def numbers_of(command: Any, *names: str) -> Iterator[list[str]]:
    """The command line of each flag whose value is a number."""
    for option in command.params:
        if option.metavar in ("N", "X"):
            yield [*names, option.opts[0]]
    for name, inner in getattr(command, "commands", {}).items():
        yield from numbers_of(inner, *names, name)


def test_what_is_no_number_is_told_in_the_same_words_by_every_flag() -> None:
    program = typer.main.get_command(build_app(load_engine))
    lines = list(numbers_of(program))
    assert ["serve", "--port"] in lines
    assert ["sessions", "list", "--limit"] in lines
    for line in lines:
        with pytest.raises(typer.BadParameter, match=r"'abc' is not a (whole )?number$"):
            program.main([*line, "abc"], standalone_mode=False)


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.flag)
def test_the_guide_has_a_row_for_each_flag_with_all_its_words(setting: Setting) -> None:
    guide = (PROJECT / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = [line for line in guide.splitlines() if re.match(rf"\| .*`--{setting.flag}[ `]", line)]
    assert rows
    shown = rows[0].split(" | ")[0].replace("\\|", "|")
    assert all(re.search(rf"\b{word}\b", shown) for word in setting.choices or ())
