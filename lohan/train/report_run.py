"""What a run has left in its folder, for its report: log.jsonl, and config.yaml and trace.json where they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.errors import OptionError
from lohan.train.arguments import read_yaml
from lohan.train.log import LOG_NAME
from lohan.train.report_log import History, read_history
from lohan.train.report_numbers import Settings
from lohan.train.report_trace import Lanes, read_trace

CONFIG_NAME, TRACE_NAME = "config.yaml", "trace.json"


@dataclass(frozen=True, slots=True)
class Run:
    """All that a run's folder tells."""

    folder: Path
    logged_at_s: float
    """when the log was last written to, since the epoch"""
    history: History
    settings: Settings
    timelines: Sequence[Lanes]
    notes: Sequence[str]
    """what could not be read, and why"""


def read_run(folder: Path) -> Run:
    """What a run has left, whether it is done, was killed or still goes on."""
    path = folder / LOG_NAME
    try:
        history, logged_at_s = read_history(path), path.stat().st_mtime
    except OSError as error:
        reason = f"{LOG_NAME} cannot be read there ({error.strerror})" if folder.is_dir() else "there is no such folder"
        raise OptionError("output_dir", str(folder), reason, "Name the output_dir of a run of lohan train") from error
    if not len(history):
        reason = f"{LOG_NAME} there has no step yet"
        raise OptionError("output_dir", str(folder), reason, "Wait until the first step is done, or name another run")
    notes: list[str] = []
    if lines := history.broken_lines:
        which = ", ".join(map(str, lines[:5])) + (", ..." if len(lines) > 5 else "")
        notes.append(f"{LOG_NAME}: not readable, as a killed run may leave it: line {which}")
    settings = _read_settings(folder / CONFIG_NAME, notes)
    return Run(folder, logged_at_s, history, settings, _read_timelines(folder / TRACE_NAME, notes), notes)


def _read_settings(path: Path, notes: list[str]) -> Settings:
    if not path.exists():
        return {}
    try:
        return read_yaml(path)
    except OptionError as error:
        notes.append(f"{CONFIG_NAME} could not be read: {error.reason}")
        return {}


def _read_timelines(path: Path, notes: list[str]) -> Sequence[Lanes]:
    if not path.exists():
        return ()
    try:
        return read_trace(path)
    except (OSError, ValueError) as error:
        notes.append(f"{TRACE_NAME} could not be read: {error}")
        return ()
