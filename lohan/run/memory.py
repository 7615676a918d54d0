"""The bytes behind a table of slots: host and device slots as tensors. Where SSD slots lie: `run.ssd_map`.

What RAM keeps (weights, state, waiting gradients) lies in one pool, what depends on the batch in another, so that a larger
batch replaces the second only.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lohan.device.protocol import Device
from lohan.errors import BudgetError
from lohan.host.pool import HostPool
from lohan.schedule.ops import Access, Tier
from lohan.schedule.slots import Role, SlotTable


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the model's own operations hold at most in a step, beside the slots."""

    nbytes: int
    note: str
    """how it is known, or why it is not"""


class Memory:
    """Resolves accesses of schedules over one slot table."""

    def __init__(self, device: Device, host_budget: int) -> None:
        self._device, self._host_budget = device, host_budget
        self._kept: dict[str, Tensor] = {}
        """what RAM keeps from one table to the next, by name"""
        self._pools: list[HostPool] = []
        self._moving: HostPool | None = None
        self._device_slabs: dict[str, Tensor] = {}
        self._views: dict[tuple[int, int, int], Tensor] = {}
        self.tensors: dict[int, Tensor] = {}

    def adopt(self, table: SlotTable) -> None:
        """Lay out a table's slots. What RAM keeps stays where it is if the new table has it; the rest is laid out anew."""
        host = [slot for slot in table.slots if slot.tier is Tier.HOST]
        if (needed := sum(slot.nbytes for slot in host)) > self._host_budget:
            raise BudgetError("host_memory", self._host_budget, needed, f"the buffers of this plan need {needed} bytes")
        self.table = table
        self._views.clear()
        self.tensors.clear()
        if self._moving is not None:
            self._close_pool(self._moving)
            self._moving = None
        names = {slot.name for slot in host}
        self._kept = {name: tensor for name, tensor in self._kept.items() if name in names}
        is_kept = {slot.index: slot.owner >= 0 and slot.index not in table.boundary_slots for slot in host}
        fresh = [slot for slot in host if is_kept[slot.index] and slot.name not in self._kept]
        if fresh:
            pool = self._new_pool([slot.nbytes for slot in fresh])
            self._pools.append(pool)
            self._kept.update({slot.name: _alone(pool.allocate(slot.nbytes, slot.name)) for slot in fresh})
        moving = [slot for slot in host if not is_kept[slot.index]]
        for slot in host:
            if is_kept[slot.index]:
                self.tensors[slot.index] = self._kept[slot.name]
        if moving:
            pool = self._moving = self._new_pool([slot.nbytes for slot in moving])
            self.tensors.update({slot.index: _alone(pool.allocate(slot.nbytes, slot.name)) for slot in moving})
        self._adopt_device(table)

    def _new_pool(self, sizes: list[int]) -> HostPool:
        pool = HostPool(sum(sizes))
        pool.reserve(sum(sizes))
        if not self._device.is_host:
            for arena in pool.arenas:
                self._device.register(arena)
        return pool

    def _close_pool(self, pool: HostPool) -> None:
        if not self._device.is_host:
            for arena in pool.arenas:
                self._device.unregister(arena)
        pool.close()

    def _adopt_device(self, table: SlotTable) -> None:
        for slot in table.slots:
            if slot.tier is Tier.DEVICE:
                key = f"{slot.name}, {slot.nbytes} bytes"
                if key not in self._device_slabs:
                    self._device_slabs[key] = self._device.allocate(slot.nbytes, slot.name)
                self.tensors[slot.index] = self._device_slabs[key]

    @property
    def host_bytes(self) -> int:
        pools = [*self._pools, *([self._moving] if self._moving is not None else [])]
        return sum(pool.allocated_bytes for pool in pools)

    def view(self, access: Access) -> Tensor:
        """The bytes of an access in a host or device slot."""
        key = (access.slot, access.start, access.stop)
        if key not in self._views:
            self._views[key] = self.tensors[access.slot][access.start : access.stop]
        return self._views[key]

    def kept(self, role: Role, unit: int) -> Tensor | None:
        """What RAM keeps of a unit."""
        slot = self.table.permanent(Tier.HOST, role, unit)
        return None if slot is None else self.tensors[slot]

    def close(self) -> None:
        self._views.clear()
        self.tensors.clear()
        self._device_slabs.clear()
        for pool in [*self._pools, *([self._moving] if self._moving is not None else [])]:
            pool.close()


def _alone(slot: Tensor) -> Tensor:
    """A slot with a version counter of its own: autograd takes a write for a change of all that shares the counter."""
    return slot.data
