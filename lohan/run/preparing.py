"""From batches to memory: sizes, plan, slots; kept for all batches that are no larger.

grow    a batch is larger than all before: what will the model's own operations hold beside the slots (a rehearsal), and what
        lives where (the policy, or the caller)? Refused if a budget does not hold slots and workspace. Nothing is taken yet
adopt   slots become memory, places on the SSD, and a builder of schedules
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from lohan.config import StoreMode
from lohan.device.protocol import Device
from lohan.errors import BudgetError, OptionError
from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan, Update
from lohan.plan.policies import Situation, auto_plan, memory_plan
from lohan.run.batches import HostSlice
from lohan.run.boundaries import boundary_bytes
from lohan.run.memory import Memory, Workspace
from lohan.run.passes import LossFn, ModelRunner
from lohan.run.rehearsal import rehearse
from lohan.run.storage import Storage
from lohan.run.training import Prepared
from lohan.schedule.builder import Call, Mode, ScheduleBuilder
from lohan.schedule.ops import Schedule, Tier
from lohan.schedule.slots import Sizes, SlotTable


@dataclass(frozen=True, slots=True)
class Room:
    """What there is room for, or will be once it is adopted."""

    boundary_bytes: Sequence[int]
    """of each site, for the largest batch of training"""
    evaluated_bytes: Sequence[int]
    """the same for evaluation, which keeps none of them: how large a batch was"""
    sums: bool
    workspace: Workspace

    def covers(self, batch: BatchBytes) -> bool:
        """What trains can also be evaluated."""
        if batch.evaluates:
            return _within(batch.boundary_bytes, self.boundary_bytes) or _within(batch.boundary_bytes, self.evaluated_bytes)
        return _within(batch.boundary_bytes, self.boundary_bytes) and (self.sums or batch.num_slices <= 1)

    def with_batch(self, batch: BatchBytes, workspace: Workspace) -> Room:
        larger = max(self.workspace, workspace, key=lambda one: one.nbytes)
        if batch.evaluates:
            return replace(self, evaluated_bytes=_larger(batch.boundary_bytes, self.evaluated_bytes), workspace=larger)
        boundary_bytes = _larger(batch.boundary_bytes, self.boundary_bytes)
        return replace(self, boundary_bytes=boundary_bytes, sums=self.sums or batch.num_slices > 1, workspace=larger)


@dataclass(frozen=True, slots=True)
class BatchBytes:
    """How large a batch is."""

    boundary_bytes: Sequence[int]
    """of each site's inputs, all slices together"""
    num_slices: int
    evaluates: bool = False


