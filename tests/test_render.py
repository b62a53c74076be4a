"""What goes out: no control character of a stranger, one line of figures, progress only where it can be erased."""

from __future__ import annotations

import io
import json
import unicodedata
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Finished, ModelInfo, Notice, PrefillProgress, Reply, TextDelta, TurnStats
from engine.errors import ContextExceededError, TemplateError
from goinfer_chat.terminal import Stream, sanitize, true_text
from goinfer_chat.view.render import (
    JsonView,
    TextView,
    banner,
    error_object,
    prefill_line,
    reply_object,
    report_error,
    stats_line,
    to_json,
)

STATS = TurnStats(
    prompt_tokens=3020,
    prefill_reused_tokens=3000,
    prefill_tokens=20,
    completion_tokens=2,
    ttft_ms=45.25,
    decode_tok_s=38.23456,
    context_used=3022,
    context_size=8192,
    kv_bytes=64,
    seed=7,
)
TERMINAL = {"TERM": "xterm"}


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def reply(
    text: str = "yes", finish_reason: str = "stop", stats: TurnStats = STATS, ids: tuple[int, ...] = (5, 6)
) -> Reply:
    return Reply(text=text, ids=ids, prompt_ids=(1, 2, 3), finish_reason=finish_reason, stats=stats)


@given(st.text(alphabet=st.characters(), max_size=40), st.booleans())
def test_no_control_character_but_newline_and_tab_comes_through(text: str, terminal: bool) -> None:
    clean = sanitize(text, terminal=terminal)
    assert not [c for c in clean if unicodedata.category(c) in ("Cc", "Cs") and c not in "\n\t"]
    clean.encode("utf-8")


@given(st.text(alphabet=st.characters(), max_size=40), st.integers(0, 40), st.booleans())
def test_text_that_comes_in_pieces_is_cleaned_like_the_whole(text: str, cut: int, terminal: bool) -> None:
    pieces = sanitize(text[:cut], terminal=terminal) + sanitize(text[cut:], terminal=terminal)
    assert pieces == sanitize(text, terminal=terminal)


def test_a_terminal_shows_what_was_there_and_a_file_gets_the_rest() -> None:
    text = "a\x1b[31m\x9b2J\u202eb\r\nc\td\x7f\ud800"
    assert sanitize(text, terminal=True) == "a\u241b[31m<U+009B>2J<U+202E>b\nc\td\u2421\ufffd"
    assert sanitize(text, terminal=False) == "a[31m2J\u202eb\nc\td\ufffd"


def test_emoji_accents_and_right_to_left_text_are_left_alone() -> None:
    text = "👩‍🚀 ❤️ e\u0301 日本語 🏴󠁧󠁢󠁳󠁣󠁴󠁿 \u200fשלום\u200e"
    assert sanitize(text, terminal=True) == text
    assert sanitize(text, terminal=False) == text


def test_input_of_a_locale_without_utf8_is_read_as_utf8() -> None:
    assert true_text(b"caf\xc3\xa9 \xff".decode("ascii", "surrogateescape")) == "café \ufffd"
    assert true_text("café") == "café"


def test_a_character_the_encoding_lacks_is_replaced() -> None:
    raw = io.BytesIO()
    stream = Stream(io.TextIOWrapper(raw, encoding="ascii", write_through=True), {})
    stream.write("snow ☃\n")
    assert raw.getvalue() == b"snow ?\n"


def test_a_file_gets_no_escape_sequence_from_styles_or_status() -> None:
    file = io.StringIO()
    stream = Stream(file, TERMINAL)
    stream.status("reading")
    stream.line("figures", dim=True)
    assert file.getvalue() == "figures\n"


@pytest.mark.parametrize("environ", [{"TERM": "dumb"}, {}, {"TERM": "xterm", "NO_COLOR": "1"}])
def test_styles_need_a_terminal_that_has_them_and_wants_them(environ: dict[str, str]) -> None:
    file = FakeTerminal()
    Stream(file, environ).line("figures", dim=True)
    assert file.getvalue() == "figures\n"


