"""Rows on their way: what each holds, and where it was found, so that every complaint about it can say so."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lohan.errors import OptionError


@dataclass(frozen=True, slots=True)
class Row:
    """One row."""

    values: Mapping[str, Any]
    source: str
    where: str
    """in the source: `line 7`, or `part-2.parquet row 7`"""
    position: int
    """how much of the source ends with this row, in the unit of `Rows.total`"""

    def refuse(self, reason: str, remedy: str, cause: BaseException | None = None) -> NoReturn:
        raise OptionError("dataset_name", self.source, f"{self.where}: {reason}", remedy) from cause


@dataclass(frozen=True, slots=True)
class Rows:
    """A source that can be read as often as needed, a few rows at a time."""

    name: str
    fingerprint: str | None
    """differs if the rows may differ; None: only their content tells"""
    total: int | None
    """rows where their number is known, else bytes of the files"""
    read: Callable[[], Iterator[Row]]
    is_text: bool = False
    """each row is a line of a text file"""


def named(value: object) -> str:
    """A value, as JSON calls its type."""
    names = {str: "a string", int: "a number", float: "a number", bool: "true or false", list: "an array", type(None): "null"}
    return names.get(type(value), "an object" if isinstance(value, Mapping) else f"a {type(value).__name__}")
