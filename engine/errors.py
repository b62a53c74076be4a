"""Everything that can go wrong for a user, as one tree.

    GoinferError                 what happened, where, what to do
    ├── UsageError               a flag, command or setting that cannot be obeyed
    │   └── SchemaError          a JSON schema that replies or calls cannot be held to
    ├── ModelError               the model cannot be used
    │   ├── ModelNotFoundError   no such file, catalogue name or hub repository
    │   ├── ModelFileError       a GGUF that is damaged, cut or hostile
    │   ├── UnsupportedModelError  an architecture, tensor type or CPU this engine does not run
    │   ├── DownloadError        a model could not be fetched or failed its checksum
    │   └── OutOfMemoryError     weights and cache do not fit into the memory that is free
    ├── TemplateError            a chat template that refuses the messages or cannot be rendered
    ├── ContextExceededError     a prompt longer than the context
    └── EngineError              the engine cannot go on with this request

Whatever comes from a file, a flag, the network, a model or a tool raises one of these; `assert` is for
our own mistakes only. The message is one sentence a user can act on, and only the CLI, the REPL and
the server show it.
"""

from __future__ import annotations

MAX_QUOTED = 500
"""Characters of what others said in a message at most."""

MAX_MESSAGE = 2000
"""Characters of a message at most."""


class GoinferError(Exception):
    """The root. `exit_code` is what the program returns when nothing catches it (docs/cli.md).

    Messages quote what files, servers and models say, which may be of any length: of a long one the start and the end
    are kept.
    """

    exit_code = 1

    def __init__(self, message: str = "") -> None:
        if len(message) > MAX_MESSAGE:
            message = f"{message[: MAX_MESSAGE // 2]} ... {message[-MAX_MESSAGE // 4 :]}"
        super().__init__(message)


class UsageError(GoinferError):
    """Something that was asked for cannot be done as it was asked."""

    exit_code = 2


class SchemaError(UsageError):
    """Raised before anything is generated; names the keyword and where in the schema it stands."""


class ModelError(GoinferError):
    """A model cannot be used."""

    exit_code = 3


class ModelNotFoundError(ModelError):
    """Nothing has this name: no file, no entry of the catalogue, no repository."""


class ModelFileError(ModelError):
    """The file contradicts its format or itself; says where."""


class UnsupportedModelError(ModelError):
    """The file may be right, and this engine does not run it; says what is supported instead."""


class DownloadError(ModelError):
    """What was to be fetched is not there, or is not what it should be."""


class OutOfMemoryError(ModelError):
    """Says both numbers: what is needed and what is free."""


class TemplateError(GoinferError):
    """Has the template's own words, where it has any."""


class ContextExceededError(GoinferError):
    """Raised with both numbers; `prompt_tokens` and `context_size` carry them for callers.

    `prompt_tokens` must be less than `context_size`: one position is needed for the reply.
    """

    exit_code = 4

    def __init__(self, prompt_tokens: int, context_size: int) -> None:
        over = prompt_tokens - context_size + 1
        super().__init__(
            f"the prompt has {prompt_tokens:,} tokens, which is {over:,} more than fit into the context of "
            f"{context_size:,} (one is kept for the reply); shorten it, or start with a larger --ctx"
        )
        self.prompt_tokens = prompt_tokens
        self.context_size = context_size


class EngineError(GoinferError):
    """A request cannot go on. Others are not affected, unless the engine is closed."""


def one_line(said: object) -> str:
    """What a file, a server or a library said, to be a part of a message: without control characters, and not too long
    to read."""
    text = " ".join("".join(c if c.isprintable() else " " for c in str(said)).split())
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
