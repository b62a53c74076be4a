"""The registry: a call ends with a result, whatever the model wrote and whatever the tool does."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest

from tools import Registry, Root, Tool, ToolContext, ToolError, ToolResult, ToolSetupError, tool
from tools.loading import load_entry_points, load_file


@tool(risk="reads")
def add(a: int, b: int = 1) -> str:
    """Add."""
    return str(a + b)


@tool(risk="reads")
def now() -> str:
    """Say the time."""
    return "noon"


@tool
def refuse(text: str) -> str:
    """Refuse."""
    raise ToolError(text)


@tool
def crash(how: str) -> str:
    """Crash."""
    raise {"value": ValueError("a\nb"), "exit": SystemExit(3), "interrupt": KeyboardInterrupt()}[how]


@tool
def hang(seconds: float) -> str:
    """Hang, deaf."""
    time.sleep(seconds)
    return "awake"


@tool
def listen(context: ToolContext) -> str:
    """Wait for the end."""
    context.cancel.wait(10)
    return "heard"


@tool
def talk(length: int) -> str:
    """Talk."""
    return "".join(f"line {number}\n" for number in range(length))


@pytest.fixture
def registry() -> Registry:
    return Registry([add, now, refuse, crash, hang, listen, talk])


@pytest.fixture
def context(tmp_path: Path) -> ToolContext:
    return ToolContext(root=Root(tmp_path), timeout_seconds=0.3, output_limit=1000)


def test_a_call_gives_the_result_of_the_function(registry: Registry, context: ToolContext) -> None:
    assert registry.call("add", '{"a": 2, "b": 3}', context) == ToolResult("ok", "5")


def test_a_tool_that_is_not_there_is_a_result_that_lists_the_real_ones(
    registry: Registry, context: ToolContext
) -> None:
    assert registry.call("launch_rocket", "{}", context) == ToolResult(
        "error", "there is no tool 'launch_rocket'; the tools are: add, now, refuse, crash, hang, listen, talk"
    )
    assert "did you mean crash?" in registry.call("crush", "{}", context).text


@pytest.mark.parametrize("arguments", ["", " \n", "{}"])
def test_empty_arguments_are_none(registry: Registry, context: ToolContext, arguments: str) -> None:
    assert registry.call("now", arguments, context) == ToolResult("ok", "noon")
    assert "'a' is a required property" in registry.call("add", arguments, context).text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("[1]", "the arguments must be one JSON object, not an array"),
        ("null", "the arguments must be one JSON object, not null"),
        ('"x"', "the arguments must be one JSON object, not a text"),
        ('{"a": 1', "the arguments are not JSON: "),
        ('{"a": NaN}', "the arguments are not JSON: NaN is not JSON"),
        ("[" * 100_000, "the arguments are not JSON: "),
        ('{"a": ' + "1" * 5000 + "}", "the arguments are not JSON: "),
        ('{"a": "1"}', "wrong arguments: a: '1' is not of type 'integer'"),
        ('{"a": true}', "wrong arguments: a: True is not of type 'integer'"),
        ('{"a": 1, "c": 2}', "wrong arguments: Additional properties are not allowed ('c' was unexpected)"),
    ],
)
def test_arguments_that_are_wrong_are_a_result_that_says_how(
    registry: Registry, context: ToolContext, arguments: str, message: str
) -> None:
    result = registry.call("add", arguments, context)
    assert result.status == "error"
    assert result.text.startswith(message)


def test_a_long_wrong_value_is_not_repeated_whole(registry: Registry, context: ToolContext) -> None:
    assert len(registry.call("add", f'{{"a": "{"x" * 5000}"}}', context).text) < 300


def test_a_reference_to_another_address_is_not_fetched(context: ToolContext) -> None:
    # The port is closed; a validator that fetched would say so.
    odd = Tool(
        name="odd",
        description="",
        parameters={"$ref": "http://127.0.0.1:9/x"},
        risk="reads",
        run=lambda arguments, context: ToolResult("ok", ""),
    )
    result = Registry([odd]).call("odd", "{}", context)
    assert result.status == "error"
    assert "Unresolvable" in result.text


def test_what_a_tool_raises_is_a_result(registry: Registry, context: ToolContext) -> None:
    assert registry.call("refuse", '{"text": "not today"}', context) == ToolResult("error", "not today")
    for how, text in [("value", "ValueError: a b"), ("exit", "SystemExit: 3"), ("interrupt", "KeyboardInterrupt")]:
        result = registry.call("crash", f'{{"how": "{how}"}}', context)
        assert result == ToolResult("error", f"crash failed: {text}")


def test_a_tool_that_hangs_ends_with_its_time(registry: Registry, context: ToolContext) -> None:
    started = time.monotonic()
    result = registry.call("hang", '{"seconds": 3}', context)
    assert time.monotonic() - started < 2.5
    assert result.status == "timeout"
    assert "longer than 0.3 s" in result.text


def test_a_tool_that_is_cancelled_ends_at_once(registry: Registry, tmp_path: Path) -> None:
    for call in (("hang", '{"seconds": 3}'), ("listen", "{}")):
        context = ToolContext(root=Root(tmp_path), timeout_seconds=20)
        threading.Timer(0.1, context.cancel.set).start()
        started = time.monotonic()
        assert registry.call(*call, context).status == "cancelled"
        assert time.monotonic() - started < 2
    assert registry.call("now", "{}", context).status == "cancelled"


def test_a_long_result_has_its_head_and_its_tail(registry: Registry, context: ToolContext) -> None:
    text = registry.call("talk", '{"length": 10000}', context).text
    assert len(text) < 1100
    assert text.startswith("line 0\nline 1\n")
    assert text.endswith("\nline 9999\n")
    assert "characters left out ...]" in text


def test_a_selection_keeps_the_order_and_names_what_is_missing(registry: Registry) -> None:
    assert registry.select(["now", "add"]).names == ["add", "now"]
    with pytest.raises(ToolError, match="there is no tool 'subtract'"):
        registry.select(["subtract"])


def test_two_tools_of_one_name_are_an_error(registry: Registry) -> None:
    with pytest.raises(ToolSetupError, match="two tools are called add"):
        registry.add(add)


def test_a_file_gives_the_tools_it_makes(tmp_path: Path, context: ToolContext) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from dataclasses import dataclass\nfrom tools import tool\n\n"
        "@dataclass\nclass Pair:\n    a: int\n    b: int\n\n"
        "@tool(risk='reads')\ndef total(pair: Pair) -> str:\n    '''Add up.'''\n    return str(pair.a + pair.b)\n"
    )
    (made,) = load_file(file)
    assert (made.name, made.risk, made.source) == ("total", "reads", str(file))
    assert Registry([made]).call("total", '{"pair": {"a": 1, "b": 2}}', context).text == "3"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no such file"),
        ("x = 1", "makes no tool"),
        ("x = ", "SyntaxError"),
        ("raise SystemExit(0)", "SystemExit"),
        ("from tools import tool\n@tool\ndef f(a):\n    '''F.'''", "f: parameter a has no type"),
    ],
)
def test_a_file_that_gives_no_tools_is_an_error_that_names_it(
    tmp_path: Path, content: str | None, message: str
) -> None:
    file = tmp_path / "mine.py"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ToolSetupError) as caught:
        load_file(file)
    assert str(file) in str(caught.value)
    assert message in str(caught.value)


def test_installed_packages_offer_tools_and_a_broken_one_costs_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "offered_tools.py").write_text(
        "from tools import tool\n\n@tool\ndef offered() -> str:\n    '''Offer.'''\n    return ''\n"
    )
    info = tmp_path / "offering-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: offering\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[goinfer_chat.tools]\nall = offered_tools\none = offered_tools:offered\nbad = no_such_module\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found, problems = load_entry_points()
    assert [(made.name, made.source) for made in found] == [("offered", "offering: all"), ("offered", "offering: one")]
    assert len(problems) == 1
    assert "offering: bad cannot be loaded: ModuleNotFoundError" in problems[0]
    sys.modules.pop("offered_tools")


@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "Infinity"])
def test_a_number_that_is_none_in_json_is_a_result_that_says_so(tmp_path: Path, number: str) -> None:
    result = Registry.built_in().call("list_files", f'{{"path": {number}}}', ToolContext(root=Root(tmp_path)))
    assert result.status == "error"
    assert result.text.startswith(f"the arguments are not JSON: {number} is ")