def test_a_status_line_is_erased_before_anything_else_is_written() -> None:
    file = FakeTerminal()
    stream = Stream(file, TERMINAL)
    stream.status("reading \x1b[2J")
    stream.write("text")
    stream.status("too late, a line has begun")
    stream.line("figures")
    assert file.getvalue() == "\rreading \u241b[2J\x1b[K\r\x1b[Ktext\nfigures\n"


def test_a_status_line_is_cut_to_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    file = FakeTerminal()
    Stream(file, TERMINAL).status("x" * 50)
    assert file.getvalue() == "\r" + "x" * 19 + "\x1b[K"


def test_a_long_line_on_a_terminal_is_broken_between_words_and_a_path_stays_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    file, plain = FakeTerminal(), io.StringIO()
    Stream(file, TERMINAL).line("a line of some words, 日本語 too")
    Stream(file, TERMINAL).line("see /a/path/longer/than/a/row")
    assert file.getvalue() == "a line of some\nwords, 日本語 too\nsee /a/path/longer/than/a/row\n"
    Stream(plain, TERMINAL).line("a line of some words that is long")
    assert plain.getvalue() == "a line of some words that is long\n"


def test_a_prefill_shows_progress_only_after_half_a_second_and_only_on_a_terminal() -> None:
    now = [0.0]
    for file, shown in ((FakeTerminal(), "\rreading the prompt: 64 of 128 tokens (50%)\x1b[K"), (io.StringIO(), "")):
        now[0] = 0.0
        stream = Stream(file, TERMINAL)
        view = TextView(stream, stream, clock=lambda: now[0])
        view.event(PrefillProgress(64, 128, 0))
        now[0] = 0.4
        view.tick()
        assert file.getvalue() == ""
        now[0] = 0.5
        view.tick()
        view.tick()
        assert file.getvalue() == shown
        view.event(TextDelta("Hi"))
        now[0] = 9.0
        view.tick()
        assert file.getvalue() == (shown + "\r\x1b[K" if shown else "") + "Hi"


def test_a_reply_on_the_same_terminal_as_its_progress_starts_on_a_clean_line() -> None:
    file, now = FakeTerminal(), [0.0]
    view = TextView(Stream(file, TERMINAL), Stream(file, TERMINAL), clock=lambda: now[0])
    now[0] = 1.0
    view.event(PrefillProgress(64, 128, 0))
    view.event(TextDelta("Hi"))
    view.event(Finished(reply("Hi")))
    assert file.getvalue().split("\r\x1b[K")[1] == f"Hi\n\x1b[2m{stats_line(reply())}\x1b[22m\n"


def test_a_prefill_says_what_was_reused() -> None:
    assert prefill_line(PrefillProgress(1500, 3000, 1000)) == (
        "reading the prompt: 1,500 of 3,000 tokens, 1,000 of them reused (50%)"
    )


def test_the_line_of_figures_leaves_out_what_is_not_known() -> None:
    assert stats_line(reply()) == "prompt 3,020 (3,000 reused, 20 prefilled) | TTFT 45 ms | 38.2 tok/s"
    unknown = TurnStats(prompt_tokens=3, prefill_reused_tokens=0, prefill_tokens=3)
    assert stats_line(reply(stats=unknown)) == "prompt 3 (0 reused, 3 prefilled)"


def test_the_line_of_figures_says_why_a_reply_is_not_complete() -> None:
    full = TurnStats(prompt_tokens=3, prefill_reused_tokens=0, prefill_tokens=3, context_used=9, context_size=9)
    assert stats_line(reply(finish_reason="cancelled")).endswith("| stopped")
    assert stats_line(reply(finish_reason="length")).endswith("| cut at --max-tokens")
    assert stats_line(reply(finish_reason="length", stats=full)).endswith("| cut: the context is full")


