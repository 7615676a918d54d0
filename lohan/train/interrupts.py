"""Ctrl-C, TERM and HUP: the first lets the step finish, the second leaves at once. USR1: pause after this step, and go on.

Python runs its signal handlers between two instructions of the main thread, which a long operation of torch or a read of a slow
drive keeps waiting. So the kernel's own notice, a byte in a socket, goes to a thread that is always free to leave.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

from lohan.host.threads import Worker

EXIT_INTERRUPTED = 130
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PAUSE = signal.SIGUSR1


class Interrupts:
    """While it is open. In a thread other than the main one it does nothing: there Python cannot take signals."""

    def __init__(self, message: str) -> None:
        """`message` is what the first one says while a step is being finished."""
        self.requested = False
        """whether to stop after this step"""
        self.paused = False
        """whether to pause after this step"""
        self._changed = threading.Event()
        self._message = message
        self._patient = False
        self._before: dict[signal.Signals, Any] = {}

    @contextmanager
    def patience(self) -> Iterator[None]:
        """In it the first signal sets `requested`; outside it raises KeyboardInterrupt."""
        self._patient = True
        try:
            yield
        finally:
            self._patient = False

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            self._ours, self._kernels = socket.socketpair()
            self._kernels.setblocking(False)
            Worker("lohan-interrupts", self._watch).start()
            is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            taken = [number for number in (*SIGNALS, PAUSE) if number != signal.SIGHUP or not is_nohup]
            self._before = {number: signal.signal(number, self._handle) for number in taken}
            self._wakeup_before = signal.set_wakeup_fd(self._kernels.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            self._kernels.close()

    def wait_while_paused(self) -> None:
        """Until somebody wants the run to go on, or to end."""
        while self.paused and not self.requested:
            self._changed.wait()
            self._changed.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == PAUSE:
            return
        if not self._patient:
            raise KeyboardInterrupt
        self.requested = True  # the thread says so too; where Python comes here first, no other step begins

    def _watch(self) -> None:
        """Until the socket is closed."""
        with self._ours:
            num_seen, is_told = 0, False
            while data := self._ours.recv(1):
                if data[0] == PAUSE:
                    self.paused = not self.paused
                    _say("pausing after this step; the same signal goes on" if self.paused else "going on")
                    self._changed.set()
                    continue
                num_seen += data[0] in SIGNALS
                if num_seen > 1:
                    _say("left at once; what the last commit holds is on disk")
                    os._exit(EXIT_INTERRUPTED)
                if num_seen and self._patient and not is_told:
                    self.requested = is_told = True
                    self._changed.set()
                    _say(self._message)


def _say(text: str) -> None:
    """Past Python's streams, whose locks may be held."""
    os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"\nlohan: {text}\n".encode())
