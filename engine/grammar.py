"""Grammars that a reply is held to: which tokens may come next, and which must.

llguidance (https://github.com/guidance-ai/llguidance) parses; here is what it is given and what is asked of it. A
`GrammarCompiler` knows the vocabulary, a `Grammar` is what a text must be, a `Matcher` is where a reply stands in it.

- Control tokens are no text: inside a JSON string nothing can close a turn. A grammar names the ones it wants.
- JSON has one spelling: fixed separators, no other whitespace, and no `\\u` escapes. So a reply cannot run on in
  blanks, no second spelling of a property's name gets around its schema, and a call reads as the template writes it.
- `advance` has an inverse, `rewind`; nothing but tokens that are part of the reply stays in a matcher.
"""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import EngineError, SchemaError
from engine.json_schema import checked_schema

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    from engine.tokenizer import Tokenizer


MAX_DIGITS = 24
"""Of a number in a row: more than any format holds."""


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """What stands between items, and between a key and its value."""

    item_separator: str = ", "
    key_separator: str = ": "

    def guidance(self) -> dict[str, Any]:
        return {
            "whitespace_flexible": False,
            "item_separator": as_pattern(self.item_separator),
            "key_separator": as_pattern(self.key_separator),
            "json_allowed_escapes": 'nrbtf\\"',
        }


class TokenBytes:
    """What grammars need to know of the tokens of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._pieces = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
        self.begins_with_digit = np.array([piece[:1].isdigit() for piece in self._pieces])
        self.ids = {piece[0]: id for id, piece in enumerate(self._pieces) if len(piece) == 1}
        """Byte -> the token that is just that."""
        self.letter = self.ids.get(ord("x"), 0)
        """Which no number has."""

    def digits_after(self, count: int, id: int) -> int:
        """How many digits a text ends with, of which `count` stand before this token."""
        piece = self._pieces[id]
        rest = len(piece.rstrip(b"0123456789"))
        return count + len(piece) if not rest else len(piece) - rest


class Matcher:
    """Where a reply stands in a grammar. Raises EngineError where the parser gives up."""

    def __init__(self, matcher: LLMatcher, bytes_of: TokenBytes) -> None:
        self._matcher = matcher
        self._bytes_of = bytes_of
        self._num_digits = [0]  # at the end of the text, after each token

    def allowed(self) -> NDArray[np.intp]:
        """Ids that may come next, ascending; an end token is among them where the text may end.

        A number of `MAX_DIGITS` digits has no more: small models write digits for ever.
        """
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        allowed = np.unpackbits(mask, count=len(self._bytes_of.begins_with_digit), bitorder="little").view(np.bool_)
        if self._num_digits[-1] >= MAX_DIGITS and not allowed[self._bytes_of.letter]:  # else it is a text
            fewer = allowed & ~self._bytes_of.begins_with_digit
            allowed = fewer if fewer.any() else allowed
        return np.flatnonzero(allowed)

    def forced(self) -> list[int]:
        """Ids that must come next, as the tokenizer would write their text; often none."""
        ids = list(self._matcher.compute_ff_tokens())
        self._check()
        return ids

    def advance(self, ids: Sequence[int]) -> int:
        """Take in ids up to the first that the grammar does not allow; how many were taken in."""
        count = self._matcher.try_consume_tokens(list(ids))
        self._check()
        for id in ids[:count]:
            self._num_digits.append(self._bytes_of.digits_after(self._num_digits[-1], id))
        return count

    def rewind(self, count: int) -> None:
        """Take back the last `count` ids."""
        if count and not self._matcher.rollback(count):
            raise EngineError(f"the grammar cannot take back {count} tokens")
        del self._num_digits[len(self._num_digits) - count :]

    @property
    def may_end(self) -> bool:
        """What has been taken in is a whole text of the grammar."""
        return bool(self._matcher.is_accepting())

    @property
    def must_end(self) -> bool:
        """It is whole, and nothing can follow."""
        return bool(self._matcher.is_stopped()) and self.may_end

    def _check(self) -> None:
        if self._matcher.is_error():
            raise EngineError(f"the grammar is too complex to go on with: {_first_line(self._matcher.get_error())}")


class Grammar:
    """A set of texts."""

    def __init__(self, matcher: LLMatcher, tokenizer: Tokenizer, bytes_of: TokenBytes) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._bytes_of = bytes_of

    def matcher(self, start: str | bytes = b"") -> Matcher | None:
        """One that stands behind `start`; None if no text of the grammar begins with that.

        Control tokens that a text spells are meant as such.
        """
        matcher = Matcher(self._matcher.deep_copy(), self._bytes_of)
        ids: list[int] = []
        for part in self._tokenizer.parts(start) if isinstance(start, str) else [start]:
            if isinstance(part, int) and part in self._tokenizer.control_ids:
                ids.append(part)
                continue
            text = self._tokenizer.token_text(part) if isinstance(part, int) else part
            data = text.encode() if isinstance(text, str) else text
            ids += [self._bytes_of.ids.get(byte, -1) for byte in data]
        return matcher if -1 not in ids and matcher.advance(ids) == len(ids) else None

    def has_texts(self) -> bool:
        """False where nothing can begin a text; a dead end further on is found when a reply gets there."""
        matcher = Matcher(self._matcher.deep_copy(), self._bytes_of)
        if matcher.may_end:
            return True
        try:
            return not self._tokenizer.end_ids.issuperset(matcher.allowed().tolist())
        except EngineError:
            return False


class GrammarCompiler:
    """Makes grammars for one tokenizer; safe to share between threads. What it made last is kept."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._kept: dict[str, Grammar] = {}

    def json(
        self, schema: Mapping[str, Any] | bool, what: str = "the schema", style: JsonStyle | None = None
    ) -> Grammar:
        """JSON texts that are valid under a schema. Raises SchemaError."""
        return self.compile(f"start: {self.json_rule(schema, what, style)}", what)

    @staticmethod
    def json_rule(schema: Mapping[str, Any] | bool, what: str, style: JsonStyle | None = None) -> str:
        """The same as a part of a grammar. Raises SchemaError for a keyword that is not supported."""
        plain = checked_schema(schema, what)
        return "%json " + json.dumps({**plain, "x-guidance": (style or JsonStyle()).guidance()})

    def literal(self, text: str) -> str:
        """A fixed text as a part of a grammar; control tokens that it spells are meant as such."""
        parts: list[str] = []
        for part in self._tokenizer.parts(text):
            if isinstance(part, str):
                parts.append(json.dumps(part, ensure_ascii=False))
            elif part in self._tokenizer.control_ids:
                parts.append(f"<[{part}]>")
            else:
                parts.append(json.dumps(self._tokenizer.token_text(part), ensure_ascii=False))
        return " ".join(parts) or '""'

    def split_at_control(self, text: str) -> tuple[str, str]:
        """The text up to the first control token that it spells, and from there on."""
        plain = itertools.takewhile(
            lambda part: isinstance(part, str) or part not in self._tokenizer.control_ids, self._tokenizer.parts(text)
        )
        length = sum(len(part if isinstance(part, str) else self._tokenizer.token_text(part)) for part in plain)
        return text[:length], text[length:]

    def prepare(self) -> None:
        """Read the vocabulary now. The parser's part of that keeps other Python threads waiting: 0.2 to 0.4 s."""
        with self._lock:
            _ = self._vocabulary, self._bytes_of

    def compile(self, rules: str, what: str) -> Grammar:
        """A grammar of rules in llguidance's form of Lark, beginning with `start`. Raises SchemaError."""
        from llguidance import LLMatcher

        with self._lock:
            if rules in self._kept:
                self._kept[rules] = self._kept.pop(rules)
                return self._kept[rules]
            matcher = LLMatcher(self._vocabulary, LLMatcher.grammar_from_lark(rules), log_level=0, limits=_limits())
            if matcher.is_error():
                raise SchemaError(f"{what} cannot be followed: {_first_line(matcher.get_error())}")
            grammar = Grammar(matcher, self._tokenizer, self._bytes_of)
            if not grammar.has_texts():
                raise SchemaError(f"{what} cannot be followed: nothing is valid under it")
            self._kept[rules] = grammar
            while len(self._kept) > 16:
                del self._kept[next(iter(self._kept))]
            return grammar

    @functools.cached_property
    def _vocabulary(self) -> LLTokenizer:
        """Takes 0.1 s for 49,000 tokens and 0.5 s for 152,000."""
        from llguidance import LLTokenizer

        tokenizer = self._tokenizer
        return LLTokenizer(_Vocabulary(tokenizer), n_vocab=tokenizer.vocab_size, eos_token=sorted(tokenizer.end_ids))  # type: ignore[arg-type]

    @functools.cached_property
    def _bytes_of(self) -> TokenBytes:
        return TokenBytes(self._tokenizer)


