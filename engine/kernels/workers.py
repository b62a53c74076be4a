"""Threads that run a step together.

The helpers live as long as the model. Between steps they look for the next one for a few milliseconds inside compiled
code, then sleep in Python until one is started, so an idle program uses no CPU.
"""

from __future__ import annotations

import ctypes
import threading


class Workers:
    """`num_threads` threads, the caller included, that run `step(context, thread, seen)`."""

    def __init__(self, step_address: int, context_address: int, num_threads: int) -> None:
        # CFUNCTYPE releases the GIL for the length of the call.
        self._step = ctypes.CFUNCTYPE(ctypes.c_int64, *[ctypes.c_int64] * 3)(step_address)
        self._context = context_address
        self._wake = threading.Condition()
        self._started = 0
        self._sleeping = 0
        self._closed = False
        self._helpers = [
            threading.Thread(target=self._help, args=(t,), name=f"goinfer-{t}", daemon=True)
            for t in range(1, num_threads)
        ]
        for helper in self._helpers:
            helper.start()

    def run(self) -> None:
        """Run one step. The context holds its rows."""
        assert not self._closed, "the model is closed"
        with self._wake:
            # Before compiled code counts the step: a helper that goes to sleep now sees it and does not.
            self._started += 1
            if self._sleeping:
                self._wake.notify_all()
        self._step(self._context, 0, 0)

    def _help(self, thread: int) -> None:
        seen = 0
        while True:
            with self._wake:
                self._sleeping += 1
                while not self._closed and self._started <= seen:
                    self._wake.wait()
                self._sleeping -= 1
                if self._closed:
                    return
            # Runs every step started so far and those that follow closely.
            seen = self._step(self._context, thread, seen)

    def close(self) -> None:
        """End the helpers; the memory that the context points to may be freed after this."""
        with self._wake:
            self._closed = True
            self._wake.notify_all()
        for helper in self._helpers:
            helper.join()
