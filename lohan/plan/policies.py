"""Policies: from sizes and budgets to a Plan. No torch.

memory_plan   everything in RAM; the reference, and the fastest way where it fits
auto_plan     everything on the SSD, buffers as large as the budget allows up to what overlap needs, and then, with what RAM is
              left, whatever saves the most traffic per byte
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lohan.config import StoreMode
from lohan.errors import BudgetError
from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan, UnitPlan, Update
from lohan.schedule.ops import Tier
from lohan.schedule.slots import Sizes, SlotTable

MIB = 2**20


@dataclass(frozen=True, slots=True)
class Situation:
    """What a policy knows."""

    shape: ModelShape
    sizes: Sizes
    boundary_bytes: Sequence[int]
    """of each site, for the largest batch"""
    on_host: bool
    """the device computes from host memory"""
    sums: bool
    """several slices: their gradients are summed in fp32"""
    clips: bool
    """the gradient's norm is limited"""
    mode: StoreMode = StoreMode.DOUBLE
    """how the SSD keeps what changes"""
    workspace_bytes: int = 0
    """what the model's own operations hold at most, on the tier that computes"""
    overhead_bytes: int = 0
    """what the device's runtime takes of its memory"""

    def slots(self, plan: Plan) -> SlotTable:
        return SlotTable(self.shape, plan, self.sizes, self.boundary_bytes, on_host=self.on_host, sums=self.sums)

    def tier_bytes(self, plan: Plan, tier: Tier) -> int:
        """What the slots of a plan, and the workspace, take of a tier."""
        computes = tier is (Tier.HOST if self.on_host else Tier.DEVICE)
        slots = sum(slot.nbytes for slot in self.slots(plan).slots if slot.tier is tier)
        overhead_bytes = self.overhead_bytes if tier is Tier.DEVICE else 0
        return slots + overhead_bytes + (self.workspace_bytes if computes else 0)


def memory_plan(shape: ModelShape) -> Plan:
    """Everything in RAM. Updates wait until the norm is known: there is no second copy to go back to."""
    unit = UnitPlan(Tier.HOST, Tier.HOST, Tier.HOST, Update.DEFER)
    return Plan(units=(unit,) * len(shape.units), boundaries=(Tier.HOST,) * len(shape.sites), use_ssd=False)


def ssd_plan(shape: ModelShape, *, clips: bool, mode: StoreMode = StoreMode.DOUBLE) -> Plan:
    """Everything on the SSD, in the usual buffers."""
    early = Update.SPECULATE if clips else Update.IMMEDIATE
    unit = UnitPlan(update=early if mode is StoreMode.DOUBLE else Update.DEFER)
    return Plan(units=(unit,) * len(shape.units), boundaries=(Tier.SSD,) * len(shape.sites))


def auto_plan(situation: Situation, host_bytes: int, device_bytes: int | None) -> Plan:
    """The best plan that this policy knows within the budgets; BudgetError names the smallest budget that works."""
    plan = ssd_plan(situation.shape, clips=situation.clips, mode=situation.mode)
    grain = situation.shape.grain_elements
    choices = [replace(plan, **buffers) for buffers in _HOST_BUFFERS]
    choices = [replace(choice, chunk_elements=max(choice.chunk_elements, grain)) for choice in choices]
    plan = _first_that_fits(situation, Tier.HOST, host_bytes, "host_memory", choices)
    if device_bytes is not None:
        choices = [replace(plan, **buffers) for buffers in _DEVICE_BUFFERS]
        plan = _first_that_fits(situation, Tier.DEVICE, device_bytes, "device_memory", choices)
    return _fill_ram(situation, plan, host_bytes)


