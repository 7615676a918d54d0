"""Where the SSD slots of a schedule lie, when they may be overwritten, and who compares and sums what moves.

Most of what is read is compared by the store, and what is written is summed by it, in passes of their own. Master and state go
through the optimizer, whose update does both on its way over the bytes; their checksums travel beside the chunks:

    read state     `submit` takes down what the table says of the ranges; nobody looks at the bytes
    update         `expected` is what it has to find; what it leaves, it hands to `left`
    write update   `submit` puts that into the table, once the write is admitted: until then the table may belong to a commit
                   that names the old bytes
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from lohan.schedule.ops import Access, Kind, Lane, Op, Tier
from lohan.schedule.slots import Role, SlotTable
from lohan.ssd.base import Request, Store, Ticket
from lohan.ssd.checked import CheckedStore

View = Callable[[Access], Tensor]
"""the bytes of an access in host memory"""
_Key = tuple[int, int, int]
"""unit, chunk, version"""


@dataclass(frozen=True, slots=True)
class Place:
    """Where an SSD slot begins."""

    store: Store
    address: int

    @property
    def unchecked(self) -> Place:
        """For what means nothing, and may be anything when it is read."""
        return Place(self.store.unchecked if isinstance(self.store, CheckedStore) else self.store, self.address)


@dataclass(frozen=True, slots=True)
class Expected:
    """What the table says of a range that was read."""

    store: CheckedStore
    address: int
    nbytes: int
    sums: NDArray[np.uint64]

    def compare(self, found: NDArray[np.uint64]) -> None:
        """ChecksumError if anything else was found."""
        if len(wrong := np.flatnonzero(found != self.sums)):
            self.store.refuse(self.address, self.nbytes, int(wrong[0]))


class Anything:
    """What a rehearsal finds: it is summed, as in a step, and may be anything."""

    def compare(self, found: NDArray[np.uint64]) -> None:
        """Nothing is known of it."""


def _at_once(op: Op) -> None:
    """Nothing stands in the way of a write."""


class SsdMap:
    """The SSD slots of one schedule."""

    def __init__(
        self, places: Mapping[int, Place], admit: Callable[[Op], None] = _at_once, *, is_rehearsal: bool = False
    ) -> None:
        """`places` by slot. `admit` returns once an operation may write to its place. In a rehearsal nothing is compared."""
        self._is_rehearsal = is_rehearsal
        if is_rehearsal:
            places = {slot: place.unchecked for slot, place in places.items()}
        self._places, self._admit = places, admit
        self._expected: dict[_Key, list[Expected]] = {}
        self._left: dict[_Key, Sequence[NDArray[np.uint64]]] = {}

    @staticmethod
    def of(
        table: SlotTable,
        places: Mapping[tuple[Role, int], Place],
        admit: Callable[[Op], None] = _at_once,
        *,
        is_rehearsal: bool = False,
    ) -> SsdMap:
        """`places` by role and owner: `SIDE_0` is where the version to begin with is, `SIDE_1` where the next one goes."""
        slots = {table.permanent(Tier.SSD, role, owner): place for (role, owner), place in places.items()}
        return SsdMap({s: place for s, place in slots.items() if s is not None}, admit, is_rehearsal=is_rehearsal)

    # ---------------------------------------------------------------- the lanes of the drive

    def submit(self, op: Op, view: View) -> list[Ticket]:
        """Begin an operation of the lanes that read and write."""
        reading = op.lane is Lane.SSD_READ
        if not reading:
            self._admit(op)
        is_compared = op.kind is Kind.READ_STATE and self._expect(op)
        is_summed = op.kind is Kind.WRITE_UPDATE and self._note(op)
        batches: dict[int, tuple[Store, list[Request]]] = {}
        for source, target in zip(op.reads, op.writes, strict=True):
            on_ssd, in_memory = (source, target) if reading else (target, source)
            place = self._places[on_ssd.slot]
            store = (place.unchecked if is_compared or is_summed else place).store
            batches.setdefault(id(store), (store, []))[1].append((place.address + on_ssd.start, view(in_memory)))
        return [store.submit_read(r) if reading else store.submit_write(r) for store, r in batches.values()]

    def _expect(self, op: Op) -> bool:
        """Take down what an update has to find; whether there is anything."""
        expected = []
        for access in op.reads:
            place = self._places[access.slot]
            if isinstance(place.store, CheckedStore):
                address = place.address + access.start
                expected.append(Expected(place.store, address, access.nbytes, place.store.sums_of(address, access.nbytes)))
        if expected:
            self._expected[op.unit, op.chunk, op.reads[0].content.version] = expected
        return bool(expected)

    def _note(self, op: Op) -> bool:
        """Put what an update left into the table; whether it left anything."""
        sums = self._left.pop((op.unit, op.chunk, op.writes[0].content.version), None)
        if sums is None:
            return False
        for access, of_access in zip(op.writes, sums, strict=True):
            place = self._places[access.slot]
            if isinstance(place.store, CheckedStore):
                place.store.note(place.address + access.start, access.nbytes, of_access)
        return True

    # ---------------------------------------------------------------- the optimizer

    def expected(self, op: Op) -> Sequence[Expected | Anything]:
        """Of the planes of state that an update works on, if they were read for it; nothing where RAM keeps them."""
        if self._is_rehearsal:
            return [Anything()] * (len(op.reads) - 2)
        return self._expected.pop((op.unit, op.chunk, op.reads[0].content.version), [])

    def left(self, op: Op, sums: Sequence[NDArray[np.uint64]]) -> None:
        """The checksums of the weights and of every plane of state that an update leaves."""
        self._left[op.unit, op.chunk, op.writes[0].content.version] = sums
