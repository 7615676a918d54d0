"""A memory cgroup for one process and what it starts: version 1 or 2, whichever the machine has. Needs root.

with MemoryCgroup(limit_bytes) as group:
    subprocess.run(..., preexec_fn=group.join)
    group.killed, group.refused
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class MemoryCgroup:
    """Exists inside `with`."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._is_v1 = (V1 / "memory.limit_in_bytes").exists()
        self.folder = (V1 if self._is_v1 else V2) / f"lohan-bench-{os.getpid()}"

    def __enter__(self) -> MemoryCgroup:
        if not self._is_v1:
            (V2 / "cgroup.subtree_control").write_text("+memory")
        self.folder.mkdir()
        (self.folder / ("memory.limit_in_bytes" if self._is_v1 else "memory.max")).write_text(str(self._limit_bytes))
        # Swap would turn a limit on memory into a limit on patience.
        swap = self.folder / ("memory.memsw.limit_in_bytes" if self._is_v1 else "memory.swap.max")
        if swap.exists():
            swap.write_text(str(self._limit_bytes) if self._is_v1 else "0")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.folder.rmdir()

    def join(self) -> None:
        """Move the calling process in."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))

    @property
    def killed(self) -> int:
        """processes that the kernel killed for want of memory"""
        return self._count("memory.oom_control" if self._is_v1 else "memory.events", "oom_kill")

    @property
    def refused(self) -> int:
        """times that the limit was met, and page cache had to go"""
        if self._is_v1:
            return int((self.folder / "memory.failcnt").read_text())
        return self._count("memory.events", "max")

    def _count(self, file: str, name: str) -> int:
        lines = (line.split() for line in (self.folder / file).read_text().splitlines())
        return next(int(value) for key, value in lines if key == name)