@dataclass(slots=True)
class Preparer:
    """Prepares batches for one model on one device."""

    shape: ModelShape
    sizes: Sizes
    device: Device
    memory: Memory
    placement: str | Plan
    host_bytes: int
    clips: bool
    runner: ModelRunner
    mode: StoreMode
    storage: Storage | None = None
    """where the SSD's slots are; not needed to grow"""
    current: Prepared | None = None
    room: Room = field(init=False)
    _plan: Plan | None = field(init=False, default=None)
    """for the room as it is"""

    def __post_init__(self) -> None:
        nothing = [0] * len(self.shape.sites)
        self.room = Room(nothing, nothing, False, Workspace(0, "nothing was computed yet"))

    def size_of(self, slices: Sequence[HostSlice], *, evaluates: bool) -> BatchBytes:
        """How large a batch is."""
        recording, needed = self.runner.recording, [0] * len(self.shape.sites)
        for one in slices:
            for site, inputs in enumerate(recording.inputs_of(one)):
                needed[site] += boundary_bytes([(shape, self.runner.dtype) for shape in inputs])
        return BatchBytes(needed, len(slices), evaluates)

    def grow(self, slices: Sequence[HostSlice], loss_fn: LossFn | None, *, evaluates: bool) -> None:
        """Plan for such a batch, and for all before; BudgetError, and no change, if that cannot be. Nothing may be pending."""
        batch = self.size_of(slices, evaluates=evaluates)
        room = self.room.with_batch(batch, self.room.workspace)
        whole = _as_on_host(self._situation(room), Mode.EVALUATE if evaluates else Mode.TRAIN)
        workspace = rehearse(self.runner, whole, slices=slices, loss_fn=loss_fn, evaluates=evaluates)
        room = room.with_batch(batch, workspace)
        situation = self._situation(room)
        plan = self._choose(situation)
        self._check(situation, plan)
        is_same = (plan, room.boundary_bytes, room.sums) == (self._plan, self.room.boundary_bytes, self.room.sums)
        self.room, self._plan = room, plan
        self.device.expect_workspace(room.workspace.nbytes)
        if is_same and self.current is not None:
            self.current.workspace = room.workspace
        else:
            self.current = None

    @property
    def spill_bytes(self) -> int:
        """What the boundaries of the room as it is will take on the SSD."""
        return (
            0 if self._plan is None else Storage.spill_bytes(_spilled(self._plan, self._situation(self.room).slots(self._plan)))
        )

    def adopt(self) -> Prepared:
        """Make the room. Nothing may be pending or run."""
        if self.current is not None:
            return self.current
        situation = self._situation(self.room)
        plan = self._plan or self._choose(situation)
        self._check(situation, plan)
        table = situation.slots(plan)
        if self.storage is not None:
            self.storage.spill_boundaries(_spilled(plan, table))
        self.memory.adopt(table)
        builder = ScheduleBuilder(self.shape, plan, self.sizes, table, on_host=self.device.is_host, sums=situation.sums)
        self._plan = plan
        self.current = Prepared(plan, table, builder, self.memory, self.room.workspace)
        return self.current

    def _situation(self, room: Room) -> Situation:
        return Situation(
            self.shape,
            self.sizes,
            room.boundary_bytes,
            self.device.is_host,
            room.sums,
            self.clips,
            self.mode,
            workspace_bytes=room.workspace.nbytes,
            overhead_bytes=self.device.overhead_bytes,
        )

    def _choose(self, situation: Situation) -> Plan:
        if isinstance(self.placement, Plan):
            return self.placement
        if self.placement == "memory":
            return memory_plan(self.shape)
        return auto_plan(situation, self.host_bytes, self.device.memory_bytes)

    def _check(self, situation: Situation, plan: Plan) -> None:
        """What the store can do, and slots and workspace within the budgets, whoever made the plan."""
        if plan.use_ssd:
            self._check_store(plan)
        for tier, option, budget in (
            (Tier.HOST, "host_memory", self.host_bytes),
            (Tier.DEVICE, "device_memory", self.device.memory_bytes),
        ):
            needed = situation.tier_bytes(plan, tier)
            if budget is not None and needed > budget:
                reason = f"this plan's buffers and the model's own operations need {needed} bytes"
                raise BudgetError(option, budget, needed, reason)

    def _check_store(self, plan: Plan) -> None:
        """A plan made by hand may ask for what the store does not have."""
        if plan.chunk_elements % (grain := self.shape.grain_elements):
            reason = f"the store of this model is checked in grains of {grain} elements"
            raise OptionError("plan.chunk_elements", plan.chunk_elements, reason, f"Use a multiple of {grain}")
        if self.mode is StoreMode.DOUBLE:
            return
        for unit, shape in zip(plan.units, self.shape.units, strict=True):
            if shape.trainable_elements and unit.update is not Update.DEFER:
                reason = f"store={self.mode.value!r} has no second place for {shape.name}, so its update waits for the norm"
                raise OptionError("plan.units[].update", unit.update.value, reason, "Use defer, or store='double'")
            if shape.trainable_elements and unit.gradient is not Tier.SSD and self.mode is StoreMode.LOG:
                reason = f"store='log' makes the update of {shape.name} again from its gradient after a crash"
                raise OptionError("plan.units[].gradient", unit.gradient.value, reason, "Use ssd, or store='double'")


def _as_on_host(situation: Situation, mode: Mode) -> Schedule:
    """A schedule whose compute lane is everybody's: the same on every device and for every plan."""
    on_host = replace(situation, on_host=True)
    plan = memory_plan(situation.shape)
    table = on_host.slots(plan)
    builder = ScheduleBuilder(situation.shape, plan, situation.sizes, table, on_host=True, sums=situation.sums)
    return builder.build(Call(mode))


def _spilled(plan: Plan, table: SlotTable) -> list[int]:
    """Of each boundary, what the SSD keeps of it."""
    return [n if plan.boundaries[i] is Tier.SSD else 0 for i, n in enumerate(table.boundary_bytes)]


def _within(small: Sequence[int], large: Sequence[int]) -> bool:
    return all(s <= n for s, n in zip(small, large, strict=True))


def _larger(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [max(a, b) for a, b in zip(one, other, strict=True)]
