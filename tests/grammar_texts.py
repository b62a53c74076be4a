"""Whether a text is one of a grammar's."""

from __future__ import annotations

from engine.grammar import Grammar


def accepts(grammar: Grammar, text: str, *, control: bool = False) -> bool:
    """`control`: control tokens that the text spells are meant as such."""
    matcher = grammar.matcher()
    ids = grammar._tokenizer.encode(text, control=control, continues=True)
    return matcher is not None and matcher.advance(ids) == len(ids) and matcher.may_end
