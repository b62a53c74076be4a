"""A server under load: how long answers take, who is refused, what is left afterwards.

    python tests/server_load.py MODEL [--clients 1 4 16 64] [--seconds 10] [--connections 1100]

Starts `goinfer-chat serve` in a process of its own and asks it on the loopback, each client one request after the
other. A client that is refused waits for what `Retry-After` says, at most a second. Prints a row of a table for each
number of clients; the last one has the idle connections open beside one client.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = (
    "| clients | answers/s | median s | 95 % s | longest s | refused | other errors | memory MB | alone after it s |"
)


@dataclass
class Outcome:
    """What the clients of one round met."""

    seconds: list[float] = field(default_factory=list)
    refused: int = 0
    errors: list[str] = field(default_factory=list)

    def row(self, name: str, duration: float, memory: float, after: float) -> str:
        took = sorted(self.seconds) or [float("nan")]
        asked = len(self.seconds) + self.refused + len(self.errors)
        return (
            f"| {name} | {len(self.seconds) / duration:.1f} | {took[len(took) // 2]:.2f} "
            f"| {took[int(len(took) * 0.95)]:.2f} | {took[-1]:.2f} | {self.refused / max(1, asked):.0%} "
            f"| {len(self.errors)} | {memory:.0f} | {after:.2f} |"
        )


@contextlib.contextmanager
def serving(model: str, *flags: str) -> Iterator[tuple[int, int]]:
    """(port, pid) of a server that runs until the end of the block."""
    command = [sys.executable, "-m", "goinfer_chat", "serve", "--port", "0", "--model", model, *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        yield int(line.rsplit(":", 1)[1]), process.pid
    finally:
        process.terminate()
        process.wait(30)


def ask(port: int, text: str, max_tokens: int, timeout: float = 120) -> tuple[int, dict[str, str]]:
    """Status and headers of one whole chat completion."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body))
        answer = connection.getresponse()
        content = json.loads(answer.read())
        assert ("choices" in content) == (answer.status == 200)
        return answer.status, dict(answer.getheaders())
    finally:
        connection.close()


def one_client(port: int, name: str, until: float, outcome: Outcome, lock: threading.Lock) -> None:
    number = 0
    while time.monotonic() < until:
        number += 1
        started = time.monotonic()
        try:
            status, headers = ask(port, f"I am {name}. Say something about the number {number}.", 24)
        except (OSError, http.client.HTTPException, ValueError, AssertionError) as error:
            with lock:
                outcome.errors.append(repr(error))
            time.sleep(0.1)
            continue
        with lock:
            if status == 200:
                outcome.seconds.append(time.monotonic() - started)
            elif status == 429:
                outcome.refused += 1
            else:
                outcome.errors.append(str(status))
        if status == 429:
            time.sleep(min(1.0, float(headers.get("retry-after", "1"))))


def load(port: int, clients: int, seconds: float) -> Outcome:
    outcome, lock = Outcome(), threading.Lock()
    until = time.monotonic() + seconds
    threads = [
        threading.Thread(target=one_client, args=(port, f"client {number}", until, outcome, lock))
        for number in range(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcome


def memory_mb(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1000
    return float("nan")


def seconds_alone(port: int) -> float:
    started = time.monotonic()
    status, _ = ask(port, "Hello.", 24)
    assert status == 200
    return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--connections", type=int, default=1100)
    flags = parser.parse_args()
    print(HEADER + "\n|" + "---|" * (HEADER.count("|") - 1))
    with serving(flags.model, "--ctx", "1024") as (port, pid):
        seconds_alone(port)
        for clients in flags.clients:
            outcome = load(port, clients, flags.seconds)
            after = seconds_alone(port)
            print(outcome.row(str(clients), flags.seconds, memory_mb(pid), after), flush=True)
            for error in sorted(set(outcome.errors)):
                print(f"    {outcome.errors.count(error)} x {error}", file=sys.stderr)
        silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(flags.connections)]
        outcome = load(port, 1, flags.seconds)
        for connection in silent:
            connection.close()
        after = seconds_alone(port)
        print(outcome.row(f"1, beside {flags.connections:,} idle", flags.seconds, memory_mb(pid), after))
        for error in sorted(set(outcome.errors)):
            print(f"    {outcome.errors.count(error)} x {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
