"""The peer in a process of its own, so that it is an extra: nothing of it is imported here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import EngineError, UsageError

PEERS: Final = {"llama.cpp": ("llama_cpp", "llama-cpp-python"), "openvino": ("openvino_genai", "openvino-genai")}
"""The module that the peer's Python imports, and the package that has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerChoice:
    """Which peer, and the Python that has it. Raises UsageError for one that is not known."""

    name: str = "llama.cpp"
    python: str = sys.executable

    def __post_init__(self) -> None:
        if self.name not in PEERS:
            raise UsageError(f"unknown peer {self.name!r}; choose from: {', '.join(PEERS)}")


class Peer:
    """A model loaded by a peer, which idles between requests. Use as a context manager or close it."""

    def __init__(self, choice: PeerChoice, model: Path, *, threads: int, num_positions: int) -> None:
        """Raises UsageError when that Python cannot be run or has not the peer's package, EngineError when it fails."""
        self.name = choice.name
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - until close
        script = Path(__file__).with_name("peer.py")
        try:
            self._process = subprocess.Popen(
                [choice.python, str(script), choice.name, str(model), str(threads), str(num_positions)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
                # Or modules beside the script would stand before those that it imports.
                env=os.environ | {"PYTHONSAFEPATH": "1"},
            )
        except OSError as error:
            self._errors.close()
            raise UsageError(f"{choice.python} cannot be run: {error.strerror}") from None
        try:
            about = self._answer()
        except EngineError as error:
            self.close()
            module, package = PEERS[choice.name]
            if f"No module named '{module}'" in str(error):
                raise UsageError(
                    f"{choice.python} has no {package}; pip install it there, or name another Python with --peer-python"
                ) from None
            raise
        except BaseException:
            self.close()
            raise
        self.version: str = about["version"]
        self.system: str = about["system"]

    def prompt(self, ids: Sequence[int], *, reuse: bool = False) -> float:
        """Seconds to the logits of the last id, from an empty cache or from the start that both prompts share."""
        return float(self._ask(do="prompt", ids=list(ids), reuse=reuse)["seconds"])

    def decode(self, before: Sequence[int], ids: Sequence[int]) -> float:
        """Seconds to run `ids` one by one, with `before` in the cache."""
        return float(self._ask(do="decode", before=list(before), ids=list(ids))["seconds"])

    def close(self) -> None:
        with suppress(OSError):  # it may have ended already
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise EngineError(f"{self.name} has ended: {self._last_words()}") from None
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EngineError(f"{self.name} has ended: {self._last_words()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines()
        return lines[-1] if lines else "it said nothing"
