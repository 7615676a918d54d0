"""The processor: what it is, how many of its cores this process may use, and which of lohan's kernels it runs.

Cores are bounded twice: by affinity (taskset, a cgroup's cpuset), which says which, and by a quota (docker --cpus, systemd's
CPUQuota), which says how much time. A quota is worse than it looks: threads for all cores start, and stand still together.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass

from lohan.host import cgroups
from lohan.machine.findings import Finding, Level
from lohan.machine.system import System

AREA = "processor"
MATRIX_FLAGS = ("amx_bf16", "avx512_bf16")
"""instructions that multiply bf16, the fastest first"""


@dataclass(frozen=True, slots=True)
class Processor:
    """One machine's processors, as this process sees them."""

    model: str
    num_online: int
    num_allowed: int
    """by affinity"""
    quota: float | None
    """cores' worth of time that cgroups allow"""
    flags: frozenset[str]

    @property
    def cores(self) -> int:
        """That can be kept busy."""
        return self.num_allowed if self.quota is None else max(1, min(self.num_allowed, math.floor(self.quota)))

    @property
    def bf16(self) -> str | None:
        """The fastest instructions that multiply bf16; None: torch converts to fp32 and back."""
        return next((flag for flag in MATRIX_FLAGS if flag in self.flags), None)


def read_processor(system: System) -> Processor:
    """What /proc and /sys tell of it."""
    info = "proc/cpuinfo"
    model = next((m for key in ("model name", "Model", "Hardware") if (m := system.field(info, key))), "unknown")
    allowed = _num_listed(system.field("proc/self/status", "Cpus_allowed_list"))
    online = _num_listed(system.text("sys/devices/system/cpu/online")) or os.cpu_count() or 1
    flags = system.field(info, "flags") or system.field(info, "Features") or ""
    return Processor(model, online, min(allowed or online, online), _quota(system), frozenset(flags.split()))


def processor_findings(processor: Processor) -> Iterator[Finding]:
    """Model, cores, and what multiplies bf16."""
    yield Finding(AREA, "model", processor.model)
    online, cores = processor.num_online, processor.cores
    if processor.quota is not None and processor.quota < processor.num_allowed:
        yield Finding(
            AREA,
            "cores",
            f"{processor.quota:g} of {online} (a cgroup's quota)",
            Level.WARNING,
            f"A quota gives this process {processor.quota:g} cores' worth of time, but torch starts {processor.num_allowed} "
            "threads, which then all stand still for the rest of each period.",
            f"Raise the quota (docker --cpus, systemd CPUQuota), or set OMP_NUM_THREADS={cores}",
        )
    elif processor.num_allowed < online:
        yield Finding(
            AREA,
            "cores",
            f"{processor.num_allowed} of {online} (affinity)",
            Level.WARNING,
            f"This process may run on {processor.num_allowed} of the machine's {online} cores only.",
            "Start it without taskset, or give its container more (docker --cpuset-cpus)",
        )
    else:
        yield Finding(AREA, "cores", f"{cores}, all usable")
    if processor.bf16 is None:
        wrong = "No instructions that multiply bf16: on device=cpu, dtype=fp32 may be faster. With a GPU it does not matter."
        yield Finding(AREA, "bf16", "converted to fp32", Level.NOTE, wrong)
    else:
        yield Finding(AREA, "bf16", processor.bf16)


def _num_listed(text: str | None) -> int:
    """How many numbers a list like 0-3,8 has."""
    total = 0
    for part in (text or "").split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            total += int(last or first) - int(first) + 1
    return total


def _quota(system: System) -> float | None:
    """The tightest of all cgroups above this process, in cores."""
    quotas = []
    try:
        for version, folder in cgroups.folders(system.root, "cpu"):
            if version == 2:
                limit, _, period = (system.text(folder / "cpu.max") or "max").partition(" ")
            else:
                limit, period = (system.text(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period"))
            if limit.isdecimal() and period.isdecimal() and int(period) > 0:
                quotas.append(int(limit) / int(period))
    except OSError:
        return None
    return min(quotas, default=None)
