"""The slots of a run: every byte that is moved has its place before the first step.

A slot is *permanent* (one owner keeps it: weights held in RAM, a unit's region of the SSD) or belongs to a *ring*, whose
slots pass from owner to owner. The table depends on the plan and on the sizes of the boundaries alone, so all schedules of
an engine share it, and each tier's peak is a sum that is known beforehand.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from lohan.errors import ScheduleError
from lohan.model.shape import ModelShape, UnitShape, align
from lohan.plan.plan import Plan
from lohan.schedule.ops import Slot, Tier

ALIGN_BYTES = 4096


class Role(Enum):
    """What a slot is for."""

    WEIGHTS = "weights"
    GRADIENT = "gradient"
    STATE = "state"
    BOUNDARY = "boundary"
    SUM = "gradient sum"
    """fp32 sums of the gradients of several slices"""
    SIDE_0 = "side 0"
    """on the SSD: where a unit's version is with which the schedule begins"""
    SIDE_1 = "side 1"
    """and where its next one goes"""
    FROZEN = "frozen"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes per element of everything that moves: numerics, as planning sees them."""

    weight: int
    """also the gradient's"""
    state_planes: tuple[int, ...]
    """the rest of a split master, then the optimizer's planes"""

    @property
    def state(self) -> int:
        return sum(self.state_planes)

    def weights_of(self, unit: UnitShape) -> int:
        return unit.elements * self.weight

    def trainable_of(self, unit: UnitShape) -> int:
        return unit.trainable_elements * self.weight

    def frozen_of(self, unit: UnitShape) -> int:
        return unit.frozen_elements * self.weight

    def region_of(self, unit: UnitShape) -> int:
        """One side of the unit on the SSD: the planes of trainable weights, then of state, one behind the other."""
        return unit.trainable_elements * (self.weight + self.state)


class Ring:
    """Slots that pass from owner to owner, the one that was free longest first. A free slot keeps what it holds until taken."""

    def __init__(self, name: str, slots: Sequence[int]) -> None:
        self._name, self._num = name, len(slots)
        self._free: deque[int] = deque(slots)
        self._owner: dict[int, int] = {}
        self._held: dict[int, int] = {}

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take(self, owner: int) -> tuple[int, bool]:
        """A slot for `owner`, and whether it still holds what the owner left there. Taken twice, it must be given twice."""
        for slot in (*self._held, *self._free):
            if self._owner.get(slot) == owner:
                if slot in self._free:
                    self._free.remove(slot)
                self._held[slot] = self._held.get(slot, 0) + 1
                return slot, True
        if not self._free:
            raise ScheduleError(f"the {self._num} {self._name} slots are all in use: the plan needs more of them")
        slot = self._free.popleft()
        self._owner[slot], self._held[slot] = owner, 1
        return slot, False

    def give(self, slot: int, *, forget: bool = False) -> None:
        """The end of one use. With `forget`, nobody will find there what it holds."""
        self._held[slot] -= 1
        if forget:
            self._owner.pop(slot, None)
        if not self._held[slot]:
            del self._held[slot]
            self._free.append(slot)


