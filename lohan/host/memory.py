"""What this process uses of the host's memory, and how much it may use.

Peaks are the kernel's own (VmHWM), which no sampling can miss. `reset_peak` starts a new period, so that the peak of a step,
or of the run without the import, can be told:

    reset_peak()
    ...
    peak_resident_bytes()

A limit is the smallest of the machine's memory and of every memory cgroup (v1 or v2) above this process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lohan.host import cgroups

_ROOT = Path("/")


def resident_bytes() -> int:
    """Memory of this process now, mapped files included (VmRSS)."""
    return _kib_field(Path("/proc/self/status"), "VmRSS") * 1024


def peak_resident_bytes() -> int:
    """The highest `resident_bytes` since the process started or `reset_peak` (VmHWM)."""
    return _kib_field(Path("/proc/self/status"), "VmHWM") * 1024


def reset_peak() -> bool:
    """Start a new period for `peak_resident_bytes`. False where the kernel does not let us: then it is the whole life's."""
    try:
        fd = os.open("/proc/self/clear_refs", os.O_WRONLY)
    except OSError:
        return False
    try:
        return os.write(fd, b"5") == 1
    except OSError:
        return False
    finally:
        os.close(fd)


def limit_bytes(root: Path = _ROOT) -> int:
    """The most memory that this process could ever have: the machine's, or a cgroup's limit below it."""
    limits = [group.limit_bytes for group in _cgroups(root)]
    return min([_kib_field(root / "proc/meminfo", "MemTotal") * 1024, *limits])


def available_bytes(root: Path = _ROOT) -> int:
    """What can be allocated now without swapping or being killed: page cache counts as free."""
    rooms = [max(0, group.limit_bytes - group.unreclaimable_bytes) for group in _cgroups(root)]
    return min([_kib_field(root / "proc/meminfo", "MemAvailable") * 1024, *rooms])


@dataclass(frozen=True, slots=True)
class _Cgroup:
    limit_bytes: int
    unreclaimable_bytes: int


@dataclass(frozen=True, slots=True)
class _Names:
    """What a version of memory cgroups calls its files."""

    limit: str
    usage: str
    inactive_file: str


_NAMES = {
    1: _Names("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Names("memory.max", "memory.current", "inactive_file"),
}


def _cgroups(root: Path) -> Iterator[_Cgroup]:
    """Every memory cgroup with a limit that this process is in, from its own up to the root."""
    for version, folder in cgroups.folders(root, "memory"):
        if (group := _read_cgroup(folder, _NAMES[version])) is not None:
            yield group


def _read_cgroup(folder: Path, names: _Names) -> _Cgroup | None:
    try:
        limit = (folder / names.limit).read_text().strip()
        usage_bytes = int((folder / names.usage).read_text())
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except FileNotFoundError:  # the root group of v2, or a hierarchy without the memory controller
        return None
    if limit == "max":
        return None
    return _Cgroup(int(limit), usage_bytes - int(stat.get(names.inactive_file, 0)))


def _kib_field(path: Path, name: str) -> int:
    for line in path.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1])
    raise LookupError(f"{path} has no {name}")
