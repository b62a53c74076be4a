"""Keys of servers: from the environment or the system's keyring, never from a flag or a file of ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

VARIABLE: Final = "GOINFER_CHAT_API_KEY"
SERVICE: Final = "goinfer-chat"


def api_key(base_url: str, environ: Mapping[str, str]) -> str | None:
    """The key for a server: the variable, else what the keyring has under the server's name; None for none.

    The keyring is the `keyring` package, where it is installed: `keyring set goinfer-chat HOST`.
    """
    if environ.get(VARIABLE):
        return environ[VARIABLE]
    try:
        import keyring
    except ImportError:
        return None
    try:
        found = keyring.get_password(SERVICE, urlsplit(base_url).netloc)
    except Exception:  # noqa: BLE001 - a keyring that is locked or broken is none
        return None
    return found if isinstance(found, str) else None
