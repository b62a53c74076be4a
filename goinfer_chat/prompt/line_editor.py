"""The line editor of the prompt."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.application import Application, create_app_session
from prompt_toolkit.application.run_in_terminal import run_in_terminal
from prompt_toolkit.auto_suggest import AutoSuggestFromHistory
from prompt_toolkit.document import Document
from prompt_toolkit.enums import EditingMode
from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.input.defaults import create_input
from prompt_toolkit.input.typeahead import store_typeahead
from prompt_toolkit.key_binding import KeyPressEvent
from prompt_toolkit.key_binding.key_processor import KeyPress
from prompt_toolkit.key_binding.vi_state import InputMode
from prompt_toolkit.layout.processors import TabsProcessor
from prompt_toolkit.output.plain_text import PlainTextOutput

from engine.errors import GoinferError
from goinfer_chat.agent import Agent
from goinfer_chat.prompt.completion import Completions
from goinfer_chat.prompt.display import VisibleControls
from goinfer_chat.prompt.history import TypedHistory
from goinfer_chat.prompt.keys import KeyLine, LineCleared, key_bindings
from goinfer_chat.prompt.paste import mend_pasting
from goinfer_chat.prompt.resizing import mend_resizing
from goinfer_chat.prompt.screen import PASTE_MODE_OFF, PASTE_MODE_ON, Screen
from goinfer_chat.prompt.style import STYLE
from goinfer_chat.prompt.toolbar import FUNCTION_KEYS, MIN_ROWS, FunctionKey, toolbar
from goinfer_chat.store import session_folder
from goinfer_chat.terminal import Stream, true_text
from goinfer_chat.view.live import reflows

ESCAPE_SECONDS = 0.1
"""After an Escape the rest of a key's sequence comes at once; longer waits would make vi's Escape slow."""


def _draw_no_taller_than_needed(app: Application[str]) -> None:
    """Otherwise the toolbar stays where a menu or a longer draft has pushed it."""
    renderer, size = app.renderer, app.output.get_size()
    drawn = renderer.last_rendered_screen
    if drawn is not None and drawn.height > app.layout.container.preferred_height(size.columns, size.rows).preferred:
        renderer.erase(leave_alternate_screen=False)


class LineEditor:
    """Called with whether the line belongs to a block, it returns what was typed; EOFError at Ctrl-D.

    A message of several lines comes back as one text with line ends. `pasted` holds the texts of several lines that
    were pasted into the last one.
    """

    def __init__(
        self, agent: Agent, screen: Stream, edit: Callable[[str], str], report: Callable[[Exception], None]
    ) -> None:
        assert screen.file is not None
        self.pasted: list[str] = []
        self._agent = agent
        self._screen = screen
        self._edit = edit
        self._report = report
        self._draft = Document()
        folder = session_folder(agent.settings.session_dir)
        history = TypedHistory(folder, agent.settings.history, lambda: agent.conversations.is_kept)
        keys = key_bindings(history, self._edited, self._pressed, self._on_paste, moves=screen.moves)
        if screen.moves:
            source = create_input()
            mend_pasting(source)
            self._session: PromptSession[str] = PromptSession(
                auto_suggest=AutoSuggestFromHistory() if screen.colour and not agent.settings.plain else None,
                input=source,
                output=Screen.on(screen),
                completer=Completions(agent),
                complete_while_typing=False,
                enable_suspend=True,
                history=history,
                input_processors=[TabsProcessor(tabstop=4, char1=" ", char2=" "), VisibleControls()],
                interrupt_exception=LineCleared,
                key_bindings=keys,
                multiline=True,
                prompt_continuation="  ",
                style=STYLE,
            )
            self._session.app.ttimeoutlen = ESCAPE_SECONDS
            self._session.app.before_render += _draw_no_taller_than_needed
            if reflows(os.environ):
                mend_resizing(self._session.app)
            return
        # prompt_toolkit has a prompt without cursor movement, but not for a terminal whose TERM is not set, and only
        # when no output is given; without one it would make one that moves the cursor once.
        os.environ["TERM"] = "dumb"
        with create_app_session(output=PlainTextOutput(screen.file)):
            self._session = PromptSession(history=history, interrupt_exception=LineCleared, key_bindings=keys)

    def __call__(self, inside_block: bool) -> str:
        session, settings = self._session, self._agent.settings
        self.pasted.clear()
        session.editing_mode = EditingMode.VI if settings.keys == "vi" else EditingMode.EMACS
        session.bottom_toolbar = self._toolbar if self._screen.moves else None
        session.app.erase_when_done = False
        draft, self._draft = self._draft, Document()
        try:
            text = true_text(session.prompt("... " if inside_block else "> ", default=draft))
            self._screen.went_down(1)
            return text
        except KeyLine as key:
            self._draft = key.draft
            return key.line
        except EOFError:
            if inside_block:
                raise LineCleared from None
            raise

    @contextmanager
    def during_reply(self) -> Iterator[Callable[[], None]]:
        """Inside, what is pasted stays one piece. What is typed waits for the next prompt, but for keys that work at
        once, whenever the function that this yields is called."""
        waiting: list[KeyPress] = []
        source = self._session.input

        def take() -> None:
            for press in source.read_keys() if reads_ahead else ():
                key = next((key for key in FUNCTION_KEYS if key.at_once and press.key == key.key), None)
                if key is not None and key.works:
                    self._pressed(key)
                else:
                    waiting.append(press)

        reads_ahead = self._screen.moves and sys.platform != "win32"
        self._write(PASTE_MODE_ON)
        try:
            yield take
        finally:
            self._write(PASTE_MODE_OFF)
            store_typeahead(source, waiting)

    def _write(self, sequence: str) -> None:
        if self._screen.moves:
            self._session.output.write_raw(sequence)
            self._session.output.flush()

    def _toolbar(self) -> StyleAndTextTuples | None:
        columns, rows = shutil.get_terminal_size()
        settings = self._agent.settings
        shown = settings.toolbar and not settings.plain and rows >= MIN_ROWS
        return toolbar(self._agent, columns, _vi_mode(self._session.app.vi_state.input_mode)) if shown else None

    def _edited(self, text: str) -> str:
        self._screen.lost_track()
        try:
            return self._edit(text)
        except GoinferError as error:
            self._report(error)
            return text

    def _pressed(self, key: FunctionKey) -> None:
        self._agent.settings = key.pressed(self._agent.settings)
        mode = self._agent.settings.keys
        self._session.editing_mode = EditingMode.VI if mode == "vi" else EditingMode.EMACS
        if key.setting == "think" and self._agent.doubt:
            run_in_terminal(lambda: self._screen.line(self._agent.doubt, dim=True))

    def _on_paste(self, event: KeyPressEvent) -> None:
        text = event.data.replace("\r\n", "\n").replace("\r", "\n")
        if "\n" in text:
            self.pasted.append(text)
        event.current_buffer.insert_text(text)


def _vi_mode(mode: InputMode) -> str:
    """In vi's own words."""
    return "normal" if mode is InputMode.NAVIGATION else mode.value.split("-")[1]
