"""What a Schedule is: typed operations on lanes, over statically assigned slots. Data only; no torch.

A Schedule reads like a sequential program: run its operations one after the other and every read finds what an earlier write
left. It is run by lanes instead. Each lane starts its operations in program order; what has to be ordered *between* lanes is
said by `Op.waits`, and nothing else may be relied upon:

- lane order: operation k of a lane starts after operation k-1 of that lane has started, and completes after it. On a lane in
  `OVERLAPPING_LANES` several operations are in flight at once, so *starting* after k-1 does not mean that k-1 is complete.
- waits: an operation starts after every operation in its `waits` has completed.

The waits are derived from the accesses (`schedule.builder`), and proved sufficient by an independent pass
(`schedule.checker`): any two accesses that conflict are ordered, whatever the timing. As every wait points backwards in the
program, a schedule cannot deadlock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Tier(Enum):
    """A kind of memory."""

    DEVICE = "device"
    HOST = "host"
    SSD = "ssd"


class Lane(Enum):
    """Something that works through its operations in order, beside the other lanes."""

    COMPUTE = "compute"
    """the device's arithmetic"""
    UPLOAD = "upload"
    """host to device"""
    DOWNLOAD = "download"
    """device to host"""
    SSD_READ = "ssd_read"
    SSD_WRITE = "ssd_write"
    OPTIMIZER = "optimizer"
    """arithmetic on the CPU: gradient norms and updates"""


OVERLAPPING_LANES = frozenset({Lane.SSD_READ, Lane.SSD_WRITE})
"""Lanes that keep several operations in flight, because a drive wants a queue. They still complete in order."""

STREAM_LANES = frozenset({Lane.COMPUTE, Lane.UPLOAD, Lane.DOWNLOAD})
"""Lanes that a device with memory of its own works through, some time after the host has enqueued their operations."""

MOVING_LANES = frozenset({Lane.UPLOAD, Lane.DOWNLOAD, Lane.SSD_READ, Lane.SSD_WRITE})
"""Lanes whose operations copy `reads[i]` to `writes[i]` and change nothing."""


class Kind(Enum):
    """What an operation does. The value is the name that people see."""

    READ_WEIGHTS = "read weights"
    READ_STATE = "read state"
    READ_GRADIENT = "read gradient"
    READ_BOUNDARY = "read boundary"
    WRITE_UPDATE = "write update"
    WRITE_GRADIENT = "write gradient"
    WRITE_BOUNDARY = "write boundary"
    UPLOAD_WEIGHTS = "upload weights"
    UPLOAD_GRADIENT = "upload gradient"
    UPLOAD_BOUNDARY = "upload boundary"
    DOWNLOAD_GRADIENT = "download gradient"
    DOWNLOAD_BOUNDARY = "download boundary"
    FORWARD = "forward"
    BACKWARD = "backward"
    NORM = "norm"
    UPDATE = "update"


class What(Enum):
    """What a range of a slot holds."""

    WEIGHTS = "weights"
    STATE = "state"
    GRADIENT = "gradient"
    PARTIAL = "partial gradient"
    """of a tied unit, between its visits in the backward pass"""
    BOUNDARY = "boundary"
    """the input of a site, kept for its backward"""
    SCRATCH = "scratch"
    """means nothing outside the operation that writes it"""


@dataclass(frozen=True, slots=True)
class Content:
    """The value that an access expects or leaves: of which unit (or site, for a boundary), after how many updates."""

    what: What
    owner: int
    version: int = 0
    """updates applied since the schedule began; 0 for what does not depend on them"""
    chunk: int = -1


@dataclass(frozen=True, slots=True)
class Slot:
    """A fixed range of memory, or of the SSD, that operations read and write."""

    index: int
    name: str
    tier: Tier
    nbytes: int
    owner: int = -1
    """the unit (or site, for a boundary) that has it for good; -1 in a ring, whose slots pass from owner to owner"""


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [start, stop) of a slot, and what they hold after a write or must hold at a read."""

    slot: int
    start: int
    stop: int
    content: Content

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def overlaps(self, other: Access) -> bool:
        return self.slot == other.slot and self.start < other.stop and other.start < self.stop


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. `reads` and `writes` are all the memory it may touch."""

    index: int
    kind: Kind
    lane: Lane
    unit: int
    """the unit it serves; -1 where a site has none"""
    site: int
    """the place in the model's forward that it serves; -1 for work on a unit's state"""
    chunk: int
    """which chunk of the unit's trainable elements; -1 for the whole unit"""
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    waits: tuple[int, ...]
    """operations of other lanes (of the same one, if it overlaps) that complete before this one starts"""
    nbytes: int
    """moved by a copy or an I/O lane; streamed by the optimizer; 0 on the compute lane"""

    def __str__(self) -> str:
        place = f" unit {self.unit}" if self.unit >= 0 else ""
        place += f" site {self.site}" if self.site >= 0 else ""
        place += f" chunk {self.chunk}" if self.chunk >= 0 else ""
        return f"op {self.index} {self.kind.value}{place} on {self.lane.value}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that happens in one step, one evaluation or one drain."""

    name: str
    slots: tuple[Slot, ...]
    ops: tuple[Op, ...]
    """in program order; `ops[i].index == i`"""
    begins_with: tuple[Access, ...] = ()
    """what slots hold when it begins; nothing else may be read that it did not write"""
    ends_with: tuple[Access, ...] = ()
    """what slots must hold when it is done, because the next one may begin with it"""
    is_rehearsal: bool = False
    """whether it only takes its time: what it reads and writes means nothing, and need not be ordered"""

    def lane(self, lane: Lane) -> tuple[Op, ...]:
        """The operations of one lane, in the order in which it starts them."""
        return tuple(op for op in self.ops if op.lane is lane)

    def tier_bytes(self, tier: Tier) -> int:
        """All slots of a tier together: its peak, known beforehand."""
        return sum(slot.nbytes for slot in self.slots if slot.tier is tier)
