"""What stands between the start of a turn and what the model said in it.

A prompt may end with the opening of a block of reasoning, or with an empty one. Templates write that otherwise once the
reply is there: not at all, or an empty block where there was an opening, or another one. The ids of a reply came after
what its prompt had, so that is put in place of what the template writes. And some templates write marks around what was
said (`<|START_RESPONSE|>` of Command R7B) that the model says itself: these are not written twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from engine.api import Message
from engine.errors import TemplateError
from engine.prompt_values import Prompt
from engine.reasoning import ReasoningMarks


class Leads:
    """The ends of the prompts that the replies of one conversation came after."""

    def __init__(
        self,
        render: Callable[[Prompt], str],
        spelled: Callable[[Message], str],
        reasoning: ReasoningMarks,
        markers: Collection[str],
        prompt: Prompt,
        plain: str,
    ) -> None:
        """`spelled` gives the text of the ids of a reply, `markers` are the special tokens, `plain` is the text of the
        prompt."""
        self._render = render
        self._markers = markers
        self._spelled = spelled
        self._prompt = prompt
        self._plain = plain
        self._begin, self._end = reasoning.begin.strip(), reasoning.end.strip()
        begin, end = re.escape(self._begin), re.escape(self._end)
        self._block = rf"\s*(?:{begin}\s*)?(?:{end}\s*)?"
        self._known: dict[str, list[str]] = {}

    def put_into(self, before: str, number: int) -> str:
        """The text `before` the reply with this number, with the lead of its prompt where a turn has begun."""
        lead = self._of(number)
        start_of_turn = re.sub(rf"{self._block}\Z", "", lead)
        if lead and not start_of_turn:  # no turn begins: the model goes on behind a result
            return re.sub(rf"{self._block}\Z", "", before) + lead
        start = before.rfind(start_of_turn) if start_of_turn else -1
        if start >= 0 and re.fullmatch(self._block, self._without_own(before[start + len(start_of_turn) :], number)):
            return before[:start] + lead
        shared = next((n for n in range(len(lead), 0, -1) if before.endswith(lead[:n])), 0)
        return before + (lead[shared:] if shared else "")

    def _without_own(self, text: str, number: int) -> str:
        """The text without special tokens that the reply has among its ids."""
        said = self._spelled(self._prompt.messages[number])
        own = [marker for marker in self._markers if marker in text and marker in said]
        return re.sub("|".join(map(re.escape, own)), "", text) if own else text

    def taken_from(self, after: str, number: int) -> str:
        """The text `after` the reply with this number without the special tokens that it ends with."""
        said = self._spelled(self._prompt.messages[number])
        for marker in self._markers:
            if said.endswith(marker) and after.startswith(marker):
                return after[len(marker) :]
        return after

    def _of(self, number: int) -> str:
        """The lead of the present prompt where that ends like the reply's did, or the one of a prompt that told the
        model otherwise whether to think, where the ids cannot have come after this one."""
        messages = self._prompt.messages
        role = messages[number - 1].role if number else ""
        known = self._known.setdefault(role, [])
        opened = self._is_opened(messages[number])
        prompt = self._prompt if role == messages[-1].role else replace(self._prompt, messages=messages[:number])
        for arguments in self._arguments()[len(known) :]:
            if any(self._opens(lead) == opened for lead in known):
                break
            known.append(self._lead(replace(prompt, arguments=arguments)))
        return next((lead for lead in known if self._opens(lead) == opened), known[0])

    def _arguments(self) -> list[Mapping[str, Any]]:
        """Of the present prompt, and of prompts that say otherwise whether to think."""
        own = self._prompt.arguments
        others = {name: value for name, value in own.items() if name != "enable_thinking"}
        return [own, others, others | {"enable_thinking": True}, others | {"enable_thinking": False}]

    def _is_opened(self, message: Message) -> bool:
        """Whether the prompt of a reply had opened the reasoning."""
        said = self._spelled(message)
        return self._begin not in said and (message.thinking is not None or self._end in said)

    def _opens(self, lead: str) -> bool:
        return lead.rstrip().endswith(self._begin)

    def _lead(self, prompt: Prompt) -> str:
        """What the template adds to this prompt for the reply, or where it does so unasked, what follows the last
        message; "" where the prompt has no such end."""
        try:
            text = self._plain if prompt == self._prompt else self._render(prompt)
            without = self._render(replace(prompt, arguments={**prompt.arguments, "add_generation_prompt": False}))
        except TemplateError:
            return ""
        last = prompt.messages[-1].content.strip() if prompt.messages else ""
        if text == without:
            return text[text.rindex(last) + len(last) :] if last and last in text else ""
        return text[len(without) :] if text.startswith(without) else ""
