"""What people see while a command works: a line for each phase and each step, and a sign of life at least every few seconds.

On a terminal the last line is alive: what is being done, how far it is, for how long. Elsewhere (a file, a pipe) lines are
plain, and one says that the work goes on whenever nothing else was printed for a while. A thread of its own sees to both, so
what works need not.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType
from typing import TextIO

HEARTBEAT_S = 2.5
"""without a line, off a terminal: below the 5 s after which people wonder"""
REDRAW_S = 0.25
_CLEAR = "\r\x1b[2K"


class Console:
    """Use it as a context manager; all methods may be called from any thread."""

    def __init__(
        self, stream: TextIO | None = None, *, is_terminal: bool | None = None, heartbeat_s: float = HEARTBEAT_S
    ) -> None:
        self._stream = stream or sys.stdout
        self.is_terminal = self._stream.isatty() if is_terminal is None else is_terminal
        self._interval_s = REDRAW_S if self.is_terminal else heartbeat_s / 4
        self._heartbeat_s = heartbeat_s
        self._lock = threading.RLock()
        self._leaving = threading.Event()
        self._thread: threading.Thread | None = None
        self._doing, self._detail, self._is_phase = "", "", False
        self._began_s = self._printed_s = time.monotonic()

    def __enter__(self) -> Console:
        self._thread = threading.Thread(target=self._live, name="lohan-console", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leaving.set()
        if self._thread is not None:
            self._thread.join()
        self.idle()

    # ---------------------------------------------------------------- what is being done

    def phase(self, name: str) -> None:
        """From now on this is being done; it has a line of its own."""
        with self._lock:
            self.idle()
            self._begin(name, is_phase=True)
            if not self.is_terminal:
                self._print(f"{name} ...")
            self._redraw()

    def progress(self, name: str, done: int, total: int | None) -> None:
        """How far the phase of this name is; begins it if need be."""
        with self._lock:
            if not self._is_phase or name != self._doing:
                self.phase(name)
            self._detail = f"{done / total:.0%}" if total else f"{done:,}"

    def work(self, name: str) -> None:
        """From now on this is being done; it has no line but when it takes long."""
        with self._lock:
            self.idle()
            self._begin(name, is_phase=False)
            self._redraw()

    def idle(self) -> None:
        """What was being done is done."""
        with self._lock:
            if self.is_terminal:
                self._write(_CLEAR)
                if self._doing and self._is_phase:
                    self._print(f"{self._doing}: {time.monotonic() - self._began_s:.1f} s")
            self._doing, self._detail, self._is_phase = "", "", False

    def _begin(self, name: str, *, is_phase: bool) -> None:
        self._doing, self._detail, self._is_phase, self._began_s = name, "", is_phase, time.monotonic()

    # ---------------------------------------------------------------- lines that stay

    def line(self, text: str = "") -> None:
        with self._lock:
            self._print(text)
            self._redraw()

    def warn(self, text: str) -> None:
        self.line(f"warning: {text}")

    # ---------------------------------------------------------------- the line that is alive

    def _live(self) -> None:
        while not self._leaving.wait(self._interval_s):
            with self._lock:
                if self.is_terminal:
                    self._redraw()
                elif self._doing and time.monotonic() - self._printed_s > self._heartbeat_s:
                    self._print(self._now())

    def _now(self) -> str:
        took_s = time.monotonic() - self._began_s
        return f"{self._doing}: {self._detail + ', ' if self._detail else ''}{took_s:.0f} s so far"

    def _redraw(self) -> None:
        if self.is_terminal and self._doing:
            self._write(_CLEAR + self._now()[: shutil.get_terminal_size().columns - 1])

    def _print(self, text: str) -> None:
        self._write((_CLEAR if self.is_terminal else "") + text + "\n")
        self._printed_s = time.monotonic()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
