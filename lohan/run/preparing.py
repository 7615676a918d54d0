"""From a batch to memory: sizes, plan, slots; kept for all batches that are no larger.

rehearse   what the model's own operations will hold beside the slots
plan       the policy, or the caller, says what lives where; refused if a budget does not hold slots and workspace
adopt      slots become memory, places on the SSD, and a builder of schedules
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from lohan.device.protocol import Device
from lohan.errors import BudgetError
from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan
from lohan.plan.policies import Situation, auto_plan, memory_plan
from lohan.run.memory import Memory, Workspace
from lohan.run.storage import Storage
from lohan.run.training import Prepared
from lohan.schedule.builder import Call, Mode, ScheduleBuilder
from lohan.schedule.ops import Schedule, Tier
from lohan.schedule.slots import Sizes

Rehearse = Callable[[Schedule], Workspace]


@dataclass(slots=True)
class Preparer:
    """Prepares batches for one model on one device."""

    shape: ModelShape
    sizes: Sizes
    device: Device
    memory: Memory
    storage: Storage | None
    placement: str | Plan
    host_bytes: int
    clips: bool
    current: Prepared | None = None

    def fits(self, boundary_bytes: Sequence[int], num_slices: int) -> Prepared | None:
        """What is prepared, if it holds such a batch."""
        now = self.current
        if now is None or any(n > b for n, b in zip(boundary_bytes, now.table.boundary_bytes, strict=True)):
            return None
        return now if now.builder.sums or num_slices == 1 else None

    def prepare(self, boundary_bytes: Sequence[int], num_slices: int, rehearse: Rehearse | None) -> Prepared:
        """Make room for such a batch, and for all that were prepared before. Nothing may be pending or run."""
        sums = num_slices > 1
        if self.current is not None:
            before = self.current.table.boundary_bytes
            boundary_bytes = [max(n, b) for n, b in zip(boundary_bytes, before, strict=True)]
            sums = sums or self.current.builder.sums
        situation = Situation(self.shape, self.sizes, boundary_bytes, self.device.is_host, sums, self.clips)
        workspace = Workspace(0, "nothing was computed yet")
        if rehearse is not None:
            workspace = rehearse(_as_on_host(situation))
        situation = replace(situation, workspace_bytes=workspace.nbytes, overhead_bytes=self.device.overhead_bytes)
        plan = self._plan(situation)
        self._check(situation, plan)
        table = situation.slots(plan)
        if self.storage is not None:
            spilled = [n if plan.boundaries[i] is Tier.SSD else 0 for i, n in enumerate(table.boundary_bytes)]
            self.storage.spill_boundaries(spilled)
        self.memory.adopt(table)
        builder = ScheduleBuilder(self.shape, plan, self.sizes, table, on_host=self.device.is_host, sums=sums)
        places = self.storage.places if self.storage is not None else {}
        self.current = Prepared(plan, table, builder, self.memory, places, workspace)
        return self.current

    def _plan(self, situation: Situation) -> Plan:
        if isinstance(self.placement, Plan):
            return self.placement
        if self.placement == "memory":
            return memory_plan(self.shape)
        return auto_plan(situation, self.host_bytes, self.device.memory_bytes)

    def _check(self, situation: Situation, plan: Plan) -> None:
        """Slots and workspace within the budgets, whoever made the plan."""
        for tier, option, budget in (
            (Tier.HOST, "host_memory", self.host_bytes),
            (Tier.DEVICE, "device_memory", self.device.memory_bytes),
        ):
            needed = situation.tier_bytes(plan, tier)
            if budget is not None and needed > budget:
                reason = f"this plan's buffers and the model's own operations need {needed} bytes"
                raise BudgetError(option, budget, needed, reason)


def _as_on_host(situation: Situation) -> Schedule:
    """A training schedule whose compute lane is everybody's: the same on every device and for every plan."""
    on_host = replace(situation, on_host=True)
    plan = memory_plan(situation.shape)
    table = on_host.slots(plan)
    builder = ScheduleBuilder(situation.shape, plan, situation.sizes, table, on_host=True, sums=situation.sums)
    return builder.build(Call(Mode.TRAIN))
