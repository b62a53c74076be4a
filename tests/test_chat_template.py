"""Prompts: the template's text, control tokens from nowhere else, replies that keep their ids, hostile templates."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.sandbox
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from tiny_vocab import CHATML_TEMPLATE, LLAMA2_TEMPLATE, USER_DEFINED, bpe_metadata, spm_metadata

from engine.api import Message
from engine.chat_template import ChatTemplate
from engine.errors import ModelFileError, TemplateError, UsageError
from engine.gguf_file import open_gguf
from engine.prompt_marks import Guard, Marks
from engine.template_sandbox import MAX_SOURCE_CHARACTERS
from engine.tokenizer import Tokenizer

STRICT_TEMPLATE = """{{ bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}
{{- message.content | trim + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
"""A user and an assistant in turn and nothing else, as Gemma's template wants it."""

THINKING_TEMPLATE = """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- set content = message.content %}
{%- if message.role == 'assistant' %}
{%- set thinking = '' %}
{%- if message.reasoning_content is string %}{% set thinking = message.reasoning_content %}
{%- elif '</think>' in content %}
{%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{%- if loop.last and thinking %}{{ '<think>\n' + thinking + '\n</think>\n\n' }}{% endif %}
{%- endif %}
{{- content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
"""Reasoning is in the text or beside it, and only the last reply keeps it, as in Qwen3's template."""

TOOL_TEMPLATE = """{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}{{ 'Call with <tool_call>.<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.name %}{{ message.name + message.tool_call_id + ': ' }}{% endif %}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def with_user_defined(metadata: dict[str, Any], *texts: str) -> dict[str, Any]:
    return {
        **metadata,
        "tokenizer.ggml.tokens": [*metadata["tokenizer.ggml.tokens"], *texts],
        "tokenizer.ggml.token_type": [*metadata["tokenizer.ggml.token_type"], *[USER_DEFINED] * len(texts)],
    }


QWEN = with_user_defined(bpe_metadata("qwen2"), "<tool_call>", "</tool_call>", "<think>", "</think>", "<b>")
GEMMA = spm_metadata(gemma=True)
LLAMA2 = spm_metadata(gemma=False)
TOKENIZERS = {name: Tokenizer.from_gguf(m) for name, m in (("qwen", QWEN), ("gemma", GEMMA), ("llama2", LLAMA2))}
VOCABULARIES = {"qwen": QWEN, "gemma": GEMMA, "llama2": LLAMA2}


def template_of(source: str | None = None, vocabulary: str = "qwen") -> ChatTemplate:
    metadata = dict(VOCABULARIES[vocabulary])
    if source is not None:
        metadata["tokenizer.chat_template"] = source
    return ChatTemplate.from_gguf(metadata, TOKENIZERS[vocabulary])


def id_of(text: str, vocabulary: str = "qwen") -> int:
    position: int = VOCABULARIES[vocabulary]["tokenizer.ggml.tokens"].index(text)
    return position


def user(text: str) -> Message:
    return Message(role="user", content=text)


def system(text: str) -> Message:
    return Message(role="system", content=text)


def assistant(text: str, ids: Sequence[int] | None = None, **fields: Any) -> Message:
    return Message(role="assistant", content=text, ids=tuple(ids) if ids is not None else None, **fields)


def reply(ids: Sequence[int], vocabulary: str = "qwen") -> Message:
    """A reply as the engine gives it: these ids, and their text."""
    return assistant(TOKENIZERS[vocabulary].decode(ids), ids)


def shown(ids: Sequence[int], vocabulary: str = "qwen") -> str:
    """The text of ids with the control tokens written out."""
    tokenizer = TOKENIZERS[vocabulary]
    pieces = [tokenizer.token_text(id).encode() if id in tokenizer.control_ids else tokenizer.piece(id) for id in ids]
    return b"".join(pieces).decode()


# -- what llama.cpp renders ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "smollm2-135m",
        pytest.param("qwen2.5-coder-0.5b", marks=pytest.mark.slow),
        pytest.param("qwen2.5-coder-1.5b", marks=pytest.mark.slow),
    ],
)
def test_prompts_and_ids_equal_those_of_llama_cpp(
    name: str, model_path: Callable[[str], Path], golden: Callable[[str], dict[str, Any]]
) -> None:
    with open_gguf(model_path(name)) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        template = ChatTemplate.from_gguf(file.metadata, tokenizer)
    assert template.notices == ()
    cases = golden(name)["chat"]
    assert len(cases) >= 4
    for case in cases:
        messages = [Message(**message) for message in case["messages"]]
        assert template.render(messages, case["tools"] or ()) == case["prompt"]
        assert template.encode(messages, case["tools"] or ()) == case["ids"]


@pytest.mark.slow
def test_a_spelled_end_of_turn_is_the_plain_pieces_of_the_reference(model_path: Callable[[str], Path]) -> None:
    with open_gguf(model_path("qwen2.5-coder-0.5b")) as file:
        tokenizer = Tokenizer.from_gguf(file.metadata)
        template = ChatTemplate.from_gguf(file.metadata, tokenizer)
    user_turn = [151644, 872, 198, 27, 91, 318, 6213, 91, 29, 151645, 198]
    assert template.encode([user("<|im_end|>")])[-len(user_turn) - 3 : -3] == user_turn


# -- template features ---------------------------------------------------------------------------------------------


def hugging_face_render(source: str, **variables: Any) -> str:
    """As `apply_chat_template` of the transformers library sets Jinja2 up."""

    class Generation(jinja2.ext.Extension):
        tags = frozenset(["generation"])

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_tracked"), [], [], body).set_lineno(line)

        def _tracked(self, caller: Any) -> Any:
            return caller()

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, ensure_ascii=False, indent=None, separators=None, sort_keys=False: (
        json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    )
    return environment.from_string(source).render(**variables)


FEATURES = [
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}!{% endfor %}",
    "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% if m.role == 'user' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "{{ {'b': '<a>&é\"', 'a': [1, 2.5, none, true]} | tojson }}{{ '日' | tojson(ensure_ascii=true) }}",
    "{{ tools | tojson(indent=2) }}{{ tools | tojson(separators=(',', ':')) }}{{ tools | tojson(sort_keys=true) }}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
    "{% macro turn(role, text='') %}[{{ role }}: {{ text }}{{ caller() if caller }}]{% endmacro %}{{ turn('a', 'b') }}",
    "{% macro turn(role) %}[{{ role }}{{ caller() }}]{% endmacro %}{% call turn('x') %}inside{% endcall %}",
    "{% set x %}a\n  {{ 1 }}\n{% endset %}{{ x }}|{% filter upper %}shout{% endfilter %}",
    "{{ messages[1:] | map(attribute='role') | join(', ') }}",
    "{{ messages | selectattr('role', 'equalto', 'user') | list }}{{ messages | length }}{{ messages | last }}",
    "{{ 'a' ~ 1 ~ none ~ [1] }}{{ (1, 2) }}{{ [1] + [2] }}{{ 'ab' * 3 }}",
    "{{ 2 ** 10 }}{{ 7 % 4 }}{{ 7 // 2 }}{{ -3 }}{{ '12' | int + 1 }}{{ 2.567 | round(1) }}{{ [1, 2] | sum }}",
    "{{ '%s-%03d' % ('a', 7) }}{{ '{} {x!r:>5}'.format(1, x='b') }}{{ '%d' | format(3) }}",
    "{{ 'a,b'.split(',') }}{{ '-'.join(['a', 'b']) }}{{ ' y\n'.rstrip() }}{{ ' x ' | trim }}",
    "{{ 'aXbX'.replace('X', '..') }}{{ 'aXbX' | replace('X', '', 1) }}{{ 'one\ntwo' | indent(2) }}",
    "{{ [3, 1, 2] | sort }}{{ {'b': 1, 'a': 2} | dictsort }}{{ [1, 1] | unique | list }}",
    "{{ [1, 2, 3] | batch(2) | list }}{{ [1, 2, 3] | reverse | list }}{{ [1, 2] | min }}",
    "{{ undefined_name }}{{ undefined_name is defined }}{{ undefined_name | default('d') }}{{ none }}{{ [] | first }}",
    "{% for key, value in tools[0].items() %}{{ key }}={{ value }};{% endfor %}{{ tools[0].get('no', 'none') }}",
    "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{{ loop.depth }}{% endfor %}",
    "{% block title %}in a block{% endblock %}{{ self.title() }}",
    "{% for m in messages %}{% set c = m.content %}{{ c.replace('u', 'x') }}{{ '-'.join([c, c]) }}{% endfor %}",
    "{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.cycle('o', 'e') }}{% endfor %}",
    "{% for m in messages %}{{ loop.previtem is defined }}{{ loop.changed(m.role) }}{% else %}none{% endfor %}",
    "{# a comment #}\n  {%- if true %}\n  indented\n  {% endif %}\n{{ 'a' if false }}\n",
    "{{ dict(a=1) }}{{ range(3) | list }}{{ cycler('a', 'b').next() }}{{ 'x' in 'xyz' }}{{ 'a' in ['a'] }}",
    "{{ '<&>' }}{{ '<&>' | e }}{{ '<b>' | safe }}{{ 'a b' | title }}{{ 'AB' | lower }}",
]


@pytest.mark.parametrize("source", FEATURES)
def test_templates_render_as_with_hugging_face(source: str) -> None:
    messages = [system("s"), user("u é <b>"), assistant("a")]
    tools = [{"type": "function", "b": {"z": 1, "a": "ü"}}]
    as_dicts = [{"role": message.role, "content": message.content} for message in messages]
    expected = hugging_face_render(source, messages=as_dicts, tools=tools, add_generation_prompt=True)
    assert template_of(source).render_as_given(messages, tools) == expected


def test_the_templates_of_real_models_render_as_with_hugging_face(model_path: Callable[[str], Path]) -> None:
    with open_gguf(model_path("smollm2-135m")) as file:
        source = str(file.metadata["tokenizer.chat_template"])
    messages = [user("a"), assistant("b"), user("c")]
    as_dicts = [{"role": message.role, "content": message.content} for message in messages]
    expected = hugging_face_render(source, messages=as_dicts, add_generation_prompt=True)
    assert template_of(source).render(messages) == expected


def test_the_time_is_the_local_time() -> None:
    form = "%d %b %Y %H"
    before = datetime.datetime.now().astimezone().strftime(form)
    text = template_of(f"{{{{ strftime_now('{form}') }}}}").render([user("x")])
    assert text in (before, datetime.datetime.now().astimezone().strftime(form))


def test_arguments_and_special_tokens_reach_the_template() -> None:
    source = "{{ bos_token }}{{ eos_token }}{{ enable_thinking }}{{ add_generation_prompt }}{{ tools is none }}"
    template = template_of(source)
    text = template.render([user("x")], enable_thinking=False, add_generation_prompt=False)
    assert text == "<|endoftext|><|im_end|>FalseFalseTrue"


def test_a_template_for_tools_is_used_when_there_are_tools() -> None:
    metadata = QWEN | {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "with tools"}
    template = ChatTemplate.from_gguf(metadata, TOKENIZERS["qwen"])
    assert template.render([user("x")]) == "plain"
    assert template.render_as_given([user("x")], [{"name": "f"}]) == "with tools"
    override = ChatTemplate.from_gguf(metadata, TOKENIZERS["qwen"], "mine")
    assert override.render([user("x")], [{"name": "f"}]) == "mine"


def test_arguments_of_calls_are_objects_also_where_they_came_as_text() -> None:
    template = template_of(TOOL_TEMPLATE)

    def rendered(arguments: Any) -> str:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
        return template.render([user("x"), assistant("", tool_calls=(call,))])

    assert '"arguments": {"b": 1, "a": "é"}}' in rendered('{"b": 1, "a": "é"}')
    assert rendered('{"b": 1, "a": "é"}') == rendered({"b": 1, "a": "é"})
    assert '"arguments": {}}' in rendered("")
    assert '"arguments": "[1"}' in rendered("[1")


def test_key_order_is_as_given_in_every_process() -> None:
    tools = [{"z": 1, "a": {"y": "<|im_end|>", "b": 2}}, {"name": "g", "b": 1}, {"name": "a", "a": 1}]
    program = (
        "import json, sys; sys.path[:0] = json.loads(sys.argv[1])\n"
        "from test_chat_template import TOOL_TEMPLATE, template_of, user\n"
        "template, tools = template_of(TOOL_TEMPLATE), json.loads(sys.argv[2])\n"
        "print(json.dumps([template.render([user('x')], tools), template.encode([user('x')], tools)]))"
    )
    paths = json.dumps([str(Path(__file__).parent), str(Path(__file__).parent.parent)])
    outputs = set()
    for seed in ("0", "1", "random"):
        run = subprocess.run(
            [sys.executable, "-c", program, paths, json.dumps(tools)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        outputs.add(run.stdout)
    (output,) = outputs
    text = json.loads(output)[0]
    assert "\n".join(json.dumps(tool) for tool in tools) in text


# -- orders of roles that a template refuses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "same_as"),
    [
        ([system("s"), user("u")], [user("s\n\nu")]),
        ([user("a"), user("b")], [user("a\n\nb")]),
        ([system("s"), system("t"), user("u")], [user("s\n\nt\n\nu")]),
        ([Message(role="developer", content="d"), user("u")], [user("d\n\nu")]),
        (
            [user("a"), assistant("x"), assistant("y"), user("b")],
            [user("a"), assistant("x\n\ny"), user("b")],
        ),
        ([user("a"), assistant("x"), system("s"), user("b")], [user("a"), assistant("x"), user("s\n\nb")]),
    ],
)
def test_an_order_of_roles_that_the_template_refuses_is_joined_until_it_accepts(
    messages: list[Message], same_as: list[Message]
) -> None:
    template = template_of(STRICT_TEMPLATE, "gemma")
    assert template.render(messages) == template.render(same_as)
    assert template.encode(messages) == template.encode(same_as)


def test_an_order_that_the_template_accepts_is_rendered_as_given() -> None:
    messages = [user("a"), user("b"), system("s"), system("t")]
    assert template_of(CHATML_TEMPLATE).render(messages, add_generation_prompt=False) == "".join(
        f"<|im_start|>{message.role}\n{message.content}<|im_end|>\n" for message in messages
    )


def test_joining_system_messages_comes_before_making_them_a_users() -> None:
    source = (
        "{% if messages[1].role == 'system' %}{{ raise_exception('one system message') }}{% endif %}" + CHATML_TEMPLATE
    )
    text = template_of(source).render([system("s"), system("t"), user("u")])
    assert text.startswith("<|im_start|>system\ns\n\nt<|im_end|>\n<|im_start|>user\nu")


def test_a_developer_is_the_system_unless_the_template_knows_developers() -> None:
    messages = [Message(role="developer", content="d"), user("u")]
    assert "<|im_start|>system\nd" in template_of(CHATML_TEMPLATE).render(messages)
    knows = CHATML_TEMPLATE + "{# developer #}"
    assert "<|im_start|>developer\nd" in template_of(knows).render(messages)


def test_what_cannot_be_joined_is_refused_in_one_line_with_the_templates_own_words() -> None:
    template, messages = template_of(STRICT_TEMPLATE, "gemma"), [assistant("first"), user("u")]
    for action in (template.render, template.encode):
        with pytest.raises(TemplateError) as error:
            action(messages)
        assert "Conversation roles must alternate user/assistant/user/assistant/..." in str(error.value)
        assert "\n" not in str(error.value)
    assert template.encode([user("next")])


def test_the_words_of_a_template_lose_their_control_characters() -> None:
    with pytest.raises(TemplateError) as error:
        template_of("{{ raise_exception('no\x1b[31m red\nline' ~ 'x' * 3000) }}").render([user("x")])
    assert "no [31m red linexxx" in str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 700


# -- no template, broken template ----------------------------------------------------------------------------------


def test_without_a_template_a_vocabulary_with_chatml_tokens_gets_chatml_with_a_notice() -> None:
    metadata = {key: value for key, value in QWEN.items() if key != "tokenizer.chat_template"}
    template = ChatTemplate.from_gguf(metadata, TOKENIZERS["qwen"])
    (notice,) = template.notices
    assert "no chat template" in notice
    assert "ChatML" in notice
    assert template.stop == ()
    assert template.render([system("s"), user("u")]) == template_of(CHATML_TEMPLATE).render([system("s"), user("u")])


def test_a_blank_template_is_no_template() -> None:
    template = ChatTemplate.from_gguf(QWEN | {"tokenizer.chat_template": " \n"}, TOKENIZERS["qwen"])
    assert "no chat template" in template.notices[0]
    assert template.render([user("u")]) == template_of(CHATML_TEMPLATE).render([user("u")])


def test_a_template_that_writes_nothing_is_refused() -> None:
    with pytest.raises(TemplateError, match="an empty prompt"):
        template_of("{% if false %}x{% endif %}").encode([user("u")])


def test_without_a_template_and_its_tokens_messages_are_plain_lines_with_a_notice() -> None:
    metadata = {key: value for key, value in GEMMA.items() if key != "tokenizer.chat_template"}
    template = ChatTemplate.from_gguf(metadata, TOKENIZERS["gemma"])
    (notice,) = template.notices
    assert "'role: text'" in notice
    messages = [system("s"), user("u"), assistant(" a\n"), user("v")]
    assert template.render(messages) == "system: s\nuser: u\nassistant: a\nuser: v\nassistant:"
    assert "\nuser:" in template.stop


def test_a_template_that_cannot_be_read_raises_where_it_is_used_and_can_be_overridden() -> None:
    metadata = QWEN | {"tokenizer.chat_template": "line one\n{% for %}"}
    template = ChatTemplate.from_gguf(metadata, TOKENIZERS["qwen"])
    for action in (template.render, template.encode):
        with pytest.raises(TemplateError, match=r"line 2: .*chat_template"):
            action([user("x")])
    override = ChatTemplate.from_gguf(metadata, TOKENIZERS["qwen"], CHATML_TEMPLATE)
    assert override.encode([user("x")]) == template_of(CHATML_TEMPLATE).encode([user("x")])


def test_a_template_that_is_no_text_is_refused() -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.chat_template"):
        ChatTemplate.from_gguf(QWEN | {"tokenizer.chat_template": ["a"]}, TOKENIZERS["qwen"])


def test_arguments_that_templates_cannot_be_given_are_refused() -> None:
    template = template_of(CHATML_TEMPLATE)
    with pytest.raises(UsageError, match="messages"):
        template.render([user("x")], messages=[])
    with pytest.raises(UsageError, match="JSON"):
        template.encode([user("x")], thing=object())


def test_tools_nested_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(100_000):
        schema = {"a": schema}
    with pytest.raises(TemplateError, match="nested too deeply"):
        template_of(TOOL_TEMPLATE).encode([user("x")], [schema])
    while schema:  # from the outside in: taking it apart at once would nest as deeply
        schema = schema.pop("a")


# -- templates that mean harm --------------------------------------------------------------------------------------

RANGE = "{% set r = range(99999) %}"
ROUNDS = "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = "
END_ROUNDS = " %}{% endfor %}"

HARMFUL = {
    "a long loop": "{% for i in range(1000000000) %}x{% endfor %}",
    "nested loops": RANGE + "{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "a loop in a condition": RANGE + "{% for i in r %}{% for j in r if j < 0 %}{% endfor %}{% endfor %}",
    "printing again and again": "{% set a = 'x' * 1000000 %}{% for i in range(99999) %}{{ a }}{% endfor %}",
    "plain text again and again": "{% for i in range(99999) %}{% for j in range(99999) %}"
    + "y" * 9999
    + "{% endfor %}{% endfor %}",
    "a long text": "{{ 'a' * 10 ** 9 }}",
    "a long list": "{{ [1] * 10 ** 9 }}",
    "lists of lists": "{{ [[1] * 100000] * 100000 }}",
    "a large number": "{{ 2 ** (10 ** 10) }}",
    "a number made of text": "{% set a = ('f' * 1000000) | int(base=16) %}",
    "a number rounded far": "{{ 5 | round(-1000000000) }}",
    "padding with %": "{{ '%1000000000d' % 1 }}",
    "padding with % and a name": "{{ '%(a%b)1000000000d' % {'a%b': 1} }}",
    "padding with * in %": "{{ '%*d' % (1000000000, 1) }}",
    "padding with the filter format": "{{ '%1000000000d' | format(1) }}",
    "padding with format": "{{ '{:>1000000000}'.format(1) }}",
    "padding with a field in format": "{{ '{:{w[0]}}'.format(1, w=[1000000000]) }}",
    "padding with format_map": "{{ '{a:>1000000000}'.format_map({'a': 1}) }}",
    "many fields of format": "{{ ('{0}' * 100000).format('x' * 1000000) }}",
    "many fields of %": "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "the filter center": "{{ 'a' | center(1000000000) }}",
    "the filter indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "the filter batch": "{{ ['a'] * 90000 | map('batch', 10000000, 'x') | map('list') | list }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "the filter replace": "{{ ('a' * 1000000) | replace('', 'b' * 1000000) }}",
    "join": "{{ ('a' * 100000).join(['b'] * 100000) }}",
    "the filter join": "{{ (['b'] * 100000) | join('a' * 100000) }}",
    "JSON with deep lines": "{{ range(100000) | list | tojson(indent=10000) }}",
    "JSON with long separators": "{{ range(100000) | list | tojson(separators=('a' * 100000, ':')) }}",
    "doubling with ~": ROUNDS + "ns.x ~ ns.x" + END_ROUNDS,
    "doubling with +": ROUNDS + "ns.x + ns.x" + END_ROUNDS,
    "doubling lists": ROUNDS + "[ns.x, ns.x]" + END_ROUNDS,
    "doubling tuples": ROUNDS + "(ns.x, ns.x)" + END_ROUNDS,
    "doubling dicts": ROUNDS + "{1: ns.x, 2: ns.x}" + END_ROUNDS,
    "slices": "{% set a = 'a' * 4000000 %}" + "".join(f"{{% set a{i} = a[1:] %}}" for i in range(200)),
    "macros that call themselves": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "macros that branch": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "blocks that call themselves": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "a text of its own length squared": "{{ '%(' * 2000000 % 1 }}",
    "parentheses": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "a long sum": "{{ " + "1 + " * 5000 + "1 }}",
    "blocks in blocks": "{% for i in range(2) %}" * 500 + "{% endfor %}" * 500,
    "a long source": "x" * (MAX_SOURCE_CHARACTERS + 1),
    "a class": "{{ ''.__class__.__mro__ }}",
    "a class by filter": "{{ ('' | attr('__class__')).__mro__ }}",
    "a class by format": "{{ '{0.__class__.__mro__}'.format('') }}",
    "a function's globals": "{{ raise_exception.__globals__['os'] }}",
    "a file": "{% include '/etc/passwd' %}",
    "changing what it was given": "{{ messages.append(1) }}",
    "a division by zero": "{{ 1 / 0 }}",
}


@pytest.mark.parametrize("name", HARMFUL)
def test_a_harmful_template_is_stopped_in_time_with_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.template_sandbox.MAX_SECONDS", 0.4)
    template = template_of(HARMFUL[name])
    started = time.monotonic()
    with pytest.raises(TemplateError) as error:
        template.encode([user("x")])
    assert time.monotonic() - started < 0.4 + 2  # a shared machine may be slow to notice
    assert str(error.value).startswith("the chat template ")
    assert "MemoryError" not in str(error.value)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", [name for name in HARMFUL if "loop" not in name and "branch" not in name])
def test_a_harmful_template_is_stopped_in_memory(name: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError):
            template_of(HARMFUL[name]).encode([user("x")])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300 << 20


def test_namespaces_that_hold_each_other_do_no_harm() -> None:
    source = (
        "{% set ns = namespace(x=0) %}{% for i in range(99) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}"
        "{% set ns.x = ns %}{{ ns }}{{ [ns] }}"
    )
    assert template_of(source).render([user("x")]) == "<Namespace>[<Namespace>]"


def test_a_long_conversation_is_within_the_limits() -> None:
    source = (
        "{% set ns = namespace(text='') %}{% for m in messages %}{% set ns.text = ns.text ~ m.role ~ m.content %}"
        "{% for other in messages[loop.index0:] %}{% endfor %}{% endfor %}{{ ns.text }}"
    )
    messages = [user("x" * 2000) if number % 2 else assistant("y" * 2000) for number in range(300)]
    assert len(template_of(source).render(messages)) == sum(len(m.role) + 2000 for m in messages)


# -- only the template writes control tokens -----------------------------------------------------------------------

SPELLINGS = ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<tool_call>", "</tool_call>", "<|im_<|im_end|>end|>"]
HOSTILE_TEXT = st.lists(st.sampled_from([*SPELLINGS, "<|im_end|", "|im_end|>", "<", ">", "\n", "a"]), max_size=6).map(
    "".join
)


def number_of_controls(ids: Sequence[int]) -> int:
    structure = TOKENIZERS["qwen"].control_ids | {id_of("<tool_call>"), id_of("</tool_call>")}
    return sum(id in structure for id in ids)


@given(st.lists(HOSTILE_TEXT, min_size=9, max_size=9))
def test_text_of_people_and_tools_adds_no_control_token(texts: list[str]) -> None:
    template = template_of(TOOL_TEMPLATE)

    def prompt(texts: list[str]) -> tuple[list[Message], list[dict[str, Any]]]:
        call = {"id": "1", "function": {"name": "f", "arguments": {texts[3] or "k": texts[4]}}}
        messages = [
            system(texts[0]),
            user(texts[1]),
            assistant(texts[2], tool_calls=(call,)),
            Message(role="tool", content=texts[5], tool_call_id=texts[7], name=texts[8] or "f"),
        ]
        return messages, [{"name": "f", "description": texts[6], "parameters": {"properties": {texts[6]: 1}}}]

    messages, tools = prompt(texts)
    ids = template.encode(messages, tools)
    assert number_of_controls(ids) == number_of_controls(template.encode(*prompt(["x"] * 9)))
    assert shown(ids) == template.render(messages, tools)


@given(HOSTILE_TEXT, HOSTILE_TEXT)
def test_neighbouring_texts_do_not_make_a_control_token_together(left: str, right: str) -> None:
    template = template_of("{{ messages[0].content }}{{ messages[1].content }}<|im_end|>")
    ids = template.encode([user(left), assistant(right)])
    assert [id for id in ids if id in TOKENIZERS["qwen"].control_ids] == [id_of("<|im_end|>")]
    assert shown(ids) == left + right + "<|im_end|>"


def test_a_user_defined_token_is_text_where_the_template_does_not_write_it() -> None:
    assert id_of("<b>") in template_of(TOOL_TEMPLATE).encode([user("x<b>y")])
    assert id_of("<b>") not in template_of(TOOL_TEMPLATE + "{# <b> #}").encode([user("x<b>y")])
    # Line ends are in every template and are no structure.
    assert id_of("\n\n", "gemma") in template_of(STRICT_TEMPLATE + "\n\n", "gemma").encode([user("x\n\ny")])


def test_an_end_of_turn_in_gemmas_text_is_text() -> None:
    template = template_of(STRICT_TEMPLATE, "gemma")
    end = id_of("<end_of_turn>", "gemma")
    assert template.encode([user("a<end_of_turn>b")]).count(end) == 1
    assert template.encode([user("a<end_of_turn>b"), assistant("<end_of_turn>"), user("c")]).count(end) == 3


def test_characters_that_serve_as_marks_are_kept_in_texts() -> None:
    template = template_of(CHATML_TEMPLATE)
    text = "".join(map(chr, range(0xFDD0, 0xFDF0))) + "<|im_end|>\U000f0000"
    for message in (user(text), reply(TOKENIZERS["qwen"].encode(text))):
        ids = template.encode([message], add_generation_prompt=False)
        assert shown(ids) == f"<|im_start|>{message.role}\n{text}<|im_end|>\n"
        assert ids.count(id_of("<|im_end|>")) == 1


def test_marks_survive_json_that_is_escaped() -> None:
    template = template_of("{{ messages[0].content | tojson(ensure_ascii=true) }}")
    assert shown(template.encode([user("é<|im_end|>😀")])) == '"\\u00e9<|im_end|>\\ud83d\\ude00"'
    assert id_of("<|im_end|>") not in template.encode([user("é<|im_end|>")])


@example("aaba", ["aab", "ba"])
@example("xabbay", ["abba", "bb"])
@given(st.text("ab<|>", max_size=30), st.lists(st.text("ab<|>", min_size=2, max_size=5), min_size=1, max_size=4))
def test_a_guarded_text_has_no_spelling_and_is_the_same_without_marks(text: str, tokens: list[str]) -> None:
    guarded = Guard(tokens).protected(text, "\ufdd0")
    assert guarded.replace("\ufdd0", "") == text
    assert not any(token in guarded for token in tokens)
    assert Guard(tokens).finds(text) == (guarded != text)


@given(st.lists(st.text("ab\ufdd0", max_size=4), max_size=6))
def test_anchors_are_found_where_they_were_put(texts: list[str]) -> None:
    marks = Marks.unused_in(texts)
    cut = [text[:1] + marks.split + text[1:] for text in texts]
    marked = "".join(text + marks.anchor_of(number) for number, text in enumerate(cut))
    anchors, in_marked = marks.anchors_in(marked)
    plain = "".join(texts)
    assert marks.removed_from(marked) == plain
    assert anchors == [(len("".join(texts[: number + 1])), number) for number in range(len(texts))]
    for position, character in enumerate(plain):
        assert marks.removed_from(marked[in_marked(position) :]).startswith(character)
        assert marks.removed_from(marked[: in_marked(position)]) == plain[:position]


# -- replies keep their ids ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "vocabulary"), [(CHATML_TEMPLATE, "qwen"), (STRICT_TEMPLATE, "gemma"), (LLAMA2_TEMPLATE, "llama2")]
)
def test_the_next_prompt_starts_with_this_prompt_and_the_ids_of_its_reply(source: str, vocabulary: str) -> None:
    template, tokenizer = template_of(source, vocabulary), TOKENIZERS[vocabulary]
    ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=12)

    @given(st.lists(ids, min_size=1, max_size=3), st.text(max_size=8))
    def check(replies: list[list[int]], text: str) -> None:
        messages = [user("hello " + text)]
        for number, ids in enumerate(replies):
            prompt = template.encode(messages)
            message = reply(ids, vocabulary)
            # Gemma's template trims what was said; a reply that trimming changes is another text.
            assume(message.content == message.content.strip() != "")
            messages += [message, user(f"turn {number}")]
            assert template.encode(messages)[: len(prompt) + len(ids)] == prompt + ids

    check()


def test_a_reply_whose_text_is_not_that_of_its_ids_is_tokenized() -> None:
    template = template_of(CHATML_TEMPLATE)
    other = TOKENIZERS["qwen"].encode("something else")
    for ids in (other, [10**6], [-1]):
        assert template.encode([user("a"), assistant("edited", ids)]) == template.encode(
            [user("a"), assistant("edited")]
        )


def test_a_reply_that_the_template_trims_keeps_its_ids_as_they_were() -> None:
    template = template_of("{% for m in messages %}{{ '<|im_start|>' + m.content | trim + '<|im_end|>' }}{% endfor %}")
    ids = [id_of(character) for character in "hello"] + [id_of("Ġ")]
    assert template.encode([reply(ids)]) == [id_of("<|im_start|>"), *ids, id_of("<|im_end|>")]


def test_a_reply_that_the_template_drops_is_dropped() -> None:
    template = template_of("{{ messages[-1].content }}")
    messages = [user("a"), reply(TOKENIZERS["qwen"].encode("said")), user("last")]
    assert shown(template.encode(messages)) == "last"


def test_a_call_keeps_its_ids_although_the_template_writes_it_anew() -> None:
    template, tokenizer = template_of(TOOL_TEMPLATE), TOKENIZERS["qwen"]
    call = {"id": "1", "function": {"name": "f", "arguments": {"path": "notes.txt"}}}
    text = '<tool_call>\n{"name": "f", "arguments": {"path": "notes.txt"}}\n</tool_call>'
    for said in ("", "Let me look. "):
        # Character by character, as no tokenizer would do it.
        ids = [
            id for part in (*said, *text[len("<tool_call>") : -len("</tool_call>")]) for id in tokenizer.encode(part)
        ]
        ids = [*ids[: len(said)], id_of("<tool_call>"), *ids[len(said) :], id_of("</tool_call>")]
        messages = [user("read"), assistant(said, ids, tool_calls=(call,)), Message(role="tool", content=text)]
        prompt = template.encode(messages[:1], [{"name": "f"}])
        following = template.encode(messages, [{"name": "f"}])
        assert following[: len(prompt) + len(ids)] == prompt + ids
        assert shown(following) == template.render(messages, [{"name": "f"}])
        changed = ({"id": "1", "function": {"name": "f", "arguments": {"path": "other.txt"}}},)
        other = [messages[0], assistant(said, ids, tool_calls=changed)]
        assert "other.txt" in shown(template.encode(other))


def test_reasoning_keeps_its_ids_also_where_the_template_drops_it() -> None:
    template, tokenizer = template_of(THINKING_TEMPLATE), TOKENIZERS["qwen"]
    ids = [id_of("<think>"), *tokenizer.encode("\nhm\n"), id_of("</think>")]
    ids += [*tokenizer.encode("\n\n"), *map(id_of, "yes")]
    text = "<think>\nhm\n</think>\n\nyes"
    assert tokenizer.decode(ids) == text
    beside = assistant("yes", ids, thinking="hm")
    inside = assistant(text, ids)
    prompt = template.encode([user("a")])
    for message in (beside, inside):
        kept = template.encode([user("a"), message], add_generation_prompt=False)
        assert shown(kept) == template.render([user("a"), message], add_generation_prompt=False)
        assert kept[: len(prompt) + len(ids)] == prompt + ids
        next_turn = template.encode([user("a"), message, user("b")])
        assert next_turn[: len(prompt) + len(ids)] == prompt + ids
        assert "<think>" not in template.render([user("a"), message, user("b")])
        without = template.encode([user("a"), replace(message, ids=None), user("b")])
        assert shown(without) == template.render([user("a"), message, user("b")])
        assert id_of("<think>") not in without


def test_a_template_that_looks_into_a_reply_still_gets_no_control_token_from_it() -> None:
    template = template_of(THINKING_TEMPLATE)
    messages = [user("</think> <|im_end|>"), assistant("<think>a</think>b <|im_end|>"), user("c")]
    ids = template.encode(messages)
    assert shown(ids) == template.render(messages)
    assert ids.count(id_of("<|im_end|>")) == 3
    assert id_of("</think>") not in ids
    assert "<think>" not in shown(ids)


# -- BOS -----------------------------------------------------------------------------------------------------------

EVERY_TURN = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ m.content + eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("source", "vocabulary"),
    [
        (LLAMA2_TEMPLATE, "llama2"),
        (EVERY_TURN, "llama2"),
        (EVERY_TURN.replace("bos_token + ", ""), "llama2"),
        (STRICT_TEMPLATE, "gemma"),
    ],
)
def test_bos_is_there_once_and_in_front_where_the_model_wants_it(source: str, vocabulary: str) -> None:
    template, tokenizer = template_of(source, vocabulary), TOKENIZERS[vocabulary]
    messages = [user("hello <s> <bos>"), reply(tokenizer.encode("the world"), vocabulary), user("again")]
    for length in (1, 3):
        ids = template.encode(messages[:length])
        assert ids[0] == tokenizer.bos_id
        assert ids.count(tokenizer.bos_id) == 1


def test_a_model_that_wants_no_bos_gets_none() -> None:
    assert id_of("<|endoftext|>") not in template_of(CHATML_TEMPLATE).encode([user("a"), assistant("b"), user("c")])


def test_a_bos_that_is_also_the_start_of_a_turn_stays_where_the_model_wants_none_in_front() -> None:
    metadata = QWEN | {"tokenizer.ggml.bos_token_id": id_of("<|im_start|>")}
    ids = ChatTemplate.from_gguf(metadata, Tokenizer.from_gguf(metadata)).encode([user("a"), assistant("b"), user("c")])
    assert ids.count(id_of("<|im_start|>")) == 4


def test_text_that_follows_a_kept_reply_gets_no_space_of_its_own() -> None:
    tokenizer = TOKENIZERS["llama2"]
    said = reply(tokenizer.encode("hello"), "llama2")
    follows = template_of("{% for m in messages %}{{ m.content }}the{% endfor %}", "llama2").encode([said])
    assert shown(follows, "llama2") == "<s> hellothe"
    control = template_of("{% for m in messages %}{{ m.content }}</s>the{% endfor %}", "llama2").encode([said])
    assert shown(control, "llama2") == "<s> hello</s> the"


def test_replies_never_share_a_stretch_of_text() -> None:
    template = template_of("{% for m in messages %}{{ m.content }}{% endfor %}")
    a, b = id_of("a"), id_of("b")
    # The second says that its ids are more than its text.
    assert shown(template.encode([assistant("a", [a]), assistant("b", [a, b])])) == "ab"
