"""What keys do, beyond what a line editor's keys do anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from prompt_toolkit.application.run_in_terminal import run_in_terminal
from prompt_toolkit.document import Document
from prompt_toolkit.enums import DEFAULT_BUFFER
from prompt_toolkit.filters import Condition, has_focus
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.keys import Keys

from goinfer_chat.prompt.history import Drafts
from goinfer_chat.prompt.toolbar import FUNCTION_KEYS, FunctionKey

_IN_DRAFT: Final = has_focus(DEFAULT_BUFFER)


class LineCleared(Exception):  # noqa: N818 - not an error
    """Ctrl-C at an empty prompt, which also leaves a block that was begun."""


class KeyLine(Exception):  # noqa: N818 - not an error
    """A function key enters this line; a draft being typed comes back at the next prompt."""

    def __init__(self, line: str, draft: Document) -> None:
        self.line = line
        self.draft = draft


def key_bindings(
    drafts: Drafts,
    edit: Callable[[str], str],
    press: Callable[[FunctionKey], None],
    paste: Callable[[KeyPressEvent], None],
    *,
    moves: bool,
) -> KeyBindings:
    """The keys of the prompt.

    drafts   where a draft goes that Ctrl-C clears
    edit     a text in the person's own editor; what it returns is the draft from there on
    press    called for a function key that changes a setting
    paste    called for what was pasted
    moves    whether the cursor can be moved; without that Ctrl-J is Enter, as programs that write lines expect
    """
    keys = KeyBindings()

    @keys.add("c-c", filter=_IN_DRAFT)
    @keys.add("<sigint>")
    def _clear(event: KeyPressEvent) -> None:
        draft = event.app.current_buffer
        if draft.text:
            drafts.add_draft(draft.text)
            draft.reset()
        else:
            event.app.exit(exception=LineCleared())

    if not moves:
        return keys

    @keys.add("enter", filter=_IN_DRAFT)
    def _send(event: KeyPressEvent) -> None:
        draft = event.current_buffer
        menu = draft.complete_state
        if menu is not None and menu.current_completion is not None and len(menu.completions) > 1:
            draft.complete_state = None  # the choice is taken; another Enter sends
        else:
            draft.validate_and_handle()

    @keys.add("escape", "enter", filter=_IN_DRAFT)
    @keys.add("c-j", filter=_IN_DRAFT)
    def _new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-x", "c-e", filter=_IN_DRAFT)
    def _edit(event: KeyPressEvent) -> None:
        draft = event.current_buffer

        def change() -> None:
            text = edit(draft.text)
            draft.document = Document(text, len(text))

        run_in_terminal(change)

    keys.add(Keys.BracketedPaste, filter=_IN_DRAFT)(paste)
    for function_key in FUNCTION_KEYS:
        _bind(keys, function_key, press)
    return keys


def _bind(keys: KeyBindings, function_key: FunctionKey, press: Callable[[FunctionKey], None]) -> None:
    @keys.add(function_key.key, filter=_IN_DRAFT & Condition(lambda: function_key.works))
    def _press(event: KeyPressEvent) -> None:
        if function_key.line:
            event.app.erase_when_done = True
            event.app.exit(exception=KeyLine(function_key.line, event.current_buffer.document))
        else:
            press(function_key)
