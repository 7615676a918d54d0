"""What people see while a command works: a line for each phase and each step, and a sign of life at least every few seconds.

On a terminal the last line is alive: what is being done, how far it is, for how long. Elsewhere (a file, a pipe) lines are
plain, and one says that the work goes on whenever nothing else was printed for a while. A thread of its own sees to both, so
what works need not.

A phase may have parts (`progress`), one at a time; when one is over, the phase goes on.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from lohan.host.threads import Worker

HEARTBEAT_S = 2.5
"""without a line, off a terminal: below the 5 s after which people wonder"""
REDRAW_S = 0.25
_CLEAR = "\r\x1b[2K"
Share = Callable[[], float | None]
"""how much of something is done, from 0 to 1, if that is known; asked from the console's thread"""


@dataclass(slots=True)
class _Activity:
    """Something that is being done."""

    name: str
    has_line: bool
    """it is told when it begins or ends, however short it was"""
    share: Share | None = None
    detail: str = ""
    began_s: float = field(default_factory=time.monotonic)

    @property
    def took_s(self) -> float:
        return time.monotonic() - self.began_s

    def now(self) -> str:
        share = self.share() if self.share is not None else None
        far = self.detail if share is None else f"{share:.0%}"
        return f"{self.name}: {far + ', ' if far else ''}{self.took_s:.0f} s so far"


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
        self._whole: _Activity | None = None
        """a phase, or a work"""
        self._part: _Activity | None = None
        self._printed_s = time.monotonic()

    def __enter__(self) -> Console:
        self._thread = Worker("lohan-console", self._live)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leaving.set()
        if self._thread is not None:
            self._thread.join()
        self.idle()

    # ---------------------------------------------------------------- what is being done

    def phase(self, name: str, share: Share | None = None) -> None:
        """From now on this is being done; it has a line of its own."""
        self._do(_Activity(name, has_line=True, share=share))

    def work(self, name: str, share: Share | None = None) -> None:
        """From now on this is being done; it has no line but when it takes long."""
        self._do(_Activity(name, has_line=False, share=share))

    def progress(self, name: str, done: int, total: int | None) -> None:
        """How far the phase of this name is, or its part of this name, which begins if need be and ends when all is done."""
        with self._lock:
            far = f"{done / total:.0%}" if total else f"{done:,}" if done else ""
            if self._whole is not None and name == self._whole.name:
                self._end_part()
                self._whole.detail = far
                return
            if self._part is None or name != self._part.name:
                if done == total:
                    return
                self._end_part()
                self._part = _Activity(name, has_line=True)
                self._begin(self._part)
            self._part.detail = far
            if done == total and self._whole is not None:
                self._end_part()

    def idle(self) -> None:
        """What was being done is done."""
        with self._lock:
            self._end_part()
            self._end(self._whole)
            self._whole = None

    def _do(self, activity: _Activity) -> None:
        with self._lock:
            self.idle()
            self._whole = activity
            self._begin(activity)

    def _begin(self, activity: _Activity) -> None:
        if activity.has_line and not self.is_terminal:
            self._print(f"{activity.name} ...")
        self._redraw()

    def _end_part(self) -> None:
        self._end(self._part)
        self._part = None

    def _end(self, activity: _Activity | None) -> None:
        if activity is not None and self.is_terminal:
            self._write(_CLEAR)
            if activity.has_line:
                self._print(f"{activity.name}: {activity.took_s:.1f} s")

    @property
    def _doing(self) -> _Activity | None:
        """What there is a sign of life of."""
        return self._part or self._whole

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
                elif (doing := self._doing) and time.monotonic() - self._printed_s > self._heartbeat_s:
                    self._print(doing.now())

    def _redraw(self) -> None:
        if self.is_terminal and (doing := self._doing):
            self._write(_CLEAR + doing.now()[: shutil.get_terminal_size().columns - 1])

    def _print(self, text: str) -> None:
        self._write((_CLEAR if self.is_terminal else "") + text + "\n")
        self._printed_s = time.monotonic()

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
