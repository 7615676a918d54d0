"""output_dir/log.jsonl: one JSON object a line for each step, evaluation and sample, in order.

A run that continues at step N keeps the lines up to N and drops what a crash left beyond it, or half written, so that no
step is there twice. None is missing: a line is on the drive before its step's commit can be. A run that begins puts the log
that is there aside, as log.before.jsonl; one that begins with a checkpoint begins with its log. Numbers that are not finite
become null, which every reader of JSON knows.

A step whose loss or gradient was not finite has a line with `skipped: true` and the number of the step before it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

from lohan.errors import StoreError

LOG_NAME = "log.jsonl"
Record = dict[str, Any]


class RunLog:
    """Open from step `num_steps` on; `records` is what the run had written up to it."""

    def __init__(self, folder: Path, num_steps: int, checkpoint: Path | None = None) -> None:
        """`checkpoint`: that the run goes on from, whose log it begins with."""
        self.path = folder / LOG_NAME
        folder.mkdir(parents=True, exist_ok=True)
        own = read_log(self.path)
        before = read_log(checkpoint / LOG_NAME) if checkpoint is not None else []
        begins = num_steps <= max((record.get("step", 0) for record in before), default=0)
        if begins and self.path.exists():
            self.path.replace(folder / "log.before.jsonl")
        self.records = before if begins else [line for line in own if line.get("step", 0) <= num_steps]
        written = [line.get("ssd_total_write_bytes", 0) for line in (*own, *self.records)]
        self.written_bytes = int(max((number for number in written if isinstance(number, int | float)), default=0))
        """by the run's earlier processes to its drives, steps that were lost or left included"""
        partial = self.path.with_name(f"{LOG_NAME}.partial")
        with partial.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in self.records)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self.path)
        for place in (folder, folder.absolute().parent):  # which may have got this one just now
            fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        self._file: TextIO = self.path.open("a", encoding="utf-8")

    @property
    def num_skipped(self) -> int:
        """Batches that these steps passed over."""
        return sum(bool(record.get("skipped")) for record in self.records)

    def write(self, record: Mapping[str, Any]) -> None:
        """On return the line survives a power cut: a step is never in the store without being in its log."""
        line = json.dumps({name: _plain(value) for name, value in record.items()}, allow_nan=False) + "\n"
        try:
            self._file.write(line)
            self._file.flush()
            os.fdatasync(self._file.fileno())
        except OSError as error:
            raise StoreError("write", str(self.path), self._file.tell(), len(line), 0, error.errno, str(error)) from error

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


def read_log(path: Path) -> list[Record]:
    """All whole lines of a log; none if there is no log."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
