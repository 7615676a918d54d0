"""What the doctor says of one thing: how it is, whether that is as it should be, and if not, what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Level(Enum):
    """How bad it is. Only a PROBLEM fails the examination."""

    OK = "ok"
    NOTE = "note"
    """worth knowing; nothing is wrong"""
    WARNING = "warning"
    """lohan works, but slower or with less than the machine could give"""
    PROBLEM = "problem"
    """lohan, or a part of the machine, cannot be used like this"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. A warning or a problem says what is wrong and how to mend it."""

    area: str
    """what it belongs to: lines of one area stand together"""
    name: str
    value: str
    level: Level = Level.OK
    wrong: str = ""
    remedy: str = ""

    def __post_init__(self) -> None:
        if self.level in (Level.WARNING, Level.PROBLEM) and not (self.wrong and self.remedy):
            raise ValueError(f"{self.area}, {self.name}: a {self.level.value} says what is wrong and how to mend it")


def failed(area: str, name: str, error: Exception, remedy: str) -> Finding:
    """What could not be measured: one broken part does not hide the rest."""
    return Finding(area, name, "failed", Level.PROBLEM, f"{type(error).__name__}: {error}", remedy)


def gib(nbytes: float) -> str:
    """Memory, in powers of 1024."""
    return f"{nbytes / 2**30:.1f} GiB"


def gb(nbytes: float) -> str:
    """What drives hold and move, in powers of 1000."""
    return f"{nbytes / 1e12:.1f} TB" if nbytes >= 1e12 else f"{nbytes / 1e9:.1f} GB"
