"""What kinds of models run, out of the engine's own tables: `goinfer-chat models --supported`.

docs/architectures.md is this too: `python -m goinfer_chat.models.supported > docs/architectures.md`.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from goinfer_chat.listing import columns


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the matrix."""

    name: str
    """`general.architecture` of a GGUF file."""
    models: str
    """Models people know it by."""
    reuse: bool
    """What is cached is reused: long prompts, undo, forks, kept conversations."""
    speculation: bool
    checkpoints: bool
    """Whether it needs them for that: a running state cannot be cut back, keys and values can."""
    tools: str
    """Who says how calls are written."""
    thinking: str
    special: tuple[str, ...]


def architectures() -> list[Architecture]:
    from engine.arch import ARCHITECTURES

    return [
        Architecture(a.name, a.models, True, True, a.is_recurrent, "template", "template", a.traits)
        for a in ARCHITECTURES.values()
    ]


def lists() -> dict[str, list[str]]:
    """What holds for all architectures, by what it is."""
    from engine.api import KVType
    from engine.bpe import PRE_TOKENIZERS
    from engine.config_rope import ROPE_KINDS
    from engine.kernels.formats import FORMATS

    return {
        "tensor_types": [kind.name for kind in FORMATS],
        "kv_types": list(get_args(KVType)),
        "rope_scaling": list(ROPE_KINDS),
        "pre_tokenizers": list(PRE_TOKENIZERS),
    }


_TITLES = {
    "tensor_types": "tensor types",
    "kv_types": "K and V",
    "rope_scaling": "RoPE scaling",
    "pre_tokenizers": "BPE splitting",
}
_COLUMNS = ("architecture", "models", "reuse", "speculation", "checkpoints", "tools", "thinking", "special about it")
_ALL = (
    "Reuse: cached prompts are used again, also by undo, forks and kept conversations. Checkpoints: what reuse needs"
    " where the state of a layer cannot be cut back. Tools and thinking: as the file's chat template writes them; where"
    " it has no tools, the system prompt describes them."
)

_PAGE = """# Which models run

For those who want to know whether a model runs before they download it. The program writes this page
(`python -m goinfer_chat.models.supported`), and a test compares it with the code. `goinfer-chat models --supported`
shows the same in a terminal, with `--json` for programs.

An architecture is what a GGUF file states as `general.architecture`. Each one here is compared with llama.cpp's logits
on a small random model, and bit by bit with a version of itself in plain NumPy ([how to add one](adding-a-model.md)).
A file with a tensor or a setting that the engine does not know is refused, with the name of what is unknown; it is
never run in part.
"""


def _cells(row: Architecture) -> tuple[str, ...]:
    def said(so: bool) -> str:
        return "yes" if so else "no"

    checkpoints = "yes" if row.checkpoints else "not needed"
    special = ", ".join(row.special) or "nothing"
    return (
        row.name, row.models, said(row.reuse), said(row.speculation), checkpoints, row.tools, row.thinking, special,
    )  # fmt: skip


def as_json() -> dict[str, Any]:
    return {"architectures": [asdict(row) for row in architectures()], **lists()}


def as_text(room: int | None = None) -> str:
    """For a terminal. `room`: its columns; where the table is wider, each row becomes a few lines."""
    rows = [_COLUMNS, *map(_cells, architectures())]
    table = columns(rows)
    if room is not None and max(map(len, table)) > room:
        table = _narrow(rows[1:], max(room, 24))
    return "\n".join([*table, "", *(f"{_TITLES[what]:<15}{' '.join(names)}" for what, names in lists().items()), _ALL])


def _narrow(rows: Sequence[tuple[str, ...]], room: int) -> list[str]:
    """What is the same for all rows once, and of each row its name, its models, and what else is in it below them."""
    same = {n for n, column in enumerate(zip(*rows)) if len(set(column)) == 1}

    def facts(row: tuple[str, ...], of_all: bool) -> str:
        return ", ".join(f"{_COLUMNS[n]} {row[n]}" for n in range(2, len(row) - 1) if (n in same) is of_all)

    found = textwrap.wrap(f"all: {facts(rows[0], True)}", room, subsequent_indent="  ")
    for row in rows:
        found += textwrap.wrap(f"{row[0]}: {row[1]}", room, subsequent_indent="  ")
        below = f"{facts(row, False)}; special about it: {row[-1]}"
        found += textwrap.wrap(below, room, initial_indent="  ", subsequent_indent="  ")
    return found


def as_markdown() -> str:
    """docs/architectures.md."""
    cells = [f"| {' | '.join(row)} |" for row in map(_cells, architectures())]
    table = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS), *cells]
    more = [f"- **{_TITLES[what]}**: {' '.join(f'`{name}`' for name in names)}" for what, names in lists().items()]
    return "\n".join([_PAGE, *table, "", _ALL, "", *more, ""])


if __name__ == "__main__":
    sys.stdout.write(as_markdown())
