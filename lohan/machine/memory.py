"""RAM: how much of it this process may have, and whether large buffers get the pages that drives and GPUs want.

Huge pages decide the drive's rate more than anything else that can be set: into ordinary 4 KiB pages a drive delivers a third
to two thirds of what it can. lohan asks for them with madvise, so `madvise` and `always` both do.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from lohan.host import memory
from lohan.machine.findings import Finding, Level, gib
from lohan.machine.system import System

AREA = "memory"
GIB = 2**30
LEAST_BYTES, FEW_BYTES = 2 * GIB, 6 * GIB
"""available: below the first, Python, torch and the smallest buffers do not fit; below the second, little remains"""
_HUGE = "sys/kernel/mm/transparent_hugepage"


@dataclass(frozen=True, slots=True)
class Memory:
    """The machine's memory, as this process may use it."""

    total_bytes: int
    """of the machine"""
    limit_bytes: int
    """of this process: of the machine or a cgroup"""
    available_bytes: int
    huge_pages: str | None
    """always, madvise or never; None: a kernel without them"""
    defrag: str | None
    """what a process does for a huge page when none is free: always, defer, defer+madvise, madvise, never"""
    memlock_bytes: int | None
    """that may be locked; None: no limit, or not told"""


def read_memory(system: System) -> Memory:
    """What /proc and /sys tell of it."""
    total = (system.field("proc/meminfo", "MemTotal") or "0 kB").split()[0]
    return Memory(
        total_bytes=int(total) * 1024,
        limit_bytes=memory.limit_bytes(system.root),
        available_bytes=memory.available_bytes(system.root),
        huge_pages=_chosen(system.text(f"{_HUGE}/enabled")),
        defrag=_chosen(system.text(f"{_HUGE}/defrag")),
        memlock_bytes=_memlock(system),
    )


def memory_findings(found: Memory, *, has_gpu: bool) -> Iterator[Finding]:
    """All that can be said without measuring."""
    yield _size(found)
    yield _available(found)
    yield _huge_pages(found)
    if found.huge_pages in ("always", "madvise"):
        yield _defrag(found)
    yield _memlock_finding(found, has_gpu)


def _size(found: Memory) -> Finding:
    if found.limit_bytes < found.total_bytes:
        return Finding(
            AREA,
            "RAM",
            f"{gib(found.limit_bytes)} of the machine's {gib(found.total_bytes)} (a cgroup's limit)",
            Level.WARNING,
            f"Beyond {gib(found.limit_bytes)} this process is killed, whatever the machine has free.",
            "Raise the limit (docker --memory, systemd MemoryMax, the batch system's request), "
            "or choose host_memory well below it",
        )
    return Finding(AREA, "RAM", gib(found.total_bytes))


def _available(found: Memory) -> Finding:
    value = gib(found.available_bytes)
    remedy = "End what holds memory (ps aux --sort=-rss | head), raise the limit, or add RAM"
    if found.available_bytes < LEAST_BYTES:
        wrong = f"Python, torch and lohan's smallest buffers take about {gib(LEAST_BYTES)}."
        return Finding(AREA, "available", value, Level.PROBLEM, wrong, remedy)
    if found.available_bytes < FEW_BYTES:
        wrong = (
            f"About {gib(LEAST_BYTES)} of it go to Python, torch and the smallest buffers; the rest bounds the model's units."
        )
        return Finding(AREA, "available", value, Level.WARNING, wrong, remedy)
    return Finding(AREA, "available", value)


def _huge_pages(found: Memory) -> Finding:
    if found.huge_pages in ("always", "madvise"):
        return Finding(AREA, "huge pages", found.huge_pages)
    wrong = "Buffers lie on 4 KiB pages: a drive delivers a third to two thirds of its rate into them."
    remedy = f"echo madvise | sudo tee /{_HUGE}/enabled   (for good: transparent_hugepage=madvise on the kernel's command line)"
    if found.huge_pages is None:
        remedy = "Use a kernel built with CONFIG_TRANSPARENT_HUGEPAGE; in a container, ask for the host's setting"
    return Finding(AREA, "huge pages", found.huge_pages or "not in this kernel", Level.WARNING, wrong, remedy)


def _defrag(found: Memory) -> Finding:
    if found.defrag in ("never", "defer"):
        return Finding(
            AREA,
            "defrag",
            found.defrag,
            Level.NOTE,
            "When memory is in pieces, buffers get ordinary pages instead of waiting for huge ones.",
            f"echo madvise | sudo tee /{_HUGE}/defrag",
        )
    return Finding(AREA, "defrag", found.defrag or "unknown")


def _memlock_finding(found: Memory, has_gpu: bool) -> Finding:
    if found.memlock_bytes is None:
        return Finding(AREA, "memlock", "no limit")
    value = gib(found.memlock_bytes) if found.memlock_bytes >= GIB else f"{found.memlock_bytes / 2**20:.0f} MiB"
    if found.memlock_bytes >= found.limit_bytes:
        return Finding(AREA, "memlock", value)
    if not has_gpu:
        return Finding(AREA, "memlock", f"{value}, enough without a GPU")
    return Finding(
        AREA,
        "memlock",
        value,
        Level.NOTE,
        "Buffers for a GPU are locked in place. NVIDIA's driver does not count them against this limit; raise it only if the "
        "copies below fail.",
        "ulimit -l unlimited, for good: '* - memlock unlimited' in /etc/security/limits.conf; docker run --ulimit memlock=-1",
    )


def _chosen(text: str | None) -> str | None:
    """The word in brackets: how /sys tells which of several is set."""
    match = re.search(r"\[(\S+)\]", text or "")
    return match[1] if match else None


def _memlock(system: System) -> int | None:
    """The soft limit."""
    for line in (system.text("proc/self/limits") or "").splitlines():
        if line.startswith("Max locked memory"):
            soft = line.split()[3]
            return None if soft == "unlimited" else int(soft)
    return None
