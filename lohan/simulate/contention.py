"""How lanes that are busy at the same time slow each other down.

A lane that is alone works at rate 1. Lanes share three resources, and each resource is shared *max-min fairly*: nobody gets
more than he demands, and what one user leaves is divided equally among those who want more. That is a level L with

    sum over users of min(demand, L) = capacity            (no level, and nobody slowed, if the demands fit)

and a user who demands more than L works at L / demand of his rate. The resources, in the order in which they are applied; each
demand is counted at the rate that the resources before it have left:

    drive    users: SSD_READ, SSD_WRITE, when both are busy       capacity: mixed_gbps    demand: read_gbps, write_gbps
    cores    users: threads of COMPUTE and OPTIMIZER, which       capacity: cores         demand: 1 a thread; I/O lane:
             want a core each; one thread for an I/O lane                                 io_cpu_s_per_gb x its GB/s
    memory   users: all lanes                                     capacity: memory_gbps   demand: GB/s of the lane

So reading and writing together reach what was measured as mixed; three threads on two cores get two thirds each; and I/O, whose
threads mostly sleep, is not slowed by computing but takes its share from it: as the kernel's scheduler does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import ceil, inf, isfinite

from lohan.errors import OptionError
from lohan.schedule.ops import Lane

Demand = tuple[int, float]
"""how many users, what each of them demands"""


@dataclass(frozen=True, slots=True)
class Contention:
    """What the lanes of a machine share. The default is a machine on which they do not meet."""

    cores: float = inf
    """of the CPU"""
    compute_threads: float = 0.0
    """that the compute lane keeps busy: one for each core where the CPU computes, a fraction of one beside a GPU"""
    optimizer_threads: float = 0.0
    """that the optimizer keeps busy"""
    io_cpu_s_per_gb: float = 0.0
    """core-seconds that reading or writing one GB costs"""
    read_gbps: float = inf
    """of the drives, while nothing is written"""
    write_gbps: float = inf
    """of the drives, while nothing is read"""
    mixed_gbps: float = inf
    """of the drives, both directions together"""
    memory_gbps: float = inf
    """of host memory; no less than any lane draws alone"""
    compute_memory_gbps: float = 0.0
    """that the compute lane alone draws from host memory"""
    served_at_once: int = 2
    """operations of one SSD lane that share its bandwidth equally; those started behind them queue"""

    def __post_init__(self) -> None:
        for field in fields(self):
            value, may_be_zero = getattr(self, field.name), field.default == 0.0
            if not (value > 0 or (may_be_zero and value == 0)):
                bound = "not negative" if may_be_zero else "above zero"
                raise OptionError(field.name, value, f"it has to be {bound}", "Measure the machine again")
        limits = {"compute_threads": "cores", "optimizer_threads": "cores", "compute_memory_gbps": "memory_gbps"}
        for name, limit in limits.items():
            if getattr(self, name) > getattr(self, limit):
                reason = f"a lane alone cannot use more than {limit}={getattr(self, limit)}"
                raise OptionError(name, getattr(self, name), reason, f"Set it to {limit} at most")
        if isfinite(self.mixed_gbps) and not (isfinite(self.read_gbps) and isfinite(self.write_gbps)):
            reason = "it says nothing without the rates of reading and writing alone"
            raise OptionError("mixed_gbps", self.mixed_gbps, reason, "Set read_gbps and write_gbps as well")

    def rates(self, alone_gbps: Mapping[Lane, float]) -> dict[Lane, float]:
        """The rate, at most 1, of each busy lane; `alone_gbps` names the busy lanes and what they move when alone."""
        rates = dict.fromkeys(alone_gbps, 1.0)
        if isfinite(self.mixed_gbps) and Lane.SSD_READ in rates and Lane.SSD_WRITE in rates:
            drive = {Lane.SSD_READ: (1, self.read_gbps), Lane.SSD_WRITE: (1, self.write_gbps)}
            _share(self.mixed_gbps, drive, rates)
        if isfinite(self.cores):
            _share(self.cores, self._core_demands(alone_gbps, rates), rates)
        if isfinite(self.memory_gbps):
            drawn_gbps = {**alone_gbps, Lane.COMPUTE: self.compute_memory_gbps}
            _share(self.memory_gbps, {lane: (1, drawn_gbps[lane] * rate) for lane, rate in rates.items()}, rates)
        return rates

    def _core_demands(self, alone_gbps: Mapping[Lane, float], rates: Mapping[Lane, float]) -> dict[Lane, Demand]:
        demands: dict[Lane, Demand] = {}
        for lane, threads in ((Lane.COMPUTE, self.compute_threads), (Lane.OPTIMIZER, self.optimizer_threads)):
            if lane in rates:
                num = max(1, ceil(threads))
                demands[lane] = (num, threads / num * rates[lane])
        for lane in (Lane.SSD_READ, Lane.SSD_WRITE):
            if lane in rates:
                demands[lane] = (1, self.io_cpu_s_per_gb * alone_gbps[lane] * rates[lane])
        return demands


def fair_level(capacity: float, demands: Iterable[Demand]) -> float:
    """The level of max-min fairness: what those users get who do not get all they demand; inf if all do."""
    waiting = sorted(demands, key=lambda demand: demand[1])
    num_waiting = sum(num for num, _ in waiting)
    for num, each in waiting:
        if each * num_waiting > capacity:
            return capacity / num_waiting
        capacity -= each * num
        num_waiting -= num
    return inf


def _share(capacity: float, demands: Mapping[Lane, Demand], rates: dict[Lane, float]) -> None:
    """Lower `rates` to what a resource of `capacity` gives each lane."""
    level = fair_level(capacity, demands.values())
    for lane, (_, each) in demands.items():
        if each > level:
            rates[lane] *= level / each
