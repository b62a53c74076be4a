"""Which view shows a turn: figures and Markdown on a terminal, plain text in a pipe, JSON where it is asked for."""

from __future__ import annotations

import os
from typing import get_args

from goinfer_chat.agent import Agent
from goinfer_chat.remembered import recall, remember
from goinfer_chat.settings import PanelSize, Settings
from goinfer_chat.terminal import Stream
from goinfer_chat.view.render import JsonView, TextView, View


def draws(settings: Settings, replies: Stream, side: Stream) -> bool:
    """Whether turns are drawn: where replies and all that is beside them are read on a terminal."""
    return replies.moves and side.moves and not settings.json and not settings.plain


class Views:
    """Makes the view of each turn, as the settings of the moment and the streams allow."""

    def __init__(self, agent: Agent, replies: Stream, side: Stream, *, at_prompt: bool = False) -> None:
        self._agent = agent
        self._replies = replies
        self._side = side
        self._at_prompt = at_prompt
        if at_prompt or draws(agent.settings, replies, side):
            agent.settings = agent.settings.changed({"panel": agent.settings.panel or recalled_panel()})
        self._panel = agent.settings.panel

    def __call__(self) -> View:
        settings, replies, side = self._agent.settings, self._replies, self._side
        self.keep()
        if settings.json:
            tools, events = bool(settings.tools), settings.events
            return JsonView(replies, side, ids=settings.ids, quiet=settings.quiet, tools=tools, events=events)
        if not draws(settings, replies, side):
            return TextView(replies, side, quiet=settings.quiet, progress=not settings.plain)

        from goinfer_chat.view.live_view import LiveView
        from goinfer_chat.view.themes import theme_for

        return LiveView(
            replies,
            theme_for(settings.theme, os.environ),
            self._agent.engine.info,
            size=self._size,
            raw=settings.raw or self._agent.schema is not None,  # what is JSON is no Markdown
            quiet=settings.quiet,
            at_prompt=self._at_prompt,
        )

    def _size(self) -> PanelSize:
        """That of the moment: F2 works during a reply too."""
        return self._agent.settings.panel or "line"

    def keep(self) -> None:
        """Remember the size of the panel, if another one was chosen at a prompt."""
        size = self._agent.settings.panel
        if self._at_prompt and size is not None and size != self._panel:
            self._panel = size
            remember("panel", size)


def recalled_panel() -> PanelSize:
    found = recall("panel")
    return next((size for size in get_args(PanelSize) if size == found), "line")
