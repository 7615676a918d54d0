"""A run's log.jsonl as what a page draws: numbers in columns, one row a step; evaluations; samples.

Reads whatever a run has left, one that still runs or that was killed included: a line that is no JSON object is counted and
passed over, a number that is missing or not finite is NaN. Lines whose step does not go on from the one before belong to a run
that went back: they replace what it had, but the bytes that it had moved, its time and its tokens stay in the sums.

A long run is thinned by rows, so that every number on the page is that of a real step: of each stretch of steps those with the
lowest and the highest value of each of `EXTREMES` stay, and the first and the last of all.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lohan.schedule.ops import Lane

NUMBERS = (
    "step",
    "committed_step",
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "tokens_per_s",
    "step_s",
    "peak_host_bytes",
    "peak_device_bytes",
    "process_bytes",
    "speed_of_light",
    "ssd_total_write_bytes",
    "ssd_life_share",
)
"""of a step's line, as they are"""
SUMS = {
    "tokens": "total_tokens",
    "step_s": "total_s",
    "ssd_read_bytes": "total_read_bytes",
    "ssd_write_bytes": "total_write_bytes",
}
"""of a step's line -> the column of their sum from the beginning of the run"""
SMOOTH_LOSS = "smooth_loss"
EXTREMES = ("loss", "grad_norm", "learning_rate", "tokens_per_s", "step_s")
MAX_ROWS = 3000
SMOOTH_FROM_ROWS = 40
SMOOTH_SHARE = 0.01
"""of the run, that a smoothed loss looks back on, and ahead to"""


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    values: Mapping[str, float]
    """by name, `eval_loss` among them"""


@dataclass(frozen=True, slots=True)
class Sample:
    step: int
    prompt: str
    text: str


@dataclass(slots=True)
class History:
    """Everything that a log says."""

    columns: dict[str, array[float]]
    """by name, `share of <lane>` among them: the part of the step in which the lane was busy"""
    skipped_at: list[int] = field(default_factory=list)
    """the last step before each one that changed nothing, because its loss or gradient was not finite"""
    resumed_at: list[int] = field(default_factory=list)
    """the first step after each return to an earlier one"""
    evaluations: list[Evaluation] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    broken_lines: list[int] = field(default_factory=list)
    """numbers of lines that could not be read"""

    def __len__(self) -> int:
        return len(self.columns["step"])

    def finite(self, name: str) -> list[float]:
        return [value for value in self.columns[name] if math.isfinite(value)]

    def thinned(self, max_rows: int = MAX_ROWS) -> History:
        """The same with about so many rows at most."""
        if len(self) <= max_rows:
            return self
        rows = sorted({0, len(self) - 1, *_extremes([self.columns[name] for name in EXTREMES], max_rows)})
        columns = {name: array("d", (values[row] for row in rows)) for name, values in self.columns.items()}
        return History(columns, self.skipped_at, self.resumed_at, self.evaluations, self.samples, self.broken_lines)


def share_of(lane: Lane) -> str:
    """The column of a lane."""
    return f"share of {lane.value}"


def read_history(path: Path) -> History:
    """All that a log says. OSError if there is none."""
    history = History({name: array("d") for name in (*NUMBERS, *SUMS.values(), *map(share_of, Lane))})
    sums = dict.fromkeys(SUMS, 0.0)
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, 1):
            if (record := _parse(line)) is None:
                history.broken_lines.append(number)
            elif (step := _number(record.get("step"))) >= 0:
                _take(history, sums, record, int(step))
    history.columns[SMOOTH_LOSS] = array("d", _smooth(history.columns["loss"]))
    return history


def _parse(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _take(history: History, sums: dict[str, float], record: dict[str, Any], step: int) -> None:
    """One line, of whatever kind."""
    if "sample" in record:
        history.samples.append(Sample(step, str(record.get("prompt") or ""), str(record["sample"])))
        return
    values = {name: _number(value) for name, value in record.items() if name.startswith("eval_")}
    if values:
        history.evaluations.append(Evaluation(step, values))
    if "loss" not in record:
        return
    if math.isnan(_number(record.get("tokens"))):
        record["tokens"] = _number(record.get("tokens_per_s")) * _number(record.get("step_s"))
    for name in SUMS:
        value = _number(record.get(name))
        sums[name] += 0.0 if math.isnan(value) else value
    if record.get("skipped"):
        history.skipped_at.append(step)
        return
    _go_back_to(history, step)
    for name in NUMBERS:
        history.columns[name].append(_number(record.get(name)))
    for name, column in SUMS.items():
        history.columns[column].append(sums[name])
    lanes = record.get("lanes")
    for lane in Lane:
        use = lanes.get(lane.value) if isinstance(lanes, dict) else None
        busy_s = _number(use.get("busy_s")) if isinstance(use, dict) else math.nan
        step_s = history.columns["step_s"][-1]
        history.columns[share_of(lane)].append(busy_s / step_s if step_s > 0 else math.nan)


def _go_back_to(history: History, step: int) -> None:
    """Forget what lies beyond the beginning of a step."""
    steps = history.columns["step"]
    if not steps or steps[-1] < step:
        return
    history.resumed_at.append(step)
    num_rows = next(row for row, known in enumerate(steps) if known >= step)
    for values in history.columns.values():
        del values[num_rows:]


def _number(value: object) -> float:
    """NaN for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value) if math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def _smooth(values: Sequence[float]) -> Iterable[float]:
    """The mean of the values around each, weighted by how near they are; NaN throughout for a run too short to have one."""
    if len(values) < SMOOTH_FROM_ROWS:
        return [math.nan] * len(values)
    weight = 1 - 1 / max(3.0, SMOOTH_SHARE * len(values))
    ahead = reversed(list(_trail(reversed(values), weight)))
    return ((past + coming) / 2 for past, coming in zip(_trail(values, weight), ahead, strict=True))


def _trail(values: Iterable[float], weight: float) -> Iterator[float]:
    """The mean of each value and all before it; each counts `weight` times as much as the next one."""
    mean = total = 0.0
    for value in values:
        if math.isfinite(value):
            mean, total = weight * mean + (1 - weight) * value, weight * total + (1 - weight)
        yield mean / total if total else math.nan


def _extremes(columns: Sequence[Sequence[float]], max_rows: int) -> Iterable[int]:
    """Of each stretch of rows, the one with the lowest and the one with the highest value of each column."""
    num_rows, num_stretches = len(columns[0]), max(1, max_rows // (2 * len(columns)))
    for stretch in range(num_stretches):
        rows = range(stretch * num_rows // num_stretches, (stretch + 1) * num_rows // num_stretches)
        for values in columns:
            finite = [row for row in rows if math.isfinite(values[row])]
            if finite:
                yield min(finite, key=values.__getitem__)
                yield max(finite, key=values.__getitem__)