class SlotTable:
    """All slots of an engine, and who finds which."""

    def __init__(
        self, shape: ModelShape, plan: Plan, sizes: Sizes, boundary_bytes: Sequence[int], *, on_host: bool, sums: bool
    ) -> None:
        self.slots: list[Slot] = []
        self._permanent: dict[tuple[Tier, Role, int], int] = {}
        self._rings: dict[tuple[Tier, Role], list[int]] = {}
        self.boundary_bytes = [align(nbytes, ALIGN_BYTES) for nbytes in boundary_bytes]
        self._shape, self._plan, self._sizes = shape, plan, sizes
        self._add_units()
        self._add_boundaries(on_host)
        self._add_rings(on_host, sums)

    @property
    def boundary_slots(self) -> frozenset[int]:
        """Those that depend on the batch although one site keeps them."""
        return frozenset(slot for (_, role, _), slot in self._permanent.items() if role is Role.BOUNDARY)

    def permanent(self, tier: Tier, role: Role, owner: int) -> int | None:
        """The slot that `owner` keeps for good, if it has one."""
        return self._permanent.get((tier, role, owner))

    def rings(self) -> dict[tuple[Tier, Role], Ring]:
        """The rings, all slots free: for one schedule."""
        return {key: Ring(f"{key[0].value} {key[1].value}", slots) for key, slots in self._rings.items()}

    def _add(self, name: str, tier: Tier, nbytes: int, *, owner: int = -1) -> int:
        self.slots.append(Slot(len(self.slots), name, tier, align(nbytes, ALIGN_BYTES), owner))
        return len(self.slots) - 1

    def _keep(self, tier: Tier, role: Role, owner: int, name: str, nbytes: int) -> None:
        if nbytes:
            self._permanent[tier, role, owner] = self._add(f"{name} {role.value}", tier, nbytes, owner=owner)

    def _add_units(self) -> None:
        for index, (unit, plan) in enumerate(zip(self._shape.units, self._plan.units, strict=True)):
            sizes = self._sizes
            if plan.weights is Tier.HOST:
                self._keep(Tier.HOST, Role.WEIGHTS, index, unit.name, sizes.weights_of(unit))
            if plan.state is Tier.HOST:
                self._keep(Tier.HOST, Role.STATE, index, unit.name, unit.trainable_elements * sizes.state)
            if plan.gradient is Tier.HOST:
                self._keep(Tier.HOST, Role.GRADIENT, index, unit.name, sizes.trainable_of(unit))
            if self._plan.use_ssd:
                self._keep(Tier.SSD, Role.SIDE_0, index, unit.name, sizes.region_of(unit))
                self._keep(Tier.SSD, Role.SIDE_1, index, unit.name, sizes.region_of(unit))
                self._keep(Tier.SSD, Role.FROZEN, index, unit.name, sizes.frozen_of(unit))
                if plan.gradient is Tier.SSD:
                    self._keep(Tier.SSD, Role.GRADIENT, index, unit.name, sizes.trainable_of(unit))

    def _add_boundaries(self, on_host: bool) -> None:
        for index, (site, tier) in enumerate(zip(self._shape.sites, self._plan.boundaries, strict=True)):
            tier = Tier.HOST if on_host and tier is Tier.DEVICE else tier
            self._keep(tier, Role.BOUNDARY, index, site.name, self.boundary_bytes[index])

    def _add_rings(self, on_host: bool, sums: bool) -> None:
        units, plan, sizes = self._shape.units, self._plan, self._sizes
        largest = max(sizes.weights_of(u) for u in units)
        gradient = max(sizes.trainable_of(u) for u in units)
        chunk = min(plan.chunk_elements, max(u.trainable_elements for u in units)) * sizes.state
        boundary = max(self.boundary_bytes, default=0)
        if any(u.weights is Tier.SSD for u in plan.units):
            self._ring(Tier.HOST, Role.WEIGHTS, plan.weight_slots, largest)
        if any(u.gradient is Tier.SSD for u in plan.units):
            self._ring(Tier.HOST, Role.GRADIENT, plan.gradient_slots, gradient)
        if any(u.state is Tier.SSD for u in plan.units):
            self._ring(Tier.HOST, Role.STATE, plan.state_slots, chunk)
        if Tier.SSD in plan.boundaries:
            self._ring(Tier.HOST, Role.BOUNDARY, plan.boundary_slots, boundary)
        if sums:
            elements = max(u.trainable_elements for u in units)
            self._ring(Tier.HOST if on_host else Tier.DEVICE, Role.SUM, 1, elements * 4)
        if not on_host:
            self._ring(Tier.DEVICE, Role.WEIGHTS, plan.device_weight_slots, largest)
            self._ring(Tier.DEVICE, Role.GRADIENT, plan.device_gradient_slots, gradient)
            self._ring(Tier.DEVICE, Role.BOUNDARY, plan.device_boundary_slots, boundary)

    def _ring(self, tier: Tier, role: Role, num: int, nbytes: int) -> None:
        if nbytes:
            names = (f"{tier.value} {role.value} {i}" for i in range(num))
            self._rings[tier, role] = [self._add(name, tier, nbytes) for name in names]
