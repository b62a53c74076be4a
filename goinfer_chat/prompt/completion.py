"""What Tab offers: commands and what may follow them, and files after an @."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from prompt_toolkit.completion import CompleteEvent, Completer, Completion
from prompt_toolkit.document import Document

from goinfer_chat.agent import Agent
from goinfer_chat.attachments import matching_files
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.terminal import sanitize

_MENTION: Final = re.compile(r'(?<!\S)@(?:"([^"\n]*)|([^\s"#]*))\Z')


class Completions(Completer):
    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        before = document.text_before_cursor
        if "\n" not in before and before.startswith("/"):
            for found in COMMANDS.completions(self._agent, before):
                shown = sanitize(found.text, terminal=True)
                yield Completion(found.text, -found.num_typed, display=shown, display_meta=found.help)
        elif mention := _MENTION.search(before):
            yield from _files(mention)


def _files(mention: re.Match[str]) -> Iterable[Completion]:
    quoted = mention[1] is not None
    typed = mention[1] if quoted else mention[2]
    for file in matching_files(typed):
        needs_quotes = quoted or " " in file
        is_folder = file.endswith("/")
        text = f'@"{file}' + ("" if is_folder else '"') if needs_quotes else f"@{file}"
        yield Completion(text, -len(mention[0]), display=file.removesuffix("/").rpartition("/")[2] + "/" * is_folder)
