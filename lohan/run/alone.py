"""How long each lane's operations take with nothing beside them: the very operations of a schedule, lane after lane.

For each lane the schedule is cut down to that lane's operations, without waits, and run: what they compute or write means
nothing, and nothing of it is kept. So nothing may be pending, and what RAM keeps beside the SSD counts as stale afterwards.
Reading and writing run once more together, as drives share their bandwidth between the two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from lohan.run.executor import Executor, Run, Work
from lohan.run.memory import Memory
from lohan.run.ssd_map import SsdMap
from lohan.schedule.ops import OVERLAPPING_LANES, Kind, Lane, Op, Schedule
from lohan.simulate.contention import Contention
from lohan.simulate.simulator import Costs

Key = tuple[Kind, int, int, int]
"""what an operation is, in any schedule over the same slots: kind, unit, site, chunk"""


@dataclass(frozen=True, slots=True)
class Alone:
    """Seconds of operations alone, and what lanes cost each other."""

    seconds: dict[Key, float]
    gbps: dict[Lane, float]
    """of the lanes that move bytes"""
    contention: Contention
    tokens: int
    """of the batch with which it was measured: compute is scaled by it"""

    def costs(self, tokens: int) -> Costs:
        """What the simulator needs for a batch of so many tokens."""
        scale = tokens / self.tokens if self.tokens else 1.0
        return Costs(lambda op: self.of(op, scale), self.contention)

    def of(self, op: Op, scale: float) -> float:
        """An operation that was not measured itself (another schedule has it) takes what its bytes take on its lane."""
        if op.lane is Lane.COMPUTE:
            return self.seconds.get(key_of(op), 0.0) * scale
        if op.lane in OVERLAPPING_LANES or key_of(op) not in self.seconds:
            return op.nbytes / 1e9 / self.gbps[op.lane] if op.lane in self.gbps else 0.0
        return self.seconds[key_of(op)]


def key_of(op: Op) -> Key:
    return op.kind, op.unit, op.site, op.chunk


class AloneMeasurement:
    """Runs the lanes of one schedule one by one."""

    def __init__(self, executor: Executor, schedule: Schedule, memory: Memory, ssd: SsdMap) -> None:
        self._executor, self._schedule, self._memory, self._ssd = executor, schedule, memory, ssd

    def measure(self, work: Callable[[], Work], compute: Callable[[Run], None], tokens: int) -> Alone:
        """`work` makes what performs the optimizer's operations; `compute` runs the model through a run's compute lane."""
        seconds: dict[Key, float] = {}
        gbps: dict[Lane, float] = {}
        io_cpu_s = io_gb = 0.0
        together = only(self._schedule, OVERLAPPING_LANES)
        for lane in (Lane.COMPUTE, Lane.UPLOAD, Lane.DOWNLOAD, Lane.OPTIMIZER, Lane.SSD_READ, Lane.SSD_WRITE):
            cut = only(self._schedule, {lane})
            if not cut.ops:
                continue
            cpu_s, began_s = time.process_time(), time.perf_counter()
            run = self._executor.start(cut, self._memory, self._ssd, work())
            if lane is Lane.COMPUTE:
                compute(run)
            spans = run.finish()
            took_s = time.perf_counter() - began_s
            seconds.update({key_of(cut.ops[span.op]): span.end_s - span.start_s for span in spans})
            if nbytes := sum(op.nbytes for op in cut.ops):
                gbps[lane] = nbytes / 1e9 / took_s
            if lane in OVERLAPPING_LANES:
                io_cpu_s, io_gb = io_cpu_s + time.process_time() - cpu_s, io_gb + nbytes / 1e9
        mixed = gbps.get(Lane.SSD_READ, 0.0) + gbps.get(Lane.SSD_WRITE, 0.0)
        if Lane.SSD_READ in gbps and Lane.SSD_WRITE in gbps:
            began_s = time.perf_counter()
            self._executor.start(together, self._memory, self._ssd, work()).finish()
            mixed = sum(op.nbytes for op in together.ops) / 1e9 / (time.perf_counter() - began_s)
        return Alone(seconds, gbps, self._contention(gbps, mixed, io_cpu_s / io_gb if io_gb else 0.0), tokens)

    def _contention(self, gbps: dict[Lane, float], mixed: float, io_cpu_s_per_gb: float) -> Contention:
        drive: dict[str, Any] = {}
        if Lane.SSD_READ in gbps and Lane.SSD_WRITE in gbps:
            drive = {"read_gbps": gbps[Lane.SSD_READ], "write_gbps": gbps[Lane.SSD_WRITE], "mixed_gbps": mixed}
        threads = self._executor.device.describe().get("threads", 0)
        if not self._executor.device.is_host or not threads:
            return Contention(**drive)
        cores = {"cores": threads, "compute_threads": threads, "optimizer_threads": 1, "io_cpu_s_per_gb": io_cpu_s_per_gb}
        return Contention(**cores, **drive, served_at_once=1)


def only(schedule: Schedule, lanes: Iterable[Lane]) -> Schedule:
    """The operations of some lanes, with nothing to wait for."""
    ops = [op for op in schedule.ops if op.lane in lanes]
    names = ", ".join(sorted(lane.value for lane in lanes))
    cut = tuple(replace(op, index=index, waits=()) for index, op in enumerate(ops))
    return replace(schedule, name=f"{names} of {schedule.name}", ops=cut, is_rehearsal=True)