def test_the_line_of_figures_says_how_many_guesses_were_right() -> None:
    stats = TurnStats(prompt_tokens=3, prefill_reused_tokens=0, prefill_tokens=3, draft_tokens=20, draft_accepted=14)
    assert stats_line(reply(stats=stats)).endswith("| 14 of 20 guesses right")
    none = TurnStats(prompt_tokens=3, prefill_reused_tokens=0, prefill_tokens=3, draft_tokens=0, draft_accepted=0)
    assert "guesses" not in stats_line(reply(stats=none))


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (96, "prompt 3,020 (3,000 reused, 20 prefilled) | TTFT 45 ms | 38.2 tok/s | 14 of 20 guesses right"),
        (88, "prompt 3,020 (3,000 reused, 20 prefilled) | TTFT 45 ms | 38.2 tok/s | guesses 70% right"),
        (79, "prompt 3,020 (3,000 reused) | TTFT 45 ms | 38.2 tok/s | guesses 70% right"),
        (60, "prompt 3,020 (3,000 reused) | TTFT 45 ms | 38.2 tok/s"),
        (40, "prompt 3,020 (3,000 reused) | 38.2 tok/s"),
        (30, "prompt 3,020 (3,000 reused)"),
        (20, "prompt 3,020"),
    ],
)
def test_the_line_of_figures_is_one_row(columns: int, shown: str) -> None:
    guessed = replace(STATS, draft_tokens=20, draft_accepted=14)
    assert stats_line(reply(stats=guessed), columns) == shown
    assert len(shown) <= columns


def test_where_reuse_is_not_known_it_takes_no_room_from_the_other_figures() -> None:
    unknown = replace(STATS, prefill_reused_tokens=None, prefill_tokens=None)
    assert stats_line(reply(stats=unknown), 50) == "prompt 3,020 | TTFT 45 ms | 38.2 tok/s"


def test_a_notice_amid_a_reply_waits_for_its_end_on_a_terminal_that_both_share() -> None:
    shared = FakeTerminal()
    view = TextView(Stream(shared, {}), Stream(shared, {}))
    for event in (TextDelta("Hel"), Notice("a fallback"), TextDelta("lo"), Finished(reply())):
        view.event(event)
    view.close()
    assert shared.getvalue().splitlines() == ["Hello", "a fallback", stats_line(reply(), 80)]


def test_a_notice_amid_a_reply_that_goes_to_a_file_is_told_at_once() -> None:
    out, err = io.StringIO(), FakeTerminal()
    view = TextView(Stream(out, {}), Stream(err, {}))
    view.event(TextDelta("Hel"))
    view.event(Notice("a fallback"))
    assert (out.getvalue(), err.getvalue()) == ("Hel", "a fallback\n")


def test_replies_and_everything_else_go_to_two_streams() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = TextView(Stream(out, {}), Stream(err, {}))
    for event in (PrefillProgress(3, 3, 0), Notice("a fallback"), TextDelta("Hel"), TextDelta("lo"), Finished(reply())):
        view.event(event)
    view.close()
    assert out.getvalue() == "Hello\n"
    assert err.getvalue().splitlines() == ["a fallback", stats_line(reply())]


def test_quiet_leaves_the_reply_alone() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = TextView(Stream(out, {}), Stream(err, {}), quiet=True)
    for event in (Notice("a fallback"), TextDelta("Hello\n"), Finished(reply("Hello\n"))):
        view.event(event)
    view.close()
    assert (out.getvalue(), err.getvalue()) == ("Hello\n", "")


def test_json_has_every_figure_and_null_where_one_is_not_known() -> None:
    out, err = io.StringIO(), io.StringIO()
    view = JsonView(Stream(out, {}), Stream(err, {}))
    for event in (Notice("a fallback"), TextDelta("yes"), Finished(reply("y\x1b\x9bés"))):
        view.event(event)
    assert err.getvalue() == "a fallback\n"
    assert out.getvalue().isascii()
    shown = json.loads(out.getvalue())
    assert list(shown) == ["text", "thinking", "finish_reason", *(field.name for field in fields(TurnStats))]
    assert (shown["text"], shown["finish_reason"]) == ("y\x1b\x9bés", "stop")
    assert (shown["prompt_tokens"], shown["prefill_reused_tokens"], shown["prefill_tokens"]) == (3020, 3000, 20)
    assert (shown["ttft_ms"], shown["decode_tok_s"], shown["seed"]) == (45.25, 38.235, 7)
    assert [shown[name] for name in ("prefill_tok_s", "draft_tokens", "acceptance", "restore_ms")] == [None] * 4


def test_the_guide_explains_every_key_of_json() -> None:
    guide = (Path(__file__).parent.parent / "docs" / "cli.md").read_text(encoding="utf-8")
    keys = reply_object(reply(), ids=True)
    assert [key for key in keys if f"`{key}`" not in guide] == []


