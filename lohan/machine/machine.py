"""What a machine can do, in numbers: what a plan of time and memory is made from. No torch.

The doctor measures it. What was not measured, or not told by the machine, is None: whoever plans with it has to decide.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from lohan.errors import OptionError

Part = TypeVar("Part", "DriveRates", "GpuRates", "HostRates")


@dataclass(frozen=True, slots=True)
class DriveRates:
    """One folder's drive, through lohan's own store."""

    folder: str
    free_bytes: int
    read_gbps: float | None = None
    write_gbps: float | None = None
    """as found: of a drive that rested, into its write cache"""
    mixed_gbps: float | None = None
    """read and written bytes together, both at once"""
    sustained_write_gbps: float | None = None
    """once the write cache is full"""
    rated_bytes: int | None = None
    """that may be written in its life, by its maker"""
    written_bytes: int | None = None
    """in its life so far"""


@dataclass(frozen=True, slots=True)
class GpuRates:
    """One GPU and its way to the host."""

    name: str
    memory_bytes: int | None = None
    upload_gbps: float | None = None
    download_gbps: float | None = None
    flops: float | None = None
    """of bf16 matrix products, a second"""


@dataclass(frozen=True, slots=True)
class HostRates:
    """What the cores and their memory do."""

    memory_gbps: float | None = None
    """read and written bytes together, of a copy on all cores"""
    flops: float | None = None
    """of bf16 matrix products on all cores, a second"""
    adamw_per_s: float | None = None
    """parameters that one thread updates a second"""
    adamw_all_per_s: float | None = None
    """parameters that all cores update a second"""


@dataclass(frozen=True, slots=True)
class Machine:
    """One machine, as this process may use it."""

    cores: int
    ram_bytes: int
    """that this process may have at all"""
    available_bytes: int
    """of them free when it was looked at"""
    host: HostRates = HostRates()
    drives: tuple[DriveRates, ...] = ()
    gpus: tuple[GpuRates, ...] = ()

    def save(self, path: str | Path) -> None:
        """Write it as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Machine:
        """Read what `save` wrote, or a person."""
        return Machine.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Machine:
        _check_fields(Machine, data, "machine")
        values = dict(data)
        values["host"] = _part(HostRates, data.get("host", {}), "machine.host")
        values["drives"] = tuple(_part(DriveRates, each, "machine.drives[]") for each in data.get("drives", ()))
        values["gpus"] = tuple(_part(GpuRates, each, "machine.gpus[]") for each in data.get("gpus", ()))
        return Machine(**values)


def _part(kind: type[Part], data: Mapping[str, Any], place: str) -> Part:
    _check_fields(kind, data, place)
    return kind(**data)


def _check_fields(kind: type[Part] | type[Machine], data: Mapping[str, Any], place: str) -> None:
    known = {field.name: field for field in fields(kind)}
    for name, value in data.items():
        if name not in known:
            raise OptionError(f"{place}.{name}", value, "no such field", f"Known fields: {', '.join(known)}")
    for name in ("cores", "ram_bytes", "available_bytes", "folder", "free_bytes", "name"):
        if name in known and name not in data:
            raise OptionError(f"{place}.{name}", None, "it is missing", "Make the file again with lohan doctor --json")
