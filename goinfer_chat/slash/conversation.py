"""Slash commands about conversations: choosing one, saying something in it again, keeping, copying and removing it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine.api import Prospect
from engine.errors import GoinferError, UsageError
from goinfer_chat.agent import Agent, Ask
from goinfer_chat.amounts import counted
from goinfer_chat.files import write_new
from goinfer_chat.foresight import Standing, about_to_ask, foresee, sentence, standing, undone
from goinfer_chat.listing import HEADINGS, SHORT, TRACES_LEFT, cells_of, excerpt, hit_rows, name_of, when
from goinfer_chat.slash.registry import Command, Outcome
from goinfer_chat.terminal import sanitize, true_text
from goinfer_chat.values import parse_int
from tools import TakenBack

LIST_LENGTH: Final = 20
NUM_RECENT: Final = 3
"""How many conversations a start shows."""
EARLIER: Final = "Earlier conversations (/resume NAME continues one, /sessions lists all):"


# -- how a conversation is named to the user ---------------------------------------------------------------------------


def called(agent: Agent) -> str:
    """Its name, and whether it is kept."""
    kept = agent.conversations.is_kept
    if agent.live is None:
        return "new" if kept else "new; it is not kept"
    return (agent.live.info.name or "not named yet") if kept else "not kept; /rename NAME keeps it"


def resumed(agent: Agent, *, with_words: bool = True) -> str:
    """Where the conversation stands that now goes on; for a person, also what was said last."""
    assert agent.live is not None
    info, path = agent.live.info, agent.live.path()
    lines = [f'Continuing "{name_of(info)}": {counted(len(path), "message")}.']
    if info.model is not None and info.model.identity != agent.model.identity:
        lines.append(f"The model of its last turn was {info.model.name}.")
    words = [
        stored for stored in path if stored.message.role in ("user", "assistant") and stored.message.content.strip()
    ]
    for stored in words[-2:] if with_words else ():  # what tools said is for the model
        text = excerpt(stored.message.content)
        lines.append(f"> {text}" if stored.message.role == "user" else text)
    for stored in agent.live.recovered[-1:]:
        if stored.message.role == "user":
            lines.append(f"This got no answer: {excerpt(stored.message.content, 1)}\n/retry asks it again.")
        else:
            lines.append("The program ended in this reply; /retry asks again.")
    return "\n".join(lines)


def recent(agent: Agent) -> list[str]:
    """How to go on with earlier conversations, and a line for each of those used last. Raises StoreError."""
    conversations = agent.conversations.recent(NUM_RECENT) if agent.conversations.keep else []
    lines = [
        f"{name_of(conversation)} | {counted(conversation.num_messages, 'message')} | {when(conversation.updated)}"
        for conversation in conversations
    ]
    return [EARLIER, *lines] if lines else []


# -- choosing one ------------------------------------------------------------------------------------------------------


def _new(agent: Agent, _argument: str) -> Outcome:
    parts = ["A new conversation."]
    if agent.live is not None:
        name = agent.live.info.name if agent.conversations.is_kept else None
        parts.append(f"{name} is kept." if name else "The last one is gone.")
    agent.new()
    if agent.settings.system is not None:
        parts.append("The system prompt stays.")
    return Outcome(" ".join(parts))


def _sessions(agent: Agent, argument: str) -> Outcome:
    limit = parse_int(argument) if argument else LIST_LENGTH
    if limit < 1:
        raise UsageError(f"the number of conversations must be 1 or more, not {limit}")
    conversations = agent.conversations.recent(limit + 1)
    if not conversations:
        return Outcome("No conversations are kept.")
    present = agent.live.id if agent.live else None
    rows: list[tuple[str, ...]] = [("", *HEADINGS[:SHORT])]
    for conversation in conversations[:limit]:
        cells = cells_of(agent.conversations.store, conversation)
        rows.append(("*" if conversation.id == present else "", *cells[:SHORT]))
    return Outcome("/sessions N shows more" if len(conversations) > limit else "", table=rows)


def _resume(agent: Agent, argument: str) -> Outcome:
    agent.resume(argument or None)
    return Outcome(resumed(agent))


def _rename(agent: Agent, argument: str) -> Outcome:
    if not argument:
        raise UsageError("/rename needs the new name")
    return Outcome(f"This conversation is called {agent.rename(argument)}.")


def _fork(agent: Agent, argument: str) -> Outcome:
    fork = agent.fork(argument or None)
    problem = f"\n{fork.kv_problem}" if fork.kv_problem else ""
    return Outcome(f'Continuing in a copy, "{name_of(fork.conversation)}".{problem}')


def _delete(agent: Agent, argument: str) -> Outcome:
    if not argument:
        present = agent.live.info.name if agent.live and agent.conversations.is_kept else None
        raise UsageError("/delete needs a name" + (f"; this conversation is called {present}" if present else ""))
    name, complete = agent.delete(argument)
    return Outcome(f"Deleted {name}." if complete else f"Deleted {name}; {TRACES_LEFT}.")


# -- saying something again --------------------------------------------------------------------------------------------


def _undo(agent: Agent, argument: str) -> Outcome:
    left, files = agent.undo(parse_int(argument) if argument else 1)
    assert agent.live is not None
    remaining = counted(len(agent.live.path()), "message")
    lines = [f"Undone: {excerpt(left[0].message.content, 1)}", f"The conversation has {remaining}."]
    return Outcome("\n".join([*lines, *undone_lines(files)]))


def undone_lines(files: Sequence[TakenBack]) -> list[str]:
    """What became of the files that tools had changed."""
    back = [file.path for file in files if file.problem is None]
    lines = [f"Restored: {', '.join(back)}"] if back else []
    return lines + [f"Not restored: {file.path}: {file.problem}" for file in files if file.problem is not None]


def _retry(agent: Agent, _argument: str) -> Outcome:
    return Outcome(ask=agent.retry())


def _edit(agent: Agent, argument: str) -> Outcome:
    return Outcome(ask=agent.edit(argument)) if argument else Outcome(edit=agent.edit())


# -- what they cost ----------------------------------------------------------------------------------------------------


def cost(agent: Agent, ask: Ask | None = None) -> str:
    """What to say before the next turn, or the one that asks this; nothing where it costs no more than any turn."""
    there = standing(agent) if ask is None else about_to_ask(agent, ask)
    with suppress(GoinferError):  # the next turn says it
        return sentence(agent, foresee(agent, there), with_problem=ask is None)
    return ""


def _cost_of_new(agent: Agent, _argument: str) -> Prospect | None:
    gone = agent.live.id if agent.live is not None and not agent.conversations.is_kept else None
    return foresee(agent, Standing(), forgotten=gone)


def _cost_of_resume(agent: Agent, argument: str) -> Prospect | None:
    conversations = agent.conversations
    conversation = conversations.store.find(argument) if argument else conversations.latest()
    conversations.store.check_free(conversation.id)
    there = Standing(path=conversations.store.path(conversation.id), conversation=conversation)
    return foresee(agent, there, settings=agent.settings.changed({"system": conversation.system}))


def _cost_of_fork(agent: Agent, _argument: str) -> Prospect | None:
    return foresee(agent, standing(agent))  # words and cache are the same


def _cost_of_undo(agent: Agent, argument: str) -> Prospect | None:
    return foresee(agent, undone(agent, parse_int(argument) if argument else 1))


def _cost_of_retry(agent: Agent, _argument: str) -> Prospect | None:
    return foresee(agent, about_to_ask(agent, agent.retry()))


def _cost_of_edit(agent: Agent, argument: str) -> Prospect | None:
    return foresee(agent, about_to_ask(agent, agent.edit(argument))) if argument else None


# -- words -------------------------------------------------------------------------------------------------------------


def _search(agent: Agent, argument: str) -> Outcome:
    hits = agent.conversations.store.search(argument, limit=LIST_LENGTH)
    return Outcome(rows=[row for hit in hits for row in hit_rows(hit)]) if hits else Outcome("Nothing was found.")


def _export(agent: Agent, argument: str) -> Outcome:
    from goinfer_chat.store.exports import to_json, to_markdown

    if not argument:
        raise UsageError("/export needs a file; one that ends in .json can be imported again, others are Markdown")
    if agent.live is None or not agent.live.path():
        raise UsageError("nothing has been said yet")
    file = Path(argument).expanduser()
    if file.suffix == ".json":
        text = to_json(agent.live.info, agent.live.tree())
    else:
        text = sanitize(to_markdown(agent.live.info, agent.live.path()), terminal=False)
    write_new(file, text)
    return Outcome(f"Written to {true_text(str(file))}.")


def _names(agent: Agent) -> Sequence[str]:
    with suppress(GoinferError):
        return [name_of(conversation) for conversation in agent.conversations.recent(100)]
    return ()


CONVERSATION_COMMANDS: Final = (
    Command(
        name="new",
        topic="conversations",
        help="Start a new conversation; the present one stays if it is kept.",
        run=_new,
        costs=_cost_of_new,
        aliases=("reset", "clear"),
    ),
    Command(
        name="sessions",
        arguments="[N]",
        topic="conversations",
        help="List the kept conversations, the most recently used first.",
        run=_sessions,
    ),
    Command(
        name="resume",
        arguments="[NAME]",
        topic="conversations",
        help="Continue a kept conversation; without a name, the one used last.",
        run=_resume,
        costs=_cost_of_resume,
        tells_problem=True,
        complete=_names,
    ),
    Command(
        name="rename",
        arguments="NAME",
        topic="conversations",
        help="Rename this conversation; one that was not kept is kept from here on.",
        run=_rename,
    ),
    Command(
        name="fork",
        arguments="[NAME]",
        topic="conversations",
        help="Continue in a copy of this conversation.",
        run=_fork,
        costs=_cost_of_fork,
    ),
    Command(
        name="undo",
        arguments="[N]",
        topic="asking again",
        help="Take back the last question and its answer, or the last N; files that tools changed are restored.",
        run=_undo,
        costs=_cost_of_undo,
    ),
    Command(name="retry", topic="asking again", help="Ask the last question again.", run=_retry, costs=_cost_of_retry),
    Command(
        name="edit",
        arguments="[TEXT]",
        topic="asking again",
        help="Replace the last question by TEXT and ask again; without TEXT, edit it in $EDITOR.",
        run=_edit,
        costs=_cost_of_edit,
    ),
    Command(
        name="delete",
        arguments="NAME",
        topic="conversations",
        help="Delete a conversation and its cache for good.",
        run=_delete,
        complete=_names,
    ),
    Command(
        name="search",
        arguments="WORDS",
        topic="conversations",
        help="Find messages that contain all the words.",
        run=_search,
    ),
    Command(
        name="export",
        arguments="FILE",
        takes_file=True,
        topic="conversations",
        help="Write this conversation to FILE, as JSON if its name ends in .json, else as Markdown.",
        run=_export,
    ),
)
