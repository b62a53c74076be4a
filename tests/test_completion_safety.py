"""Names of conversations that a shell would run or part: real shells are offered none of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pty_terminal import Terminal, shell_environment
from store_helpers import kept

from goinfer_chat.store import Store

START = {
    "bash": ["bash", "--norc", "--noprofile", "-i"],
    "zsh": ["zsh", "-f", "-i"],
    "fish": ["fish", "--no-config", "--private"],
}
READ = {
    "bash": "source <(goinfer-chat --show-completion); bind 'set bell-style none'\n",
    "zsh": "bindkey -e; autoload -U compinit; compinit -u -D; source <(goinfer-chat --show-completion)\n",
    "fish": "goinfer-chat --show-completion | source\n",
}
ASK = {
    "bash": "goinfer-chat --resume x\t",
    "zsh": "goinfer-chat --resume x\t",
    "fish": "complete -C 'goinfer-chat --resume x'\n",
}


@pytest.mark.parametrize("shell", START)
def test_no_name_of_a_conversation_runs_a_command_at_a_tab(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    ran = tmp_path / "ran"
    with Store(tmp_path / "sessions") as store:
        for name in ("x $(touch ran)", "x$(touch ran)", "x`touch ran`", 'x";touch ran;"', "x';touch ran;'", "x:touch"):
            kept(store, ("hi", "hello"), name=name)
        kept(store, ("hi", "hello"), name="xsafe-1.2")
    with Terminal(START[shell], env=shell_environment(tmp_path), columns=200) as terminal:
        terminal.send(f"cd '{tmp_path}'\n" + READ[shell] + "echo COMPLETION''READ\n")
        terminal.wait("COMPLETIONREAD")
        terminal.settle(0.2)
        terminal.send(ASK[shell])
        terminal.wait("xsafe-1.2")
        assert not ran.exists()
        assert "touch" not in terminal.text
