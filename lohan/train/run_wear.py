"""What a run writes to its drives, and how much of their rated life that takes: before it, at every step, and at its end.

A drive's maker vouches for so many terabytes written (TBW on its data sheet). Where the drive tells, or the user does, what a
run writes has a meaning: part of a life. Every drive of a store takes an equal share, so the one with the lowest rating counts.

What earlier processes wrote is in the run's log (`ssd_total_write_bytes`); all that this one writes is added: import, steps,
activations, what is written behind a step, and checkpoints on the same drives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lohan.machine.drives import find_drive
from lohan.machine.system import System
from lohan.train.config import TrainingConfig
from lohan.train.log import Record

TB = 10**12
TOTAL, SHARE = "ssd_total_write_bytes", "ssd_life_share"
"""of a step's record"""


class RunWear:
    """Bytes written by one run, over all its processes."""

    def __init__(self, before_bytes: int, rated_bytes: int | None, now: Callable[[], int]) -> None:
        """`rated_bytes`: of all drives together; `now`: bytes that this process has written."""
        self._before_bytes, self.rated_bytes, self._now = before_bytes, rated_bytes, now
        self._began_bytes = self._tokens = 0
        self._began_s = time.monotonic()

    @property
    def total_bytes(self) -> int:
        return self._before_bytes + self._now()

    def begin_steps(self) -> None:
        """From here on what is written is for tokens: rates count from now."""
        self._began_bytes, self._began_s = self._now(), time.monotonic()

    def record(self, num_tokens: int) -> Record:
        """For log.jsonl, after a step on so many tokens."""
        self._tokens += num_tokens
        total = self.total_bytes
        return {TOTAL: total, SHARE: None if self.rated_bytes is None else total / self.rated_bytes}

    def forecast(self, num_steps: int, step_bytes: int) -> str:
        """Before the first step: what so many steps are going to write, at least."""
        nbytes = num_steps * step_bytes
        text = f"SSD: a step writes {volume(step_bytes)} at least, {num_steps} steps {volume(nbytes)}"
        if self.rated_bytes is None:
            return f"{text}; ssd_endurance_tbw says what the drives are rated for"
        return f"{text}, {percent(nbytes / self.rated_bytes)} of the {volume(self.rated_bytes)} that the drives are rated for"

    def summary(self) -> str:
        """At the end."""
        written, hours = self._now() - self._began_bytes, (time.monotonic() - self._began_s) / 3600
        text = f"{volume(self.total_bytes)} written by this run so far"
        if written and self._tokens:
            text += f", {volume(written / hours)} an hour and {volume(written / self._tokens * 1e6)} a million tokens"
        if self.rated_bytes is not None:
            text += f"; {percent(self.total_bytes / self.rated_bytes)} of what the drives are rated for"
        return text


def written_words(record: Record) -> str:
    """For the line of a step."""
    share = record.get(SHARE)
    return f"{volume(record[TOTAL])} written" + ("" if share is None else f" ({percent(share)} of rated life)")


def rated_bytes(config: TrainingConfig, system: System | None = None) -> int | None:
    """What all drives of the run may be written with together: as the user says, or as every one of them tells."""
    if not config.drives:
        return None
    if config.ssd_endurance_tbw is not None:
        return int(config.ssd_endurance_tbw * TB) * len(config.drives)
    told = [_told(system or System(), folder) for folder in config.drives]
    return None if None in told else min(rating for rating in told if rating is not None) * len(told)


def _told(system: System, folder: Path) -> int | None:
    """By the drive behind a folder; of several disks below one filesystem, by the one that is rated lowest."""
    disks = find_drive(system, folder).disks
    ratings = [disk.wear.rated_bytes if disk.wear is not None else None for disk in disks]
    return None if not ratings or None in ratings else min(rating for rating in ratings if rating is not None) * len(ratings)


def on_same_drives(folder: Path, drives: Sequence[Path]) -> bool:
    """Whether what is written to `folder` wears one of these drives."""
    devices = {os.stat(drive).st_dev for drive in drives if drive.exists()}
    return folder.exists() and os.stat(folder).st_dev in devices


def volume(nbytes: float) -> str:
    """1.25 TB, or 0.48 GB."""
    return f"{nbytes / TB:.2f} TB" if nbytes >= TB else f"{nbytes / 1e9:.2f} GB"


def percent(share: float) -> str:
    """12%, 0.34%, 0.0012%: two digits that count."""
    return f"{float(f'{share * 100:.2g}'):.10f}".rstrip("0").rstrip(".") + "%"