def check_schema(schema: Mapping[str, Any] | bool, what: str = "the schema") -> None:
    """Find what no reply can be held to before there is a model. Raises SchemaError."""
    from llguidance import LLMatcher

    rules = f"start: {GrammarCompiler.json_rule(schema, what)}"
    problem = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(rules), limits=_limits())
    if problem:
        raise SchemaError(f"{what} cannot be followed: {_first_line(problem)}")


def _limits() -> LLParserLimits:
    from llguidance import LLParserLimits

    return LLParserLimits(max_items_in_row=50_000, step_max_items=200_000, verbose_errors=False)


class _Vocabulary:
    """What llguidance asks of a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer) -> None:
        control = tokenizer.control_ids
        # 0xff in front says that a token is no text. One without bytes would be a step that goes nowhere.
        self.tokens = [
            b"\xff" + tokenizer.token_text(id).encode()
            if id in control or not (piece := tokenizer.piece(id))
            else piece
            for id in range(tokenizer.vocab_size)
        ]
        self.special_token_ids = [id for id, piece in enumerate(self.tokens) if piece.startswith(b"\xff")]
        self.eos_token_id = min(tokenizer.end_ids, default=0)
        self.bos_token_id = tokenizer.bos_id
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8")
        return self._tokenizer.encode(text, continues=True)


def as_pattern(text: str) -> str:
    """A regular expression for just this text."""
    written = "".join(f"\\{c}" if c in r"\.+*?()|[]{}^$#&-~/" else c for c in text)
    return written.replace("\n", "\\n").replace("\r", "\\r").replace("\t", "\\t")


def _first_line(message: str) -> str:
    """The reason in what llguidance says, which has a place in a grammar in front and may go on with a trace."""
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in message.splitlines()]
    reasons = [line for line in lines if line.startswith("error: ")] or [
        line for line in lines if line and line not in ("<non-verbose/>", "^")
    ]
    reason = reasons[0] if reasons else "no reason is given"
    for lead in ("failed to compile JSON schema: ", "error: ", "Unsatisfiable schema: "):
        reason = reason.partition(lead)[2] or reason
    return reason[:300]
