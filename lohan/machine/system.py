"""Where facts come from: files of the kernel below a root, and programs that may be installed. Tests give another root."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ASK_S = 10.0
"""the most that a program may take to answer"""


def ask_program(command: Sequence[str]) -> str | None:
    """What a program prints; None where it is not installed, takes too long or prints nothing.

    The exit status does not count: smartctl sets bits of it for old entries in a drive's log, and answers all the same.
    """
    path = shutil.which(command[0])
    if path is None:
        return None
    try:
        done = subprocess.run([path, *command[1:]], capture_output=True, text=True, errors="replace", timeout=ASK_S)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


@dataclass(frozen=True, slots=True)
class System:
    """The machine as its kernel tells it. What is not told is None: no file is there on every machine."""

    root: Path = Path("/")
    ask: Callable[[Sequence[str]], str | None] = ask_program

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str | Path) -> str | None:
        """A file's content without the white space around it."""
        try:
            return (self.path(name) if isinstance(name, str) else name).read_text(errors="replace").strip()
        except OSError:
            return None

    def number(self, name: str | Path) -> int | None:
        text = self.text(name)
        return int(text) if text is not None and text.removeprefix("-").isdecimal() else None

    def field(self, name: str | Path, key: str) -> str | None:
        """The value behind the first `key:` of a file."""
        for line in (self.text(name) or "").splitlines():
            found, colon, value = line.partition(":")
            if colon and found.strip() == key:
                return value.strip()
        return None
