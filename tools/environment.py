"""The environment of programs that a tool starts: what they need to run, and no secrets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Final

# What is known to be needed, not everything but what looks like a secret: nobody knows all the names of secrets.
_NAMES: Final = """
    PATH HOME USER LOGNAME SHELL LANG LANGUAGE TZ TMPDIR TMP TEMP SYSTEMROOT LD_LIBRARY_PATH DYLD_LIBRARY_PATH
    VIRTUAL_ENV CONDA_PREFIX CONDA_DEFAULT_ENV PYTHONPATH PYTHONDONTWRITEBYTECODE PYENV_ROOT
    JAVA_HOME GOPATH GOROOT GOCACHE GOFLAGS CARGO_HOME RUSTUP_HOME NVM_DIR NODE_PATH GEM_HOME GEM_PATH
    CC CXX CFLAGS CXXFLAGS LDFLAGS PKG_CONFIG_PATH CPATH LIBRARY_PATH
    XDG_CACHE_HOME XDG_CONFIG_HOME XDG_DATA_HOME NO_PROXY
"""
PASSED: Final = frozenset(_NAMES.split())
# Without a terminal: no colours, no pager, no editor, no question.
FIXED: Final[Mapping[str, str]] = {
    "TERM": "dumb",
    "NO_COLOR": "1",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_EDITOR": "true",
}


def safe_environment(environ: Mapping[str, str] = os.environ, more: Iterable[str] = ()) -> dict[str, str]:
    """The variables that are known to be harmless, the further ones that were asked for, and FIXED."""
    wanted = PASSED | set(more)
    passed = {name: value for name, value in environ.items() if name in wanted or name.startswith("LC_")}
    return {**passed, **{name: value for name, value in FIXED.items() if name not in set(more)}}