_HOST_BUFFERS: tuple[dict[str, Any], ...] = (
    {"prefetch": 2, "weight_slots": 4, "gradient_slots": 2, "state_slots": 6, "boundary_slots": 4, "chunk_elements": 4 * MIB},
    {"prefetch": 1, "weight_slots": 3, "gradient_slots": 2, "state_slots": 4, "boundary_slots": 3, "chunk_elements": 4 * MIB},
    {"prefetch": 1, "weight_slots": 3, "gradient_slots": 2, "state_slots": 4, "boundary_slots": 2, "chunk_elements": 2 * MIB},
    {"prefetch": 1, "weight_slots": 2, "gradient_slots": 1, "state_slots": 3, "boundary_slots": 2, "chunk_elements": 1 * MIB},
    {"prefetch": 1, "weight_slots": 2, "gradient_slots": 1, "state_slots": 2, "boundary_slots": 2, "chunk_elements": MIB // 4},
    {"prefetch": 0, "weight_slots": 1, "gradient_slots": 1, "state_slots": 1, "boundary_slots": 1, "chunk_elements": MIB // 16},
)
"""from what overlap wants to what can work at all"""

_DEVICE_BUFFERS: tuple[dict[str, Any], ...] = (
    {"device_prefetch": 1, "device_weight_slots": 3, "device_gradient_slots": 2, "device_boundary_slots": 3},
    {"device_prefetch": 1, "device_weight_slots": 2, "device_gradient_slots": 2, "device_boundary_slots": 2},
    {"device_prefetch": 1, "device_weight_slots": 2, "device_gradient_slots": 1, "device_boundary_slots": 2},
    {"device_prefetch": 0, "device_weight_slots": 1, "device_gradient_slots": 1, "device_boundary_slots": 1},
)


def _first_that_fits(situation: Situation, tier: Tier, budget: int, option: str, choices: Sequence[Plan]) -> Plan:
    needed = [situation.tier_bytes(plan, tier) for plan in choices]
    for plan, nbytes in zip(choices, needed, strict=True):
        if nbytes <= budget:
            return plan
    reason = f"the smallest buffers for this model and batch, and its own operations, need {min(needed)} bytes"
    raise BudgetError(option, budget, min(needed), reason)


def _fill_ram(situation: Situation, plan: Plan, host_bytes: int) -> Plan:
    """Keep in RAM what saves the most traffic for each byte of it, as long as there is room."""
    left = host_bytes - situation.tier_bytes(plan, Tier.HOST)
    for nbytes, keep in _savings(situation):
        if nbytes <= left:
            plan, left = keep(plan), left - nbytes
    return plan


def _savings(situation: Situation) -> Iterator[tuple[int, Callable[[Plan], Plan]]]:
    """What can be kept and what that costs; first what is moved twice a step, then what is moved once."""
    sizes, units = situation.sizes, list(enumerate(situation.shape.units))
    for site, nbytes in enumerate(situation.boundary_bytes):
        yield nbytes + 4096, lambda plan, site=site: _keep_boundary(plan, site)  # type: ignore[misc]
    for index, unit in units:
        yield sizes.weights_of(unit) + 4096, lambda plan, i=index: _keep(plan, i, "weights")  # type: ignore[misc]
    if (situation.clips and situation.mode is StoreMode.DOUBLE) or situation.mode is StoreMode.SINGLE:
        for index, unit in units:
            yield sizes.trainable_of(unit) + 4096, lambda plan, i=index: _keep(plan, i, "gradient")  # type: ignore[misc]
    for index, unit in units:
        nbytes = unit.trainable_elements * sizes.state + 4096
        yield nbytes, lambda plan, i=index: _keep(plan, i, "state")  # type: ignore[misc]


def _keep(plan: Plan, unit: int, what: str) -> Plan:
    changed: dict[str, Any] = {what: Tier.HOST}
    units = list(plan.units)
    units[unit] = replace(units[unit], **changed)
    return replace(plan, units=tuple(units))


def _keep_boundary(plan: Plan, site: int) -> Plan:
    tiers = list(plan.boundaries)
    tiers[site] = Tier.HOST
    return replace(plan, boundaries=tuple(tiers))
