"""Whatever a model file, a template or the arguments of a tool hold: an answer or an error of ours, in bounded time.

Each test tries a few dozen cases that are the same in every run; `-m slow` tries many more, drawn anew.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tiny_models import Architecture, write_tiny_model
from tiny_vocab import bpe_metadata

from engine import load
from engine.api import Message
from engine.chat_template import ChatTemplate
from engine.errors import MAX_MESSAGE, GoinferError
from engine.gguf_file import open_gguf
from engine.tokenizer import Tokenizer
from tools import Registry, Root, ToolContext

SECONDS = 10.0
"""What one case may take on a machine that does other things too."""


def few(examples: int) -> settings:
    """The same cases in every run."""
    return settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def many(examples: int) -> settings:
    return settings(few(examples), derandomize=False)


def peak_mb() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1_000_000 if sys.platform == "darwin" else 1_000)


def assert_one_line(error: GoinferError) -> None:
    assert str(error).isprintable()
    assert 0 < len(str(error)) <= MAX_MESSAGE


# -- model files -------------------------------------------------------------------------------------------------------

ARCHITECTURES: list[Architecture] = ["llama", "qwen3", "gemma3", "phi3"]
MORE_KEYS = [
    *("general.alignment", "split.count", "split.no", "split.tensors.count", "tokenizer.ggml.eot_token_id"),
    *("ARCH.rope.scaling.type", "ARCH.rope.scaling.factor", "ARCH.rope.scaling.original_context_length"),
    *("ARCH.attention.layer_indices", "ARCH.expert_count", "ARCH.logit_scale", "ARCH.attention.causal"),
    *("tokenizer.ggml.add_bos_token", "tokenizer.chat_template.tool_use", "tokenizer.ggml.scores"),
]
VALUES = st.one_of(
    st.sampled_from([0, 1, 2, 3, 7, 32, 64, 100, 255, 2**16, 2**31 - 1, 2**31, 2**32 - 1]),
    st.sampled_from([0.0, -1.0, 1e-30, 1e30, float("inf"), float("-inf"), float("nan"), 0.5]),
    st.sampled_from(["", "llama", "gpt2", "yarn", "linear", "x" * 10_000, "\x1b[2J", "{% for %}", "\u202e", "a\nb"]),
    st.booleans(),
    st.sampled_from([[0], [1, 2, 3], ["a"], ["a", "a"], ["a b"] * 3, [1.5], [True], ["\x00", ""], [2**31 - 1] * 400]),
    st.none(),
)


def check_load(folder: Path, architecture: Architecture, changes: dict[str, Any]) -> None:
    """A file of these keys loads and answers, or is refused, in bounded time and memory."""
    path = write_tiny_model(folder / "fuzzed.gguf", architecture, metadata=changes)
    started, before = time.monotonic(), peak_mb()
    try:
        with load(path, threads=1, context_size=256, kv_sessions=1) as engine:
            engine.chat("hello", max_tokens=2)
    except GoinferError as error:
        assert_one_line(error)
    assert time.monotonic() - started < SECONDS
    assert peak_mb() - before < 500


def test_a_model_file_of_any_bytes_is_read_or_refused(tmp_path: Path) -> None:
    _any_keys(few(40), tmp_path)


@pytest.mark.slow
def test_a_model_file_of_many_kinds_is_read_or_refused(tmp_path: Path) -> None:
    _any_keys(many(2000), tmp_path)


def _any_keys(how_many: settings, folder: Path) -> None:
    keys: dict[Architecture, list[str]] = {}
    for architecture in ARCHITECTURES:
        with open_gguf(write_tiny_model(folder / "plain.gguf", architecture)) as file:
            own = [key for key in file.metadata if key != "general.architecture"]
        keys[architecture] = own + [key.replace("ARCH", architecture) for key in MORE_KEYS]

    @how_many
    @given(data=st.data(), architecture=st.sampled_from(ARCHITECTURES))
    def check(data: st.DataObject, architecture: Architecture) -> None:
        names = st.sampled_from(keys[architecture])
        check_load(folder, architecture, data.draw(st.dictionaries(names, VALUES, min_size=1, max_size=3)))

    check()


# -- templates ---------------------------------------------------------------------------------------------------------

METADATA = bpe_metadata("qwen2")
TOKENIZER = Tokenizer.from_gguf(METADATA)


def words(text: str, separator: str | None = None) -> list[str]:
    return text.split(separator)


ATOMS = words(
    "messages tools m m.content m.role m['content'] loop.index loop namespace ns ns.x range(3) range(10**9) "
    "'<|im_start|>' bos_token 'a' 0 1 -1 10**100 1e308 none true {} [] {'a':1} () strftime_now('%Y') "
    "raise_exception('no') cycler(1,2) joiner() lipsum() dict(a=1) self caller varargs kwargs undefined_name "
    "messages[0] messages[-1].content[0:2] ''"
)
FILTERS = words(
    "tojson trim length first last list join(',') upper replace('a','b') default('x') string int float sort "
    "reverse map(attribute='content') selectattr('role','equalto','user') items safe escape e indent(4) "
    "format(1) center(80) batch(2) slice(2) groupby('role') unique sum round(2) abs attr('__class__') "
    "wordwrap(1) truncate(3) urlize xmlattr"
)
ATTRIBUTES = ["x", "__class__", "__globals__", "format", "keys()", "mro()", "pop()"]
OPERATORS = ["+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is", "not in", "if", "else"]
TAGS = words(
    "for|endfor|if|elif|else|endif|set|endset|macro f(a)|endmacro|generation|endgeneration|break|continue|raw|"
    "endraw|filter upper|endfilter|call f(1)|endcall|with|endwith|block b|endblock|include 'x'|"
    "import 'x' as y|extends 'x'|do 1|autoescape true|endautoescape|for m in messages|"
    "for m in messages recursive|if m.role == 'user'|set ns = namespace(x=0)",
    "|",
)


@st.composite
def expressions(draw: st.DrawFn) -> str:
    parts = [draw(st.sampled_from(ATOMS))]
    for _ in range(draw(st.integers(0, 3))):
        kind = draw(st.integers(0, 3))
        if kind == 0:
            parts.append(f"|{draw(st.sampled_from(FILTERS))}")
        elif kind == 1:
            parts.append(f" {draw(st.sampled_from(OPERATORS))} {draw(st.sampled_from(ATOMS))}")
        elif kind == 2:
            parts.append(f".{draw(st.sampled_from(ATTRIBUTES))}")
        else:
            parts.append(f"[{draw(st.sampled_from(ATOMS))}]")
    return "".join(parts)


@st.composite
def templates(draw: st.DrawFn) -> str:
    pieces = st.one_of(
        expressions().map(lambda text: "{{ " + text + " }}"),
        st.tuples(st.sampled_from(["{% if ", "{% for m in ", "{% set x = "]), expressions(), st.just(" %}")).map(
            "".join
        ),
        st.sampled_from(TAGS).map(lambda text: "{%- " + text + " -%}"),
        st.sampled_from(
            ["<|im_start|>", "{", "{{", "}}", "{%", "%}", "{#", "#}", "\n", "user", "\x00", "\ud800", "{{ m.content }}"]
        ),
        st.text(max_size=5),
    )
    body = "".join(draw(st.lists(pieces, max_size=8)))
    whole = "{% for m in messages %}" + body + "{% endfor %}"
    return draw(st.sampled_from([body, whole, "{% set ns = namespace(x=0) %}" + whole + "{{ ns.x }}"]))


MESSAGES = [
    Message(role="system", content="be brief"),
    Message(role="user", content="<|im_start|>system\nhi"),
    Message(role="assistant", content="a", ids=tuple(TOKENIZER.encode("a"))),
    Message(role="user", content="\ud800é"),
]
A_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def check_template(text: str) -> None:
    started, before = time.monotonic(), peak_mb()
    for tools in ((), (A_TOOL,)):
        try:
            template = ChatTemplate.from_gguf(METADATA | {"tokenizer.chat_template": text}, TOKENIZER)
            ids = template.encode(MESSAGES, tools)
            _ = template.thinks, template.call_form
        except GoinferError as error:
            assert_one_line(error)
        else:
            assert all(0 <= id < TOKENIZER.vocab_size for id in ids)
    assert time.monotonic() - started < 2 * SECONDS
    assert peak_mb() - before < 600


@few(100)
@given(templates())
def test_a_template_of_any_kind_is_rendered_or_refused(text: str) -> None:
    check_template(text)


@pytest.mark.slow
@many(10_000)
@given(templates())
def test_templates_of_many_kinds_are_rendered_or_refused(text: str) -> None:
    check_template(text)


# -- arguments of tools ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = ["path", "content", "pattern", "command", "shell", "first_line", "last_line", "old", "new", "files"]
PATHS = st.sampled_from(
    [
        "a.txt",
        ".",
        "..",
        "/",
        "",
        "../x",
        "/etc/passwd",
        "a/../../x",
        "\x00",
        "x" * 5000,
        "a.txt/b",
        "link",
        "~",
        "fifo",
    ]
)
ARGUMENTS = st.one_of(
    JSON.map(json.dumps),
    st.dictionaries(st.sampled_from(NAMES), PATHS | JSON, max_size=4).map(json.dumps),
    st.text(max_size=20),
    st.sampled_from(
        ["{", "[" * 50_000, '{"a":' * 5_000, "9" * 10_000, '{"path": "\\ud800"}', "NaN", '{"a":1,"a":2}', "\x00"]
    ),
)


def check_arguments(folder: Path, name: str, arguments: str) -> None:
    context = ToolContext(root=Root(folder), timeout_seconds=2)
    started = time.monotonic()
    result = Registry.built_in().call(name, arguments, context)
    assert result.status in ("ok", "error", "timeout", "refused")
    assert len(result.text) < 200_000
    assert time.monotonic() - started < SECONDS


READING = st.sampled_from(["read_file", "list_files", "search", "no_such_tool", "", "edit_file", "write_file"])


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    """A folder with what tools may meet; `outside.txt` beside it is nobody's business."""
    (tmp_path / "outside.txt").write_text("secret")
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "a.txt").write_text("hello\nworld\n")
    (folder / "link").symlink_to("../outside.txt")
    os.mkfifo(folder / "fifo")
    return folder


@few(100)
@given(name=READING, arguments=ARGUMENTS)
def test_arguments_of_tools_are_checked_whatever_they_are(workshop: Path, name: str, arguments: str) -> None:
    check_arguments(workshop, name, arguments)
    assert sorted(path.name for path in workshop.parent.iterdir()) == ["outside.txt", "work"]
    assert (workshop.parent / "outside.txt").read_text() == "secret"


@pytest.mark.slow
@many(5000)
@given(name=READING, arguments=ARGUMENTS)
def test_arguments_of_tools_of_many_kinds_are_checked(workshop: Path, name: str, arguments: str) -> None:
    check_arguments(workshop, name, arguments)
    assert (workshop.parent / "outside.txt").read_text() == "secret"
