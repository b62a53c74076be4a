"""What is known of a reply before its first token: the tools it may call, what it is held to, how this model reasons.

Named and required tools and a schema hold the reply from its first token on. Where the model may call tools, nothing is
held until it begins a call by itself; from there on the call is held to the schemas of the tools.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from engine.api import NamedTool, Request, ToolCall, tool_name
from engine.grammar import Grammar, GrammarCompiler, Matcher
from engine.reasoning import THINK, ReasoningMarks
from engine.tool_calls import PYTHON_TAG, CallForm, CallText, read_objects, schemas_of

if TYPE_CHECKING:
    from engine.chat_template import ChatTemplate
    from engine.tokenizer import Tokenizer

CHANNEL_MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|constrain|>")
"""Of messages on channels (channel_parts.py)."""
FINAL = "<|channel|>final<|message|>"
"""How a message for the person begins there."""
ANSWER_NOW = f"<|end|><|start|>assistant{FINAL}"
"""What ends reasoning there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """What one reply may consist of."""

    grammar: Grammar | None = None
    """Holds the reply from its first token on."""
    form: CallForm | None = None
    """How calls are written; None where none are looked for."""
    tools: Sequence[Mapping[str, Any]] = ()
    several: bool = True
    forced: bool = False
    """The reply is a call from its first token on."""
    compiler: GrammarCompiler | None = None
    thinks: bool = False
    """The model may reason first."""
    reasoning: ReasoningMarks = THINK
    """What its reasoning stands between."""
    thinking: bool = False
    """The prompt has opened the reasoning already."""
    has_channels: bool = False
    """The reply is messages on channels (channel_parts.py)."""
    markers: Mapping[int, str] = field(default_factory=dict)
    """Control tokens whose text counts: they have none for a reader."""

    @property
    def answer_now(self) -> str:
        """What ends reasoning."""
        return ANSWER_NOW if self.has_channels else f"\n{self.reasoning.end}{self.reasoning.after}"

    @property
    def names(self) -> list[str]:
        return [tool_name(tool) for tool in self.tools]

    def read(self, text: str, *, whole: bool) -> list[ToolCall] | None:
        """The calls in the text of a reply from its opener on; None where it holds none after all.

        `whole`: the reply ended by itself. What was cut has only the calls that are complete with their markers.
        """
        assert self.form is not None
        calls: list[CallText]
        schemas = schemas_of(self.tools)
        calls, exact = self.form.read(text, schemas)
        if whole and not exact:
            calls = read_objects(text) or self.form.read(text, schemas, loosely=True)[0]
        if not calls and whole and not self.forced:
            return None
        calls = calls if self.several else calls[:1]
        return [ToolCall(id=f"call_{secrets.token_hex(12)}", name=name, arguments=text) for name, text in calls]

    def call_matcher(self, text: str, bare: tuple[str, int] | None) -> Matcher | None:
        """For a call that the model has begun with `text`; None if no call of these tools can begin like that."""
        assert self.form is not None
        assert self.compiler is not None
        if bare is None:
            rules = self.form.rules_after_opener(self.compiler, self.tools, several=self.several)
            return self.compiler.compile(rules, "the schemas of the tools").matcher(text)
        name, start = bare
        tool = next((tool for tool in self.tools if tool_name(tool) == name), None)
        if tool is None:  # a call of a tool that is not there
            return None
        own = self.form.argument_rules if self.has_channels else self.form.bare_rules
        rules = own(self.compiler, tool)
        return self.compiler.compile(rules, f"the schema of the tool {name!r}").matcher(text[start:])


def plan_reply(
    request: Request, prompt_ids: Sequence[int], template: ChatTemplate, tokenizer: Tokenizer, compiler: GrammarCompiler
) -> ReplyPlan:
    """Raises SchemaError for a schema that cannot be followed."""
    schema = request.json_schema
    if not request.messages:
        return ReplyPlan(grammar=None if schema is None else compiler.json(schema))
    thinks, marks = template.thinks, template.reasoning or THINK
    thinking = thinks and marks.is_opened_by(tokenizer.spelled(prompt_ids[-16:]))
    channels = template.has_channels
    lead = marks.end + marks.after if thinking else ""
    markers = dict(_controls(tokenizer, "".join(CHANNEL_MARKERS) if channels else marks.texts)) if thinks else {}
    if schema is not None:
        lead += FINAL if channels else ""
        rules = f"start: {compiler.literal(lead)} {compiler.json_rule(schema, 'the schema')}"
        return ReplyPlan(
            grammar=compiler.compile(rules, "the schema"),
            thinks=thinks,
            reasoning=marks,
            thinking=thinking,
            has_channels=channels,
            markers=markers,
        )
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return ReplyPlan(thinks=thinks, reasoning=marks, thinking=thinking, has_channels=channels, markers=markers)
    form, tools, what = template.call_form, request.tools, "the schemas of the tools"
    several = request.parallel_tool_calls and form.middle is not None
    if isinstance(choice, NamedTool):
        tools, several = tuple(tool for tool in tools if tool_name(tool) == choice.name), False
        what = f"the schema of the tool {choice.name!r}"
    if choice == "auto":
        # What cannot be followed is found before anything is generated, whether or not the model calls a tool.
        compiler.compile(form.rules_after_opener(compiler, tools, several=several), what)
        grammar = None
    else:
        grammar = compiler.compile(form.rules(compiler, tools, several=several, lead=lead), what)
    pieces = (*form.texts, PYTHON_TAG)
    return ReplyPlan(
        grammar=grammar,
        form=form,
        tools=tools,
        several=several,
        forced=grammar is not None,
        compiler=compiler,
        thinks=thinks,
        reasoning=marks,
        thinking=thinking,
        has_channels=channels,
        markers={**markers, **dict(_controls(tokenizer, "".join(pieces)))},
    )


def _controls(tokenizer: Tokenizer, text: str) -> Iterator[tuple[int, str]]:
    """Control tokens that a text spells, but for those that end a reply."""
    for id in tokenizer.parts(text):
        if isinstance(id, int) and id in tokenizer.control_ids and id not in tokenizer.end_ids:
            yield id, tokenizer.token_text(id)
