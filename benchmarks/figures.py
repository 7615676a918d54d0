"""Figures and the bars that they are held against, and how a benchmark hands them on.

A benchmark prints what people read and ends with one line of JSON, which `run_all.py` collects:

    {"benchmark": "step", "figures": [{"name": ..., "value": ..., "bar": ..., "at_least": false}], ...details}

A missed bar is reported and ends nothing: machines differ, and a benchmark is no test.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Figure:
    """One number that lohan is judged by."""

    name: str
    value: float
    bar: float
    at_least: bool = False
    """the bar is a lower one; otherwise the value may not be above it"""

    @property
    def holds(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{self.name:66} {self.value:8.3f}   {sign} {self.bar:6.3f}   {'holds' if self.holds else 'MISSED'}"


def publish(benchmark: str, figures: Sequence[Figure], **details: object) -> None:
    """The end of a benchmark's output."""
    for figure in figures:
        print(figure)
    print(json.dumps({"benchmark": benchmark, "figures": [asdict(figure) for figure in figures], **details}), flush=True)
