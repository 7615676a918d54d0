"""The SSD side of an engine: one store for the units, one unlinked store for boundaries, and where each slot lies in them.

    places of units      see `run.places`
    frozen weights       of each unit that has some
    gradients            of each unit with something to train: where they wait for their update
    boundaries           in the other store, which vanishes with the process

Whatever is read is what was written: both stores are checked (`ssd.checked`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor

from lohan.config import Numerics, StoreMode
from lohan.host.pool import HostPool
from lohan.model.shape import ModelShape, align
from lohan.run.commits import Commits
from lohan.run.places import UnitLayout, layout_of
from lohan.run.ssd_map import Place
from lohan.run.transfer import UnitBuffers, rest_range
from lohan.schedule.slots import ALIGN_BYTES, Role, Sizes
from lohan.ssd.base import Request, Store
from lohan.ssd.checked import CheckedStore, Extent
from lohan.ssd.durable import Contents, Durable


class Stores(Protocol):
    """Where stores come from."""

    def mode(self, wanted: StoreMode | None, contents: Mapping[StoreMode, Contents], spill_bytes: int) -> StoreMode:
        """How the run keeps its state: as it did, as is wanted, or as the space allows, given what each mode needs."""
        ...

    def check_room(self, contents: Contents, spill_bytes: int) -> None:
        """Refuse what does not fit, before anything is made."""
        ...

    def open_units(self, contents: Contents) -> Durable:
        """The store that keeps the units: new, or of the run that goes on."""
        ...

    def make_spill(self, nbytes: int) -> Store:
        """A store that vanishes with the process."""
        ...


class Storage:
    """Both stores."""

    def __init__(self, stores: Stores, mode: StoreMode, shape: ModelShape, sizes: Sizes, numerics: Numerics) -> None:
        self._stores, self._shape, self._sizes, self._numerics = stores, shape, sizes, numerics
        layout = UnitLayout(mode, layout_of(shape, sizes))
        self.places, self._addresses = layout.places, {key: extent.address for key, extent in layout.fixed.items()}
        durable = stores.open_units(layout.contents)
        self.resumed, self.run_id = durable.resumed, durable.run
        self.units = CheckedStore(durable.store, layout.extents)
        self.commits = Commits(durable, self.units)
        self.spill: CheckedStore | None = None
        self.fixed = {key: Place(self.units, address) for key, address in self._addresses.items()}
        """what has one place for good, boundaries included"""
        self._closed_bytes = (0, 0)
        """transferred by spill stores that were replaced"""
        try:
            self._resume()
        except BaseException:
            self.close()
            raise

    def _resume(self) -> None:
        if self.resumed is not None:
            self.places.restore(self.resumed.places)
            self.units.restore(self.resumed.table)

    def place(self, place: int) -> Place:
        """A place of units."""
        return Place(self.units, self.places.addresses[place])

    def spill_boundaries(self, boundary_bytes: Sequence[int]) -> None:
        """Places for boundaries of these sizes (0: elsewhere), instead of the ones before."""
        if self.spill is not None:
            read, written = self._closed_bytes
            self._closed_bytes = (read + self.spill.read_bytes, written + self.spill.written_bytes)
            self.spill.close()
        starts, end = [], 0
        for nbytes in boundary_bytes:
            starts.append(end)
            end += align(nbytes, ALIGN_BYTES)
        extents = [
            Extent(f"boundary of site {owner}", start, nbytes, nbytes)
            for owner, (start, nbytes) in enumerate(zip(starts, boundary_bytes, strict=True))
            if nbytes
        ]
        self.spill = CheckedStore(self._stores.make_spill(end), extents) if end else None
        for owner, (start, nbytes) in enumerate(zip(starts, boundary_bytes, strict=True)):
            if nbytes and self.spill is not None:
                self.fixed[Role.BOUNDARY, owner] = Place(self.spill, start)

    @staticmethod
    def spill_bytes(boundary_bytes: Sequence[int]) -> int:
        """Room for boundaries of these sizes."""
        return sum(align(nbytes, ALIGN_BYTES) for nbytes in boundary_bytes)

    def transferred(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        stores = [store for store in (self.units, self.spill) if store is not None]
        read, written = self._closed_bytes
        return read + sum(store.read_bytes for store in stores), written + sum(store.written_bytes for store in stores)

    # ---------------------------------------------------------------- whole units: export

    def _address_of(self, unit: int) -> int:
        return self.places.addresses[self.places.now[unit]]

    def read_unit(self, index: int) -> UnitBuffers:
        """A unit's weights and masters as they stand."""
        unit = self._shape.units[index]
        start, stop = rest_range(unit, self._sizes, self._numerics)
        total = self._sizes.weights_of(unit) + stop - start
        pool = HostPool(total)
        pool.reserve(total)
        requests: list[Request] = []

        def fetch(address: int, nbytes: int) -> Tensor | None:
            if not nbytes:
                return None
            buffer = pool.allocate(nbytes, unit.name)
            requests.append((address, buffer))
            return buffer

        buffers = UnitBuffers(
            trainable=fetch(self._address_of(index), self._sizes.trainable_of(unit)),
            frozen=fetch(self._addresses.get((Role.FROZEN, index), 0), self._sizes.frozen_of(unit)),
            rest=fetch(self._address_of(index) + start, stop - start),
        )
        self.units.submit_read(requests).wait()
        return buffers

    def read_gradient(self, index: int, into: Tensor) -> None:
        """What waits for its update."""
        self.units.submit_read([(self._addresses[Role.GRADIENT, index], into)]).wait()

    def describe(self) -> dict[str, Any]:
        return {"store_bytes": self.units.nbytes, "spill_bytes": self.spill.nbytes if self.spill is not None else 0}

    def close(self) -> None:
        with ExitStack() as both:
            both.callback(self.units.close)
            both.callback(self.commits.close)
            if self.spill is not None:
                both.callback(self.spill.close)
