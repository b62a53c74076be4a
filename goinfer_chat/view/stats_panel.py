"""What /stats shows: the turns of the conversation as small charts, and their totals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from engine.api import TurnStats
from goinfer_chat.amounts import counted, size
from goinfer_chat.view.cells import cut
from goinfer_chat.view.panels import seconds_text

_STEPS: Final = "▁▂▃▄▅▆▇█"
_LABEL: Final = 11
_VALUES: Final = 34
"""Columns behind a chart, for its lowest, highest and last value."""


def stats_panel(turns: Sequence[TurnStats], columns: int) -> str:
    """A chart of each figure over the turns that know it, and totals. Lines of at most `columns`, from 40 up."""
    room = min(max(columns - _LABEL - _VALUES, 5), 60)
    rows = [
        _chart("TTFT", [turn.ttft_ms for turn in turns], room, "{:,.0f} ms"),
        _shares(turns, room),
        _chart("reused", [turn.prefill_reused_tokens for turn in turns], room, "{:,.0f}"),
        _chart("prefilled", [turn.prefill_tokens for turn in turns], room, "{:,.0f}"),
        _chart("tok/s", [turn.decode_tok_s for turn in turns], room, "{:.1f}"),
        _chart("acceptance", [turn.acceptance for turn in turns], room, "{:.0%}"),
    ]
    heading = f"turns {max(len(turns) - room, 0) + 1} to {len(turns)}" if len(turns) > 1 else "turn 1"
    chart = f"{'':<{_LABEL}}{heading:<{room}}  low / high / last"
    lines = [chart, *filter(None, rows), *_totals(totals_of(turns), turns)]
    return "\n".join(cut(line.rstrip(), columns) for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals of a conversation, each over the turns that know the figure."""

    prompt_tokens: int
    reused_tokens: int
    read_tokens: int
    reply_tokens: int
    saved_seconds: float | None
    """Estimated: what reading the reused tokens would have taken, at the rate of the turns that read some."""
    guessed: int | None
    right: int


def totals_of(turns: Sequence[TurnStats]) -> Totals:
    timed = [(turn.prefill_tokens, turn.prefill_tok_s) for turn in turns if turn.prefill_tokens and turn.prefill_tok_s]
    seconds = sum(tokens / rate for tokens, rate in timed)
    read = sum(tokens for tokens, _ in timed)
    reused = sum(turn.prefill_reused_tokens or 0 for turn in turns)
    guessed = [turn.draft_tokens for turn in turns if turn.draft_tokens is not None]
    return Totals(
        prompt_tokens=sum(turn.prompt_tokens or 0 for turn in turns),
        reused_tokens=reused,
        read_tokens=sum(turn.prefill_tokens or 0 for turn in turns),
        reply_tokens=sum(turn.completion_tokens or 0 for turn in turns),
        saved_seconds=reused * seconds / read if read else None,
        guessed=sum(guessed) if guessed else None,
        right=sum(turn.draft_accepted or 0 for turn in turns),
    )


def _totals(totals: Totals, turns: Sequence[TurnStats]) -> list[str]:
    share = totals.reused_tokens / max(totals.prompt_tokens, 1)
    saved = "" if totals.saved_seconds is None else f", about {seconds_text(totals.saved_seconds)} saved"
    last = turns[-1]
    lines = [
        f"{'prompts':<{_LABEL}}{totals.prompt_tokens:,} tokens, {totals.reused_tokens:,} reused ({share:.0%}){saved}",
        f"{'prefilled':<{_LABEL}}{totals.read_tokens:,} tokens",
        f"{'replies':<{_LABEL}}{totals.reply_tokens:,} tokens in {counted(len(turns), 'turn')}",
    ]
    if totals.guessed:
        right = f"{totals.right:,} of {totals.guessed:,} right ({totals.right / totals.guessed:.0%})"
        lines.append(f"{'guesses':<{_LABEL}}{right}")
    if last.context_size and last.context_used is not None:
        used = f"{last.context_used:,} of {last.context_size:,} ({last.context_used / last.context_size:.0%})"
        cache = "" if last.kv_bytes is None else f", cache {size(last.kv_bytes)}"
        lines.append(f"{'context':<{_LABEL}}{used}{cache}")
    return lines


def _chart(label: str, values: Sequence[float | None], room: int, form: str) -> str:
    """One character a turn; a dot where the figure is not known. "" where it never is."""
    shown = list(values)[-room:]
    known = [value for value in shown if value is not None]
    if not known:
        return ""
    top = max(known)
    bars = "".join("·" if value is None else _step(value, top) for value in shown)
    low, high, last = (form.format(value) for value in (min(known), top, known[-1]))
    return f"{label:<{_LABEL}}{bars:<{room}}  {low} / {high} / {last}"


def _step(value: float, top: float) -> str:
    return _STEPS[min(int(value / top * len(_STEPS)), len(_STEPS) - 1)] if top > 0 else _STEPS[0]


def _shares(turns: Sequence[TurnStats], room: int) -> str:
    """How much of each prompt was reused: the fuller, the less was read."""
    shares = [
        turn.prefill_reused_tokens / max(turn.prompt_tokens, 1)
        for turn in turns
        if turn.prefill_reused_tokens is not None and turn.prompt_tokens is not None
    ]
    if not shares:
        return ""
    bars = "".join(_step(share, 1.0) for share in shares[-room:])
    values = " / ".join(f"{share:.0%}" for share in (min(shares), max(shares), shares[-1]))
    return f"{'reused, %':<{_LABEL}}{bars:<{room}}  {values}"
