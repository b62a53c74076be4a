"""How the draft looks where its characters would steer the terminal."""

from __future__ import annotations

from prompt_toolkit.formatted_text import StyleAndTextTuples
from prompt_toolkit.formatted_text.utils import fragment_list_to_text
from prompt_toolkit.layout.processors import Processor, Transformation, TransformationInput

from goinfer_chat.terminal import sanitize


class VisibleControls(Processor):
    """Shows each such character as `Stream` would, while the draft keeps it as it is."""

    def apply_transformation(self, transformation_input: TransformationInput) -> Transformation:
        fragments = transformation_input.fragments
        text = fragment_list_to_text(fragments)
        if text.isprintable() or sanitize(text, terminal=True) == text:
            return Transformation(fragments)
        shown: StyleAndTextTuples = []
        starts: list[int] = []  # where each character of the draft is shown
        column = 0
        for style, part, *_ in fragments:
            for character in part:
                visible = sanitize(character, terminal=True) or "\u240d"
                starts.append(column)
                shown.append((style, visible))
                column += len(visible)
        starts.append(column)

        def to_display(position: int) -> int:
            return starts[min(position, len(starts) - 1)]

        def to_source(position: int) -> int:
            return max(index for index, start in enumerate(starts) if start <= position)

        return Transformation(shown, source_to_display=to_display, display_to_source=to_source)
