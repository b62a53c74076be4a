"""Grammars: which texts a schema lets through, which schemas are refused, and how a matcher goes forth and back.

The judge of what is valid is the package `jsonschema`; ours only has to be right.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jsonschema
import pytest
from call_templates import FAMILIES
from grammar_texts import accepts
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_vocab import spm_metadata

from engine.errors import SchemaError, UsageError
from engine.grammar import MAX_DIGITS, Grammar, GrammarCompiler, JsonStyle, check_schema
from engine.json_schema import MAX_DEPTH, checked_schema
from engine.tokenizer import Tokenizer

TOKENIZERS = {"bpe": FAMILIES["qwen2.5"].tokenizer, "spm": Tokenizer.from_gguf(spm_metadata(gemma=True))}
COMPILERS = {name: GrammarCompiler(tokenizer) for name, tokenizer in TOKENIZERS.items()}

ODD = {
    "empty": {"type": "object", "properties": {}},
    "kind": {
        "type": "object",
        "properties": {
            "kind": {"anyOf": [{"const": "decision"}, {"enum": ["fact", "note"]}]},
            "n": {"type": ["integer", "null"]},
        },
        "required": ["kind", "n"],
        "additionalProperties": False,
    },
    "nothing": {"type": "array", "maxItems": 0},
    "at least three": {"type": "integer", "minimum": 3},
    "typed": {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": True},
    "long": {"type": "string", "maxLength": 5000},
    "names": {
        "type": "object",
        "properties": {name: {"type": "integer"} for name in ("a.b", "x-y", "名前", 'q"q')},
        "required": ["a.b", "x-y", "名前", 'q"q'],
        "additionalProperties": False,
    },
}


def grammar(schema: Mapping[str, Any] | bool, vocabulary: str = "bpe") -> Grammar:
    return COMPILERS[vocabulary].json(schema)


def walk(schema: Mapping[str, Any] | bool, seed: int, vocabulary: str = "bpe", limit: int = 400) -> str | None:
    """A random text of the schema, each token drawn from those allowed and the end preferred; None: it got too long."""
    matcher, rng = grammar(schema, vocabulary).matcher(), random.Random(seed)
    assert matcher is not None
    tokenizer, ids = TOKENIZERS[vocabulary], list[int]()
    pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
    while not matcher.must_end:
        forced = matcher.forced()
        allowed = matcher.allowed().tolist()
        if forced:
            assert forced[0] in allowed
            assert not matcher.may_end
        ends = tokenizer.end_ids.intersection(allowed)
        assert bool(ends) == matcher.may_end
        if ends and rng.random() < 0.5:
            break
        # Quotes and brackets end things: without a preference most strings would never end.
        closing = [id for id in allowed if pieces[id][:1] in b'"]}' and pieces[id]]
        others = [id for id in allowed if id not in tokenizer.end_ids]
        token = rng.choice(closing) if closing and rng.random() < 0.3 else rng.choice(others)
        run = forced or [token]
        assert matcher.advance(run) == len(run)
        ids += run
        if len(ids) > limit:
            return None
    return tokenizer.decode(ids)


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", TOKENIZERS)
@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ("at least three", ["3", "10"], ["01", "2", "-5", "3.0", "", "3 "]),
        ("nothing", ["[]"], ["[1]", "[ ]"]),
        ("typed", ["{}", '{"a": 1}', '{"b": "x"}'], ['{"a": "wrong"}', "{" + " " * 200, r'{"\u0061": "wrong"}']),
        ("empty", ["{}"], ["[]", "{ }"]),
        ("kind", ['{"kind": "note", "n": null}', '{"kind": "decision", "n": 4}'], [r'{"kind": "\"note\"", "n": 4}']),
        ("long", ['"' + "a" * 5000 + '"', '"日本"'], ['"' + "a" * 5001 + '"', "'a'"]),
        ("names", ['{"a.b": 1, "x-y": 2, "名前": 3, "q\\"q": 4}'], ['{"a.b": 1}']),
    ],
)
def test_schemas_let_through_what_is_valid_and_nothing_else(
    vocabulary: str, schema: str, good: Sequence[str], bad: Sequence[str]
) -> None:
    found = grammar(ODD[schema], vocabulary)
    for text in good:
        jsonschema.validate(json.loads(text), ODD[schema])
        assert accepts(found, text), text
    assert not [text for text in bad if accepts(found, text)]


@pytest.mark.parametrize("schema", [{}, True, {"title": "anything", "default": 3, "x-of-ours": [1]}])
def test_no_rule_means_any_json(schema: Mapping[str, Any] | bool) -> None:
    found = grammar(schema)
    assert all(accepts(found, text) for text in ["1", "null", '"x"', '{"a": [1, {"b": false}]}'])
    assert not any(accepts(found, text) for text in ["", "x", "{", "01", "1 2"])


def test_separators_are_those_asked_for() -> None:
    compact = COMPILERS["bpe"].json({}, style=JsonStyle(",", ":"))
    assert accepts(compact, '{"a":[1,2]}')
    assert not accepts(compact, '{"a": [1, 2]}')


def test_a_tree_may_refer_to_itself() -> None:
    node = {"type": "object", "properties": {"v": {"type": "integer"}, "kids": {"items": {"$ref": "#/$defs/node"}}}}
    tree = grammar({"$defs": {"node": {**node, "required": ["v"]}}, "$ref": "#/$defs/node"})
    assert accepts(tree, '{"v": 1, "kids": [{"v": 2, "kids": []}, {"v": 3}]}')
    assert not accepts(tree, '{"v": 1, "kids": [{"kids": []}]}')


_NAMES = st.sampled_from(["a", "b c", "名", "x-y", 'q"q', "the"])
_LEAVES = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.builds(
        lambda low, size: {"type": "integer", "minimum": low, "maximum": low + size},
        st.integers(-99, 99),
        st.integers(0, 300),
    ),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "maximum": low + 5}, st.integers(-9, 9)),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 3),
        st.integers(0, 9),
    ),
    st.sampled_from(
        [
            {"type": "string", "pattern": "^[a-c]{1,4}$"},
            {"type": "string", "pattern": "b"},
            {"type": "string", "format": "date"},
        ]
    ),
    st.lists(
        st.one_of(
            st.integers(-(2**53), 2**53),
            st.text(st.characters(exclude_categories=["C"]), max_size=4),
            st.none(),
        ),
        min_size=1,
        max_size=4,
    ).map(lambda v: {"enum": v}),
    st.sampled_from(["decision", 3, None, [1, {"a": 2}], {"k": [True]}]).map(lambda value: {"const": value}),
)


def _objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def build(properties: dict[str, Any], count: int, closed: bool | dict[str, Any]) -> dict[str, Any]:
        return {
            "type": "object",
            "properties": properties,
            "required": list(properties)[:count],
            "additionalProperties": closed,
        }

    return st.builds(
        build,
        st.dictionaries(_NAMES, inner, max_size=4),
        st.integers(0, 4),
        st.sampled_from([False, False, {"type": "integer"}]),
    )


SCHEMAS = st.recursive(
    _LEAVES,
    lambda inner: st.one_of(
        _objects(inner),
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 2),
            st.integers(0, 2),
        ),
        st.lists(inner, min_size=1, max_size=3).map(lambda several: {"anyOf": several}),
    ),
    max_leaves=6,
)


@settings(max_examples=150, deadline=None)
@given(schema=SCHEMAS, seed=st.integers(0, 99), vocabulary=st.sampled_from(["bpe", "spm"]))
def test_whatever_is_drawn_from_what_is_allowed_is_valid(schema: dict[str, Any], seed: int, vocabulary: str) -> None:
    text = walk(schema, seed, vocabulary)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)
        assert accepts(grammar(schema, vocabulary), text)


@pytest.mark.parametrize("schema", [{"enum": [2**53 - 1, 2**53]}, {"const": -(2**53)}])
def test_a_large_number_that_is_said_is_the_one_of_the_schema(schema: dict[str, Any]) -> None:
    for seed in range(20):
        text = walk(schema, seed, "bpe")
        if text is not None:
            jsonschema.validate(json.loads(text), schema)


# -- refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2**53 + 1, 2**60, -(2**53) - 1, 10**30, 10**400])
@pytest.mark.parametrize("word", ["const", "enum"])
def test_a_number_that_would_be_rounded_is_refused(word: str, number: int) -> None:
    for value in ([number], [{"a": [number]}]):
        with pytest.raises(SchemaError, match="more digits than can be followed"):
            grammar({"properties": {"n": {word: value}}})
    assert grammar({"type": "integer", "maximum": 2**63 - 1})


@pytest.mark.parametrize(
    "keyword",
    [
        *("not", "if", "then", "else", "contains", "minContains", "maxContains", "propertyNames", "dependentRequired"),
        *("dependentSchemas", "dependencies", "unevaluatedProperties", "unevaluatedItems", "additionalItems"),
        *("$dynamicRef", "$recursiveRef", "uniqueItems", "disallow", "extends", "divisibleBy"),
    ],
)
def test_a_keyword_that_is_not_followed_is_named_with_its_place(keyword: str) -> None:
    schema = {"type": "object", "properties": {"list": {"items": {keyword: True}}}}
    with pytest.raises(
        SchemaError, match=rf'"{keyword.replace("$", ".")}" is not supported \(at /properties/list/items\)'
    ):
        grammar(schema)
    assert issubclass(SchemaError, UsageError)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        (
            {"properties": {"a": {"type": "string", "pattern": "(unclosed"}}},
            r'"pattern" "\(unclosed" cannot be followed: unclosed group \(at /properties/a\)',
        ),
        ({"type": "string", "pattern": "^(?=a)b$"}, "look-around"),
        ({"patternProperties": {"^(?=a)b$": {"type": "integer"}}}, "look-around"),
        ({"type": ["string", "nul"]}, '"type" "nul" is unknown; choose from: string, number'),
        ({"$ref": "#/$defs/missing"}, "missing"),
        ({"$ref": "https://example.org/x.json"}, "outside of the schema"),
        ({"$ref": "#"}, "nothing is valid"),
        (False, "nothing is valid"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "incompatible types"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "thing"}, "thing"),
        ({"type": "string", "format": "path"}, '"format" "path" is not supported'),
        ({"const": "a\x01b"}, "control character"),
        ({"const": "\ud800"}, "surrogate"),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"type": "object", "properties": []}, "properties"),
        ({"items": [{"type": "integer"}]}, "items"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"enum": [float("inf")]}, "not a JSON number"),
        ({"enum": [{1}]}, "a set"),
        ({1: 2}, "not a text"),
        ([], "a list"),
        (nested(5000), f"more than {MAX_DEPTH} levels"),
        ({"properties": {f"p{i}": {} for i in range(1001)}}, "more than 1,000 properties"),
        ({"anyOf": [{"anyOf": [{}] * 100}] * 100}, "more than 5,000 schemas"),
        ({"enum": ["x" * 600_000]}, "600"),
    ],
)
def test_what_cannot_be_followed_is_refused_in_a_second_with_a_reason(schema: Any, reason: str) -> None:
    started = time.process_time()
    with pytest.raises(SchemaError, match=reason) as error:
        grammar(schema)
    assert time.process_time() - started < 1
    assert len(str(error.value).splitlines()) == 1
    if schema != {"$ref": "#"}:  # that no text ends is seen by who draws tokens
        with pytest.raises(SchemaError) as without_a_model:
            check_schema(schema)
        assert str(without_a_model.value) == str(error.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": r"^a\!$"},
        {"anyOf": [{"const": f"v{i}"} for i in range(300)]},
        {"anyOf": [nested(2) | {"title": str(i)} for i in range(300)]},
        {"enum": [f"value number {i}" for i in range(15_000)]},
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
        {"type": "string", "pattern": "(a{1000}){1000}"},
        {"type": "string", "pattern": "(x+x+)+y", "maxLength": 5000},
        nested(18),
    ],
)
def test_large_schemas_compile_within_a_second(schema: dict[str, Any]) -> None:
    started = time.process_time()
    matcher = grammar(schema).matcher()
    assert matcher is not None
    assert len(matcher.allowed())
    assert time.process_time() - started < 1


def test_a_format_says_nothing_about_numbers() -> None:
    assert accepts(grammar({"type": "integer", "format": "int32"}), "5")


def test_settings_of_the_parser_cannot_come_with_a_schema() -> None:
    lenient = {"x-guidance": {"lenient": True, "whitespace_flexible": True}, "type": "object", "properties": {}}
    assert not accepts(grammar(lenient), "{   }")


def test_a_schema_that_is_checked_is_left_as_it_is() -> None:
    schema = {"type": "array", "uniqueItems": False, "format": "int32"}
    before = json.dumps(schema)
    assert checked_schema(schema, "it") == {"type": "array"}
    assert json.dumps(schema) == before


# -- going forth and back ----------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(["kind", "names", "typed"]), data=st.data())
def test_what_advanced_can_be_taken_back(seed: int, name: str, data: st.DataObject) -> None:
    text = walk(ODD[name], seed)
    if text is None:
        return
    ids = TOKENIZERS["bpe"].encode(text)
    matcher, states = grammar(ODD[name]).matcher(), []
    assert matcher is not None
    for id in ids:
        states.append((matcher.forced(), matcher.allowed().tolist(), matcher.may_end))
        assert matcher.advance([id]) == 1
    back = data.draw(st.integers(0, len(ids)))
    matcher.rewind(back)
    for id, state in zip(ids[len(ids) - back :], states[len(ids) - back :]):
        assert (matcher.forced(), matcher.allowed().tolist(), matcher.may_end) == state
        assert matcher.advance([id]) == 1
    assert matcher.may_end


def test_a_token_that_is_not_allowed_is_not_taken_in_and_does_no_harm() -> None:
    tokenizer, matcher = TOKENIZERS["bpe"], grammar(ODD["kind"]).matcher()
    assert matcher is not None
    right, wrong = tokenizer.encode('{"kind": "no'), tokenizer.encode("x")
    assert matcher.advance([*right, *wrong]) == len(right)
    rest = tokenizer.encode('te", "n": null}')
    assert matcher.advance(rest) == len(rest)
    assert matcher.must_end


def test_no_control_token_is_text() -> None:
    tokenizer, matcher = TOKENIZERS["bpe"], grammar({"type": "string"}).matcher()
    assert matcher is not None
    matcher.advance(tokenizer.encode('"a'))
    allowed = set(matcher.allowed().tolist())
    assert not allowed & tokenizer.control_ids
    assert set(tokenizer.encode("b日")[:2]) <= allowed


def test_an_end_token_is_allowed_exactly_where_the_text_is_whole() -> None:
    tokenizer, matcher = TOKENIZERS["bpe"], grammar({"type": "integer", "minimum": 3}).matcher()
    assert matcher is not None
    for digit, whole in (("1", False), ("2", True), ("0", True)):
        matcher.advance(tokenizer.encode(digit))
        assert bool(tokenizer.end_ids.intersection(matcher.allowed().tolist())) is whole is matcher.may_end
        assert not matcher.must_end


def test_numbers_end_and_texts_of_digits_do_not() -> None:
    tokenizer = TOKENIZERS["bpe"]

    def digits(schema: Any, start: str, limit: int = 60) -> int:
        """How many digits in a row can be drawn."""
        matcher, count = grammar(schema).matcher(), 0
        assert matcher is not None
        matcher.advance(tokenizer.encode(start))
        (seven,) = tokenizer.encode("7")
        while count < limit and seven in matcher.allowed():
            assert matcher.advance([seven]) == 1
            count += 1
        matcher.rewind(3)
        assert seven in matcher.allowed()
        return count

    assert digits({"type": "integer"}, "") == MAX_DIGITS
    assert digits({"type": "number"}, "0.") == MAX_DIGITS
    assert digits({"type": "number"}, "0.5e") == MAX_DIGITS
    assert digits({"type": "string"}, '"') == 60
    assert digits({"type": "string", "pattern": "^[0-9]{50}$"}, '"') == 50
    assert accepts(grammar({"type": "number"}), "7" * 99)


def test_a_text_may_be_gone_on_with_from_any_byte() -> None:
    found = grammar({"const": "é日"})
    assert found.matcher('"é'.encode()[:2]) is not None
    assert found.matcher(b'"x') is None
    matcher = found.matcher('"é'.encode())
    assert matcher is not None
    assert TOKENIZERS["bpe"].decode(matcher.forced()) == '日"'
