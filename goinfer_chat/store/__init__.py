"""Conversations that are kept: their words as a tree of messages in SQLite, with the files of their caches beside it.

folder.py         the folder, who may read it, locks
names.py          what a conversation may be called
database.py       the SQLite file: schema, migrations, transactions, errors
queries.py        all SQL on it (rows.py: the values in it)
live.py           a conversation that goes on, and the reply that is being written
conversations.py  the store: list, find, search, open, fork, delete (searching.py: what is searched for)
typed.py          what was typed at the prompt
unkept.py         a conversation in memory alone
exports.py        Markdown and JSON out, JSON in
records.py        what all of this is given and gives back
"""

from __future__ import annotations

from goinfer_chat.store.conversations import NewConversation, Store
from goinfer_chat.store.folder import session_folder, set_aside
from goinfer_chat.store.live import LiveConversation, ReplyDraft
from goinfer_chat.store.names import check_name, name_from
from goinfer_chat.store.records import (
    HEAD,
    Conversation,
    ConversationInUseError,
    Ending,
    Fork,
    ModelRef,
    SearchHit,
    StoredMessage,
    StoreError,
    for_model,
)
from goinfer_chat.store.unkept import UnkeptConversation

__all__ = [
    "HEAD",
    "Conversation",
    "ConversationInUseError",
    "Ending",
    "Fork",
    "LiveConversation",
    "ModelRef",
    "NewConversation",
    "ReplyDraft",
    "SearchHit",
    "Store",
    "StoreError",
    "StoredMessage",
    "UnkeptConversation",
    "check_name",
    "for_model",
    "name_from",
    "session_folder",
    "set_aside",
]
