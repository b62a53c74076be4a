"""The program: command line, REPL, agent loop, conversation store and server, over `engine` and `tools`."""

from __future__ import annotations

import os.path
import sys
from importlib.machinery import ModuleSpec, PathFinder

__version__ = "0.1.0"


class _OurOwn:
    """Finds `engine` and `tools` beside this package, whatever else on sys.path has those names.

    Both are common names: a project's own `tools` in the working folder or on PYTHONPATH must neither stand in for
    ours nor be run.
    """

    # Not with pathlib, which imports for some 20 ms: until `start.main` runs, Ctrl-C is a traceback.
    _root = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [cls._root]) if name in ("engine", "tools") else None


if _OurOwn not in sys.meta_path:
    sys.meta_path.insert(0, _OurOwn)