def test_json_has_ids_when_asked_for() -> None:
    out = io.StringIO()
    JsonView(Stream(out, {}), Stream(None), ids=True).event(Finished(reply()))
    shown = json.loads(out.getvalue())
    assert (shown["prompt_ids"], shown["reply_ids"]) == ([1, 2, 3], [5, 6])


def test_an_error_as_json_has_its_type_exit_code_and_both_numbers() -> None:
    shown = json.loads(to_json(error_object(ContextExceededError(9000, 8192))))["error"]
    assert shown.pop("message") == str(ContextExceededError(9000, 8192))
    assert shown == {"type": "ContextExceededError", "exit_code": 4, "prompt_tokens": 9000, "context_size": 8192}


def test_an_error_is_one_line_whatever_its_text_holds() -> None:
    err = io.StringIO()
    report_error(TemplateError("the template says:\n  roles\r\n\x1b[31mmust alternate"), Stream(err, {}))
    assert err.getvalue() == "error: the template says: roles [31mmust alternate\n"


def test_an_unforeseen_error_says_how_to_see_where(monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    monkeypatch.delenv("GOINFER_CHAT_DEBUG", raising=False)
    report_error(ZeroDivisionError("by nought"), Stream(err, {}))
    assert err.getvalue() == "error: unexpected ZeroDivisionError: by nought (GOINFER_CHAT_DEBUG=1 shows where)\n"
    monkeypatch.setenv("GOINFER_CHAT_DEBUG", "1")
    try:
        raise ZeroDivisionError("by nought")
    except ZeroDivisionError as error:
        report_error(error, Stream(err, {}))
    assert "Traceback" in err.getvalue()
    assert __file__ in err.getvalue()


INFO = ModelInfo(
    name="SmolLM2 135M Instruct",
    architecture="llama",
    quantization="Q4_1",
    num_parameters=134_515_008,
    num_layers=30,
    vocab_size=49152,
    context_size=8192,
    train_context_size=8192,
    kv_bytes_per_token=23040,
    kv_type="f16",
    weight_bytes=96_000_000,
    backend="cpu",
    kernels="AVX-512 VNNI",
    threads=1,
)


@pytest.mark.parametrize("notices", [(), ("the model has no template, so chatml is used", "the context was cut")])
def test_the_banner_has_at_most_three_lines_with_model_context_and_kernels(notices: tuple[str, ...]) -> None:
    lines = banner(replace(INFO, session_reuse="session reuse: on", notices=notices))
    assert len(lines) <= 3
    assert lines[0] == "SmolLM2 135M Instruct (135M, Q4_1) | context 8,192 | AVX-512 VNNI, 1 thread"
    assert all(notice in lines[2] for notice in notices)


@pytest.mark.parametrize("columns", [20, 40, 80, 300])
def test_a_banner_on_a_narrow_screen_leaves_out_what_does_not_fit(columns: int) -> None:
    reuse = "session reuse: on (4 conversations kept prefilled)"
    lines = banner(replace(INFO, name="A model of a long name " * 3, session_reuse=reuse), columns)
    if columns >= len(reuse):
        assert all(len(line) <= columns for line in lines)
    assert lines[0].startswith("A model of ")
    assert "/help lists the commands" in lines[2]


def test_the_banner_says_what_stays_in_memory_and_what_came_back_from_the_disk() -> None:
    reuse = "session reuse: on (4 conversations kept prefilled)"
    info = replace(INFO, session_reuse=reuse, kept_conversations=0, kept_tokens=0, kept_ms=0.1)
    cache = "cache 23,040 bytes a token (f16), 188.7 MB when full"
    assert banner(info)[1] == f"{reuse} | {cache}"
    info = replace(info, kept_conversations=2, kept_tokens=13020, kept_ms=111.6)
    assert banner(info)[1] == f"{reuse} | 2 conversations back with 13,020 tokens in 112 ms | {cache}"
    assert banner(info, 79)[1:] == [f"{reuse} | 2 back: 13,020 tok, 112 ms", f"{cache} | /help lists the commands"]
    assert len(banner(INFO)) == 2
