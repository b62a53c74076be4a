"""Slash commands about conversations, with a real store and a scripted model."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import date
from pathlib import Path

import pytest
from scripted_engine import ScriptedEngine, ScriptedTurn

from engine.api import Event, Finished, Message, Notice, Reply
from engine.errors import EngineError, GoinferError, UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.conversations import Conversations
from goinfer_chat.script import CommandLine
from goinfer_chat.settings import Settings
from goinfer_chat.slash.commands import COMMANDS
from goinfer_chat.slash.conversation import recent, resumed
from goinfer_chat.slash.registry import Outcome
from goinfer_chat.store import ConversationInUseError, Store, StoreError
from goinfer_chat.view.cells import width

TURNS = [ScriptedTurn(pieces=[word, " ", "said"]) for word in ("One", "Two", "Three", "Four", "Five")]
Start = Callable[..., Agent]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sessions"


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """`start(turn, turn, ..., flag=value)`: an agent as a program at a prompt has it, or a script."""
    with ExitStack() as stack:

        def begin(*turns: ScriptedTurn, at_prompt: bool = True, model: str = "Scripted", **flags: object) -> Agent:
            settings = Settings().changed({"session_dir": str(folder), **flags})
            conversations = stack.enter_context(Conversations.start(settings, at_prompt=at_prompt))
            return Agent(ScriptedEngine(turns or TURNS, name=model), settings, conversations)

        yield begin


def run(agent: Agent, line: str) -> Outcome:
    name, _, argument = line.partition(" ")
    return COMMANDS.run(agent, CommandLine(name, argument))


def ask(agent: Agent, what: Ask | str | None) -> list[Event]:
    assert what is not None
    return list(agent.ask(Ask(text=what) if isinstance(what, str) else what, threading.Event()))


def play(agent: Agent, what: Ask | str | None) -> Reply:
    *_, last = ask(agent, what)
    assert isinstance(last, Finished)
    return last.reply


def asked(agent: Agent) -> list[str]:
    """The texts of the last request."""
    assert isinstance(agent.engine, ScriptedEngine)
    return [message.content for message in agent.engine.requests[-1].messages]


def words(agent: Agent) -> list[str]:
    assert agent.live is not None
    return [stored.message.content for stored in agent.live.path()]


def end(agent: Agent) -> None:
    """The program ends."""
    agent.conversations.close()


# -- kept or not -------------------------------------------------------------------------------------------------------


def test_each_turn_is_kept_with_ids_figures_and_model_and_goes_on_in_another_process(start: Start) -> None:
    agent = start(system="Be brief.")
    play(agent, "first")
    play(agent, "second")
    end(agent)
    agent = start(continue_last=True)
    assert agent.settings.system == "Be brief."
    play(agent, "third")
    assert isinstance(agent.engine, ScriptedEngine)
    assert agent.engine.requests[0].messages == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="first"),
        Message(role="assistant", content="One said", ids=(0, 1, 2)),
        Message(role="user", content="second"),
        Message(role="assistant", content="Two said", ids=(0, 1, 2)),
        Message(role="user", content="third"),
    )
    assert agent.live is not None
    *_, last = agent.live.path()
    assert last.stats is not None
    assert (last.finish_reason, last.model, last.stats.completion_tokens) == ("stop", "content of Scripted", 3)
    assert agent.live.info.name == "first"


def test_the_engine_knows_a_conversation_by_the_same_name_after_a_restart(start: Start) -> None:
    agent = start()
    play(agent, "first")
    end(agent)
    other = start(resume="first")
    play(other, "second")
    names = {request.conversation for shown in (agent, other) for request in shown.engine.requests}
    assert names == {other.live.id}


def test_a_script_keeps_nothing_and_touches_no_disk(start: Start, folder: Path) -> None:
    agent = start(at_prompt=False)
    play(agent, "first")
    play(agent, "second")
    assert asked(agent) == ["first", "One said", "second"]
    end(agent)
    assert not folder.exists()


@pytest.mark.parametrize("flags", [{"save": "work"}, {"resume": "work"}, {"continue_last": True}])
def test_a_script_that_says_which_conversation_keeps_it(start: Start, folder: Path, flags: dict[str, object]) -> None:
    if "save" not in flags:
        agent = start(save="work")
        play(agent, "before")
        end(agent)
    agent = start(at_prompt=False, **flags)
    play(agent, "kept")
    end(agent)
    with Store(folder) as store:
        assert "kept" in [stored.message.content for stored in store.path(store.find("work").id)]


def test_a_chat_that_is_ephemeral_keeps_nothing(start: Start, folder: Path) -> None:
    agent = start(ephemeral=True)
    play(agent, "secret")
    run(agent, "new")
    play(agent, "another")
    end(agent)
    assert not folder.exists()


def test_what_was_not_kept_is_kept_from_the_moment_it_gets_a_name(start: Start) -> None:
    agent = start(at_prompt=False)
    play(agent, "first")
    with pytest.raises(UsageError, match="/rename NAME keeps it"):
        run(agent, "fork")
    assert run(agent, "rename work").text == "This conversation is called work."
    play(agent, "second")
    end(agent)
    agent = start(resume="work")
    assert words(agent) == ["first", "One said", "second", "Two said"]


def test_a_store_that_cannot_be_used_keeps_nobody_from_talking_unless_it_was_asked_for(
    start: Start, folder: Path
) -> None:
    folder.mkdir(mode=0o700)
    (folder / "conversations.db").write_bytes(b"no database at all" * 100)
    agent = start()
    assert "set-aside" in str(agent.conversations.problem)
    assert play(agent, "hello").text == "One said"
    with pytest.raises(StoreError):
        start(continue_last=True)


def test_names_that_are_taken_or_missing_are_refused_at_the_start(start: Start) -> None:
    agent = start(save="work")
    play(agent, "first")
    end(agent)
    with pytest.raises(UsageError, match="a conversation 'work' already exists"):
        start(save="work")
    with pytest.raises(UsageError, match="did you mean 'work'"):
        start(resume="wrok")


def test_going_on_where_nothing_is_kept_is_refused(start: Start) -> None:
    with pytest.raises(UsageError, match="no conversations are kept"):
        start(continue_last=True)


@pytest.mark.parametrize("name", ["../../x", "a/b", "/tmp/x", "", "x" * 300, "a\0b", ".hidden"])
def test_names_that_look_like_paths_or_cannot_be_shown_are_refused(start: Start, name: str) -> None:
    with pytest.raises(UsageError):
        start(save=name)
    agent = start()
    play(agent, "first")
    for command in ("rename", "fork"):
        if name:
            with pytest.raises(UsageError):
                run(agent, f"{command} {name}")
    assert agent.live is not None
    assert agent.live.info.name == "first"


def test_a_conversation_that_goes_on_elsewhere_is_refused_with_the_process_and_what_to_do(start: Start) -> None:
    agent = start(save="work")
    play(agent, "first")
    with pytest.raises(ConversationInUseError, match="conversation 'work' is already open in this program"):
        start(resume="work")
    other = start()
    play(other, "mine")
    with pytest.raises(ConversationInUseError):
        run(other, "resume work")
    assert words(other) == ["mine", "One said"]  # where it was
    assert "Two said" in play(other, "next").text


# -- which one goes on -------------------------------------------------------------------------------------------------


def test_new_and_reset_begin_another_and_the_last_one_is_kept(start: Start) -> None:
    agent = start()
    play(agent, "first")
    assert run(agent, "new").text == "A new conversation. first is kept."
    play(agent, "second")
    assert asked(agent) == ["second"]
    assert run(agent, "reset").text == "A new conversation. second is kept."
    assert agent.engine.forgotten == []
    assert [line.split(" |")[0] for line in recent(agent)[1:3]] == ["second", "first"]


def test_resume_goes_on_under_the_system_prompt_of_the_conversation(start: Start) -> None:
    agent = start(system="Be brief.")
    play(agent, "first")
    run(agent, "new")
    run(agent, "system Be long.")
    play(agent, "second")
    run(agent, "resume first")
    play(agent, "third")
    assert asked(agent) == ["Be brief.", "first", "One said", "third"]
    run(agent, "resume")  # the one used last
    assert agent.settings.system == "Be long."


def test_a_system_prompt_given_at_the_start_counts_before_that_of_the_conversation(start: Start) -> None:
    agent = start(system="Be brief.", save="work")
    play(agent, "first")
    end(agent)
    agent = start(system="Be long.", resume="work")
    play(agent, "second")
    assert asked(agent)[0] == "Be long."
    assert agent.live is not None
    assert agent.live.info.system == "Be long."


def test_a_resumed_conversation_shows_where_it_stands(start: Start) -> None:
    agent = start()
    play(agent, "\n".join(f"line {number}" for number in range(20)))
    end(agent)
    lines = resumed(start(continue_last=True)).splitlines()
    assert lines[0].startswith('Continuing "line 0 line 1')
    assert lines[1:3] == ["> line 0", "line 1"]
    assert lines[-2:] == ["…", "One said"]


def test_a_resumed_conversation_shows_words_of_people_and_model_not_what_tools_said(start: Start) -> None:
    agent = start()
    play(agent, "what is here?")
    assert agent.live is not None
    result = Message(role="tool", content="a.txt", tool_call_id="1", name="list_files")
    with agent.live.reply_to([result], model=agent.model) as draft:
        draft.finish(Message(role="assistant", content=""))
    end(agent)
    assert resumed(start(continue_last=True)).splitlines()[1:] == ["> what is here?", "One said"]


def test_ids_of_another_model_are_left_out_and_used_again_when_it_is_back(start: Start) -> None:
    agent = start(save="work")
    play(agent, "first")
    end(agent)
    agent = start(resume="work", model="Other")
    assert "The model of its last turn was Scripted." in resumed(agent)
    play(agent, "second")
    assert [message.ids for message in agent.engine.requests[0].messages] == [None, None, None]
    end(agent)
    agent = start(resume="work")
    play(agent, "third")
    assert [message.ids for message in agent.engine.requests[0].messages] == [None, (0, 1, 2), None, None, None]


def test_fork_goes_on_with_a_copy_and_leaves_the_first_as_it_was(start: Start) -> None:
    agent = start(save="work")
    play(agent, "first")
    assert run(agent, "fork other").text == 'Continuing in a copy, "other".'
    play(agent, "second")
    assert words(agent) == ["first", "One said", "second", "Two said"]
    run(agent, "resume work")
    assert words(agent) == ["first", "One said"]
    assert run(agent, "fork").text == 'Continuing in a copy, "work (2)".'


def test_rename_gives_a_name_also_before_the_first_turn(start: Start) -> None:
    agent = start()
    run(agent, "rename work")
    play(agent, "first")
    assert agent.live is not None
    assert agent.live.info.name == "work"
    with pytest.raises(UsageError, match="the name has the character"):
        run(agent, "rename a\x1bb")


def test_delete_needs_a_name_and_leaves_nothing(start: Start, folder: Path) -> None:
    agent = start(save="work")
    play(agent, "very secret words")
    with pytest.raises(UsageError, match="this conversation is called work"):
        run(agent, "delete")
    id = agent.live.id
    assert run(agent, "delete work").text == "Deleted work."
    assert agent.live is None
    assert agent.engine.forgotten == [id]
    assert run(agent, "sessions").text == "No conversations are kept."
    assert b"secret" not in b"".join(path.read_bytes() for path in folder.iterdir())
    play(agent, "on")
    assert asked(agent) == ["on"]


def test_sessions_lists_them_and_marks_the_one_that_goes_on(start: Start) -> None:
    agent = start()
    for question in ("first", "second", "third"):
        run(agent, "new")
        play(agent, question)
    run(agent, "resume first")
    header, *rows = run(agent, "sessions").shown(200).splitlines()
    assert header.split() == ["name", "last", "used", "messages", "tokens", "cache", "a", "token"]
    assert [row.split()[:2] for row in rows[:2]] == [["*", "first"], ["third", rows[1].split()[1]]]
    assert run(agent, "sessions 2").text.splitlines()[-1] == "/sessions N shows more"


def test_a_list_of_conversations_leaves_out_what_has_no_room_and_counts_cells(start: Start) -> None:
    agent = start()
    for question in ("plain", "日本語 🙂"):
        run(agent, "new")
        play(agent, question)
    header, *rows = run(agent, "sessions").shown(40).splitlines()
    assert header.split() == ["name", "last", "used", "messages"]
    assert {width(row[: row.index("20")]) for row in rows} == {width(header[: header.index("last")])}
    assert all(width(row) <= 40 for row in rows)


def test_names_of_conversations_are_completed_also_those_of_several_words(start: Start) -> None:
    agent = start()
    play(agent, "Why is the sky blue?")
    (found,) = COMMANDS.completions(agent, "/resume Why is")
    assert (found.text, found.num_typed) == ("Why is the sky blue?", len("Why is"))
    assert [found.text for found in COMMANDS.completions(agent, "/delete ")] == ["Why is the sky blue?"]


# -- said again --------------------------------------------------------------------------------------------------------


def test_retry_asks_the_last_question_again_and_keeps_the_first_reply_beside(start: Start) -> None:
    agent = start()
    play(agent, "first")
    play(agent, run(agent, "retry").ask)
    assert asked(agent) == ["first"]
    assert words(agent) == ["first", "Two said"]
    assert agent.live is not None
    assert [stored.message.content for stored in agent.live.tree()] == ["first", "One said", "Two said"]


def test_edit_replaces_the_last_question_and_keeps_the_first_beside(start: Start) -> None:
    agent = start()
    play(agent, "first")
    play(agent, "secnod")
    before = run(agent, "edit").edit
    assert before is not None
    assert before.text == "secnod"
    play(agent, run(agent, "edit second").ask)
    assert asked(agent) == ["first", "One said", "second"]
    assert words(agent) == ["first", "One said", "second", "Three said"]
    assert len(agent.live.tree()) == 6


def test_the_first_question_can_be_edited_too(start: Start) -> None:
    agent = start()
    play(agent, "frist")
    play(agent, run(agent, "edit first").ask)
    assert asked(agent) == ["first"]
    assert words(agent) == ["first", "Two said"]


def test_undo_stands_before_a_question_and_nothing_is_lost(start: Start) -> None:
    agent = start()
    for question in ("first", "second", "third"):
        play(agent, question)
    assert run(agent, "undo").text == "Undone: third\nThe conversation has 4 messages."
    assert run(agent, "undo 2").text == "Undone: first\nThe conversation has 0 messages."
    play(agent, "fourth")
    assert asked(agent) == ["fourth"]
    assert len(agent.live.tree()) == 8
    for wrong in ("undo 2", "undo 0", "undo x"):
        with pytest.raises(UsageError):
            run(agent, wrong)


@pytest.mark.parametrize("line", ["undo", "retry", "edit x", "edit", "fork", "export out.md"])
def test_before_anything_is_said_there_is_nothing_to_do(start: Start, line: str) -> None:
    for agent in (start(), start(save="named")):
        with pytest.raises(UsageError):
            run(agent, line)


@pytest.mark.parametrize("error", ["context", "template", "engine", "bug"])
def test_a_turn_that_fails_leaves_the_conversation_and_retry_asks_it_again(start: Start, error: str) -> None:
    agent = start(TURNS[0], ScriptedTurn(error=error), TURNS[2])
    play(agent, "first")
    with pytest.raises((GoinferError, ZeroDivisionError)):
        play(agent, "second")
    assert words(agent) == ["first", "One said"]
    play(agent, run(agent, "retry").ask)
    assert words(agent) == ["first", "One said", "second", "Three said"]


@pytest.mark.parametrize(("line", "at_prompt"), [("fork copy", True), ("rename copy", False)])
def test_a_question_without_an_answer_goes_along_to_a_copy_and_stays_out_of_the_first(
    start: Start, line: str, at_prompt: bool
) -> None:
    agent = start(TURNS[0], ScriptedTurn(error="engine"), *TURNS[1:], at_prompt=at_prompt)
    play(agent, "first")
    with pytest.raises(EngineError):
        ask(agent, "second")
    run(agent, line)
    play(agent, run(agent, "retry").ask)
    store, id = agent.conversations.store, agent.live.id
    assert words(agent) == ["first", "One said", "second", "Two said"]
    assert all(store.path(id, stored.id) for stored in store.path(id))  # each is the copy's own
    play(agent, run(agent, "retry").ask)
    assert words(agent) == ["first", "One said", "second", "Three said"]
    assert {len(store.path(other.id)) for other in store.recent() if other.id != id} in ({2}, set())


def test_an_engine_that_fails_in_mid_reply_leaves_the_words_beside_the_conversation(start: Start) -> None:
    agent = start()
    play(agent, "first")

    def failing(_turn: ScriptedTurn, _request: object) -> Iterator[object]:
        yield from list(play_pieces(_turn, _request))[:3]
        raise EngineError("it cannot go on")

    play_pieces, agent.engine._play = agent.engine._play, failing
    with pytest.raises(EngineError):
        play(agent, "second")
    assert words(agent) == ["first", "One said"]
    failed = agent.live.tree()[-1]
    assert (failed.message.content, failed.finish_reason) == ("Two ", "failed")
    agent.engine._play = play_pieces
    play(agent, "third")
    assert asked(agent) == ["first", "One said", "third"]


def test_a_reply_that_was_stopped_is_kept_as_it_is(start: Start) -> None:
    agent = start()
    cancel = threading.Event()
    for event in agent.ask(Ask(text="first"), cancel):
        if getattr(event, "text", "") == "One":
            cancel.set()
    path = agent.live.path()
    assert [(stored.message.content, stored.finish_reason) for stored in path] == [
        ("first", None),
        ("One", "cancelled"),
    ]


def test_a_turn_stopped_before_its_first_word_is_not_kept_and_can_be_asked_again(start: Start, folder: Path) -> None:
    agent = start()
    cancel = threading.Event()
    cancel.set()
    list(agent.ask(Ask(text="first"), cancel))
    assert agent.live.tree() == []
    play(agent, run(agent, "retry").ask)
    assert words(agent) == ["first", "Two said"]


def test_a_question_that_a_crash_left_unanswered_is_offered_again(start: Start, folder: Path) -> None:
    agent = start(save="work")
    play(agent, "first")
    events = agent.ask(Ask(text="second"), threading.Event())
    next(events)  # the question is saved, and no word of the reply
    crashed = start_copy(folder)
    later = start(session_dir=str(crashed), resume="work")
    assert "This got no answer: second\n/retry asks it again." in resumed(later)
    play(later, run(later, "retry").ask)
    assert asked(later) == ["first", "One said", "second"]
    assert words(later) == ["first", "One said", "second", "One said"]
    events.close()


def start_copy(folder: Path) -> Path:
    """The folder as a crash at this moment would leave it."""
    copy = folder.with_name("copy")
    copy.mkdir(mode=0o700)
    for path in folder.iterdir():
        if path.suffix != ".lock":
            (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_a_reply_that_could_not_be_saved_while_it_ran_says_so(start: Start) -> None:
    agent = start()
    notices = []
    for event in agent.ask(Ask(text="first"), threading.Event()):
        if getattr(event, "text", "") == "One":
            agent.live._draft.error = StoreError("the disk is full")
        if isinstance(event, Notice):
            notices.append(event.text)
    assert notices == ["the reply is saved, but while it ran that failed for a time: the disk is full"]
    assert words(agent) == ["first", "One said"]


# -- what is read again ------------------------------------------------------------------------------------------------


def before(agent: Agent, line: str) -> str:
    """What is said before a command, which has not changed anything then."""
    name, _, argument = line.partition(" ")
    stood = (agent.settings, agent.live and (agent.live.id, agent.live.info, agent.live.path()))
    said = COMMANDS.foresee(agent, CommandLine(name, argument))
    assert (agent.settings, agent.live and (agent.live.id, agent.live.info, agent.live.path())) == stood
    return said


LONG = "how do you do this"
"""With its answer 11 words as the scripted engine counts them."""


def test_before_a_command_that_costs_a_prefill_it_says_how_many_tokens_and_how_long(start: Start) -> None:
    agent = start()
    assert before(agent, "system Be brief, my friend.") == ""  # 8: a turn costs as much anyway
    assert before(agent, "system Be brief, my good friend.") == "The next turn prefills 9 tokens, about 2 s."
    play(agent, LONG)
    for line in ("system", "set system", "undo", "retry", "fork", "new", "temperature 1", "set think", "tools"):
        assert before(agent, line) == "", line
    assert before(agent, "system Be brief.") == "The next turn prefills 15 tokens, about 4 s."
    assert before(agent, "set system Be brief.") == "The next turn prefills 15 tokens, about 4 s."
    run(agent, "system Be brief.")
    assert before(agent, "fork") == "The next turn prefills 15 tokens, about 4 s."
    assert before(agent, "retry") == "The next turn prefills 11 tokens, about 3 s."
    assert before(agent, "undo") == ""  # only the system prompt is left
    assert before(agent, "system none") == ""
    run(agent, "system none")
    assert before(agent, f"edit {LONG} and that") == ""  # the start of it is known
    assert before(agent, f"edit {LONG.upper()} OR THAT, MY FRIEND") == "The next turn prefills 10 tokens, about 2 s."
    assert before(agent, "edit") == ""  # the text is not there yet
    assert "cache              1 bytes a token, 10 in all" in run(agent, "params").text
    end(agent)
    agent = start()
    assert before(agent, "resume") == "The next turn prefills 11 tokens, about 3 s."
    assert before(agent, f"resume {LONG}") == "The next turn prefills 11 tokens, about 3 s."
    play(agent, "x")
    assert before(agent, "resume nobody") == ""  # the command says what is wrong


def test_tools_that_come_or_go_cost_what_is_said_before(start: Start, tmp_path: Path) -> None:
    agent = start(root=str(tmp_path))
    names = [tool.name for tool in agent.open_toolbox().registry.tools]
    assert before(agent, "tools on") == f"The next turn prefills {len(names) + 2} tokens, about 2 s."
    play(agent, LONG)
    assert before(agent, "tools on") == f"The next turn prefills {len(names) + 11} tokens, about 4 s."
    assert before(agent, f"tools {names[0]}") == "The next turn prefills 12 tokens, about 3 s."
    assert before(agent, f"call {names[0]}") == "The next turn prefills 12 tokens, about 3 s."
    assert before(agent, "tools nothing_such") == before(agent, "tools off") == before(agent, "tools") == ""
    assert agent.toolbox is not None
    assert agent.toolbox.in_use == ()


def test_an_unkept_conversation_takes_what_it_shares_along_when_a_new_one_begins(start: Start) -> None:
    system = f"{LONG} {LONG}"
    agent = start(at_prompt=False, system=system)
    play(agent, "x")
    assert before(agent, "new") == "The next turn prefills 14 tokens, about 4 s."
    kept = start(system=system)
    play(kept, "x")
    assert before(kept, "new") == ""


@pytest.mark.parametrize("line", [f"sessions {10**30}", "export /", "export ."])
def test_what_no_store_and_no_folder_takes_is_wrong_usage(start: Start, line: str) -> None:
    agent = start()
    play(agent, "a b c")
    with pytest.raises(UsageError):
        run(agent, line)


def test_what_is_refused_is_not_said_to_cost_anything(start: Start) -> None:
    agent = start()
    play(agent, LONG)
    run(agent, "new")
    other = start()
    other.resume(None)
    assert before(agent, "resume") == ""
    with pytest.raises(ConversationInUseError):
        run(agent, "resume")
    assert before(other, "undo 9") == before(other, "set nothing 1") == before(other, "model x") == ""


def test_the_prompt_tells_the_day_the_conversation_began(start: Start) -> None:
    agent = start()
    play(agent, "first")
    agent.live.set_settings({"date": "2024-02-29"})
    end(agent)
    agent = start(continue_last=True)
    play(agent, "second")
    run(agent, "new")
    play(agent, "third")
    then, now = [dict(request.template_kwargs) for request in agent.engine.requests]
    assert then == {"date_string": "29 Feb 2024"}
    assert now == {"date_string": date.today().strftime("%d %b %Y")}  # noqa: DTZ011 - the day here


# -- words -------------------------------------------------------------------------------------------------------------


def test_search_finds_words_of_all_conversations(start: Start) -> None:
    agent = start()
    play(agent, "the quick brown fox")
    run(agent, "new")
    play(agent, "a lazy dog")
    assert [row for row in run(agent, "search brown fox").shown(18).splitlines() if row[:1] == " "] == [
        "    the quick",
        "    brown fox",
    ]
    assert run(agent, "search unheard").text == "Nothing was found."
    with pytest.raises(UsageError, match="nothing to search for"):
        run(agent, "search ")


@pytest.mark.parametrize("kept", [True, False])
def test_export_writes_markdown_or_json_and_replaces_nothing(start: Start, tmp_path: Path, kept: bool) -> None:
    agent = start(ephemeral=not kept)
    play(agent, "first\x1b[2J")
    run(agent, f"export {tmp_path}/out.md")
    assert (tmp_path / "out.md").read_text().endswith("## You\n\nfirst[2J\n\n## Assistant\n\nOne said\n")
    run(agent, f"export {tmp_path}/out.json")
    exported = json.loads((tmp_path / "out.json").read_text())
    assert [message["content"] for message in exported["messages"]] == ["first\x1b[2J", "One said"]
    with pytest.raises(UsageError, match=r"out\.json already exists"):
        run(agent, f"export {tmp_path}/out.json")
    with pytest.raises(UsageError, match="cannot be written"):
        run(agent, f"export {tmp_path}/no/such/folder.md")
