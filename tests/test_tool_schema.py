"""@tool: the schema that a signature and a docstring make, and the values the function gets."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Optional

import pytest

from tools import Registry, Root, Tool, ToolContext, ToolResult, ToolSetupError, tool
from tools.tool import result_of


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: float
    y: Annotated[float, "Upwards"] = 0.0


@dataclass
class Shape:
    name: str
    points: list[Point] = field(default_factory=list)


def parameters(function: Any) -> dict[str, Any]:
    return dict(tool(function).parameters)


def properties(function: Any) -> dict[str, Any]:
    return parameters(function)["properties"]


@pytest.fixture
def context(tmp_path) -> ToolContext:
    return ToolContext(root=Root(tmp_path), timeout_seconds=5)


def test_a_signature_and_its_docstring_make_the_schema() -> None:
    def look(word: str, times: int = 2, exact: bool = False) -> str:
        """Look a word up.

        It takes a while.

        Args:
            word: What to look up,
                in one word.
            times: How often.

        Returns:
            exact: not a parameter
        """
        return word * times

    made = tool(risk="reads")(look)
    assert made.describe() == {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look a word up. It takes a while.",
            "parameters": {
                "type": "object",
                "properties": {
                    "word": {"type": "string", "description": "What to look up, in one word."},
                    "times": {"type": "integer", "description": "How often.", "default": 2},
                    "exact": {"type": "boolean", "default": False},
                },
                "required": ["word"],
                "additionalProperties": False,
            },
        },
    }
    assert (made.risk, tool(look).risk) == ("reads", "runs")


def test_the_fields_of_restructured_text_are_descriptions_too() -> None:
    def look(word: str, times: int) -> str:
        """Look.

        :param word: What to look up
        :param int times: How often
        :returns: something
        """
        return word

    found = properties(look)
    assert [found[name]["description"] for name in ("word", "times")] == ["What to look up", "How often"]


def test_every_supported_annotation_has_its_schema() -> None:
    def use(
        a: Literal["x", "y"],
        b: Optional[int],  # noqa: UP045
        c: int | str,
        d: list[str],
        e: dict[str, float],
        f: Colour,
        g: Shape,
        h: Annotated[int, "Between", {"minimum": 1, "maximum": 3}],
        i: tuple[int, ...],
        j: Any,
        k: list[Point] | None = None,
        m: Literal[1, "one", None] = None,
        n: list = [],  # noqa: B006
    ) -> str:
        """Use everything."""
        return ""

    point = {
        "type": "object",
        "properties": {"x": {"type": "number"}, "y": {"type": "number", "description": "Upwards", "default": 0.0}},
        "required": ["x"],
        "additionalProperties": False,
    }
    assert properties(use) == {
        "a": {"type": "string", "enum": ["x", "y"]},
        "b": {"type": ["integer", "null"]},
        "c": {"type": ["integer", "string"]},
        "d": {"type": "array", "items": {"type": "string"}},
        "e": {"type": "object", "additionalProperties": {"type": "number"}},
        "f": {"type": "string", "enum": ["red", "blue"]},
        "g": {
            "type": "object",
            "properties": {"name": {"type": "string"}, "points": {"type": "array", "items": point}},
            "required": ["name"],
            "additionalProperties": False,
        },
        "h": {"type": "integer", "description": "Between", "minimum": 1, "maximum": 3},
        "i": {"type": "array", "items": {"type": "integer"}},
        "j": {},
        "k": {"anyOf": [{"type": "array", "items": point}, {"type": "null"}]},
        "m": {"enum": [1, "one", None]},
        "n": {"type": "array"},
    }
    assert parameters(use)["required"] == list("abcdefghij")


def test_the_function_gets_python_values(context: ToolContext) -> None:
    got = {}

    @tool
    def use(
        shape: Shape, colour: Colour, numbers: set[int], either: Point | str, maybe: list[Point] | None = None
    ) -> None:
        """Use values."""
        got.update(shape=shape, colour=colour, numbers=numbers, either=either, maybe=maybe)

    arguments = {
        "shape": {"name": "line", "points": [{"x": 1}, {"x": 2, "y": 3}]},
        "colour": "blue",
        "numbers": [1, 2.0],
        "either": {"x": 0},
    }
    assert use.run(arguments, context) == ToolResult("ok", "done")
    assert got == {
        "shape": Shape("line", [Point(1, 0.0), Point(2, 3)]),
        "colour": Colour.BLUE,
        "numbers": {1, 2},
        "either": Point(0, 0.0),
        "maybe": None,
    }
    assert {type(number) for number in got["numbers"]} == {int}


def test_what_is_returned_becomes_text(context: ToolContext) -> None:
    def returning(value: Any) -> ToolResult:
        def give() -> Any:
            """Give."""
            return value

        return tool(give).run({}, context)

    assert returning("text") == ToolResult("ok", "text")
    assert returning({"é": [1, None]}) == ToolResult("ok", '{"é": [1, null]}')
    assert returning(Point(1.0)) == ToolResult("ok", '{"x": 1.0, "y": 0.0}')
    assert returning(ToolResult("error", "no")) == ToolResult("error", "no")


def test_a_coroutine_function_is_a_tool(context: ToolContext) -> None:
    @tool
    async def wait() -> str:
        """Wait."""
        return "waited"

    assert Registry([wait]).call("wait", "{}", context) == ToolResult("ok", "waited")


def test_the_context_is_handed_in_and_not_in_the_schema(context: ToolContext) -> None:
    @tool
    def where(context: ToolContext) -> str:
        """Say where."""
        return str(context.root.path)

    assert where.parameters["properties"] == {}
    assert where.run({}, context).text == str(context.root.path)


class Odd:
    pass


@dataclass
class Nested:
    inner: list[Nested]


def _untyped(a):
    """A."""


def _odd(a: list[Odd]) -> None:
    """A."""


def _keys(a: dict[int, str]) -> None:
    """A."""


def _pair(a: tuple[int, str]) -> None:
    """A."""


def _many(*a: int) -> None:
    """A."""


def _nested(a: Nested) -> None:
    """A."""


def _unknown(a: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    """A."""


def _silent(a: int) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_untyped, "_untyped: parameter a has no type"),
        (_odd, "_odd: parameter a has the type Odd, which has no JSON schema here; supported: str, int"),
        (_keys, "_keys: parameter a: the keys of a dict must be str"),
        (_pair, "_pair: parameter a: a tuple of a fixed length has no schema"),
        (_many, "_many: parameter a cannot be given by name"),
        (_nested, "_nested: parameter a.inner: Nested contains itself"),
        (_unknown, "_unknown: its annotations cannot be read"),
        (_silent, "_silent says nowhere what it does"),
    ],
)
def test_what_no_schema_is_made_of_is_an_error_that_names_the_parameter(function: Any, message: str) -> None:
    with pytest.raises(ToolSetupError) as caught:
        tool(function)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("values", [{"name": "two words"}, {"risk": "harmless"}, {"parameters": {"type": "objekt"}}])
def test_a_wrong_name_risk_or_schema_is_an_error(values: dict[str, Any]) -> None:
    right = {"name": "a", "description": "", "parameters": {}, "risk": "reads", "run": lambda a, c: None}
    with pytest.raises(ToolSetupError):
        Tool(**(right | values))


def test_a_result_that_json_has_no_word_for_is_its_text() -> None:
    assert result_of({"a": 1.5}) == ToolResult("ok", '{"a": 1.5}')
    assert result_of({"a": float("nan")}) == ToolResult("ok", "{'a': nan}")
