"""How an examination is shown: findings as they are made, and a sign of life while something takes long.

Findings go to stdout. What is under way goes to stderr: on a terminal one line that is overwritten and removed, elsewhere a
line every QUIET_S seconds. With JSON, stdout has nothing but the JSON at the end.
"""

from __future__ import annotations

import os
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from lohan.host.threads import Worker
from lohan.machine.findings import Finding, Level

QUIET_S = 3.0
TERMINAL_S = 0.5
NAME_WIDTH, LEVEL_WIDTH, LINE_WIDTH = 20, 9, 110
_COLORS = {Level.OK: "32", Level.NOTE: "36", Level.WARNING: "33", Level.PROBLEM: "31"}


class Console:
    """One examination's output. Use it as a context manager."""

    def __init__(self, *, shows: bool = True, out: TextIO | None = None, err: TextIO | None = None) -> None:
        """`shows`: findings are printed as they come."""
        self._out, self._err = out or sys.stdout, err or sys.stderr
        self._shows = shows
        self._colors = self._out.isatty() and "NO_COLOR" not in os.environ
        self._overwrites = self._err.isatty()
        self._area, self._gap = "", ""
        self._doing, self._since_s, self._told_s = "", 0.0, 0.0
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = Worker("sign of life", self._live)

    def __enter__(self) -> Console:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._wipe()

    def line(self, text: str) -> None:
        """A line of the report that is no finding."""
        with self._lock:
            self._wipe()
            if self._shows:
                print(text, file=self._out, flush=True)

    def show(self, finding: Finding) -> None:
        """A finding, below the heading of its area."""
        with self._lock:
            self._wipe()
            if self._shows:
                if finding.area != self._area:
                    print(f"{self._gap}{finding.area}", file=self._out)
                print(render(finding, colors=self._colors), file=self._out, flush=True)
        self._area, self._gap = finding.area, "\n"

    def announce(self, text: str) -> None:
        """Something to know now that is no part of the report."""
        with self._lock:
            self._wipe()
            print(text, file=self._err, flush=True)

    @contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """What is told as under way while the block runs."""
        self.tell(text, restart=True)
        try:
            yield
        finally:
            with self._lock:
                self._wipe()
                self._doing = ""

    def tell(self, text: str, *, restart: bool = False) -> None:
        """Another text for what is under way."""
        with self._lock:
            self._doing = text
            if restart:
                self._since_s = self._told_s = time.monotonic()

    def _live(self) -> None:
        while not self._ended.wait(TERMINAL_S):
            with self._lock:
                now_s = time.monotonic()
                if not self._doing or (not self._overwrites and now_s - self._told_s < QUIET_S):
                    continue
                self._told_s = now_s
                self._wipe()
                end = "" if self._overwrites else "\n"
                print(f"... {self._doing} ({now_s - self._since_s:.0f} s)", file=self._err, end=end, flush=True)

    def _wipe(self) -> None:
        if self._overwrites:
            print("\r\x1b[2K", file=self._err, end="", flush=True)


def render(finding: Finding, *, colors: bool = False) -> str:
    """One finding in one line; what is wrong and the remedy in lines below."""
    level = f"{finding.level.value:<{LEVEL_WIDTH}}"
    if colors:
        level = f"\x1b[{_COLORS[finding.level]}m{level}\x1b[0m"
    lines = [f"  {level}{finding.name:<{NAME_WIDTH}}{finding.value}".rstrip()]
    indent = " " * (2 + LEVEL_WIDTH)
    for text, mark in ((finding.wrong, ""), (finding.remedy, "-> ")):
        for part in text.splitlines():
            lines += textwrap.wrap(
                part,
                LINE_WIDTH,
                initial_indent=indent + mark,
                subsequent_indent=indent + " " * len(mark),
                break_long_words=False,
                break_on_hyphens=False,
            )
    return "\n".join(lines)
