"""The SSD side of an engine: one store for the units, one unlinked store for boundaries, and where each slot lies in them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor

from lohan.config import Numerics
from lohan.host.pool import HostPool
from lohan.model.shape import ModelShape, align
from lohan.run.commits import Commits
from lohan.run.memory import Place
from lohan.run.transfer import UnitBuffers, rest_range
from lohan.schedule.slots import ALIGN_BYTES, Role, Sizes
from lohan.ssd.base import Request, Store
from lohan.ssd.durable import Durable


class Stores(Protocol):
    """Where stores come from."""

    def open_units(self, nbytes: int) -> Durable:
        """The store that keeps the units: new, or of the run that goes on."""
        ...

    def make_spill(self, nbytes: int) -> Store:
        """A store that vanishes with the process."""
        ...


class Storage:
    """Both stores. A unit has two places for weights and state, one for frozen weights, one for a gradient that waits."""

    def __init__(self, stores: Stores, shape: ModelShape, sizes: Sizes, numerics: Numerics) -> None:
        self._stores, self._shape, self._sizes, self._numerics = stores, shape, sizes, numerics
        self._end = 0
        self._addresses: dict[tuple[Role, int], int] = {}
        for index, unit in enumerate(shape.units):
            self._add(Role.SIDE_0, index, sizes.region_of(unit))
            self._add(Role.SIDE_1, index, sizes.region_of(unit))
            self._add(Role.FROZEN, index, sizes.frozen_of(unit))
            self._add(Role.GRADIENT, index, sizes.trainable_of(unit))
        durable = stores.open_units(self._end)
        self.units, self.resumed, self.run_id = durable.store, durable.resumed, durable.run
        self.commits = Commits(durable)
        self.spill: Store | None = None
        self.places = {key: Place(self.units, address) for key, address in self._addresses.items()}
        self._closed_bytes = (0, 0)
        """transferred by spill stores that were replaced"""

    def _add(self, role: Role, owner: int, nbytes: int) -> None:
        if nbytes:
            self._addresses[role, owner] = self._end
            self._end += align(nbytes, ALIGN_BYTES)

    def spill_boundaries(self, boundary_bytes: Sequence[int]) -> None:
        """Places for boundaries of these sizes, instead of the ones before."""
        if self.spill is not None:
            read, written = self._closed_bytes
            self._closed_bytes = (read + self.spill.read_bytes, written + self.spill.written_bytes)
            self.spill.close()
        starts, end = [], 0
        for nbytes in boundary_bytes:
            starts.append(end)
            end += align(nbytes, ALIGN_BYTES)
        self.spill = self._stores.make_spill(end) if end else None
        for owner, (start, nbytes) in enumerate(zip(starts, boundary_bytes, strict=True)):
            if nbytes and self.spill is not None:
                self.places[Role.BOUNDARY, owner] = Place(self.spill, start)

    def transferred(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        stores = [store for store in (self.units, self.spill) if store is not None]
        read, written = self._closed_bytes
        return read + sum(store.read_bytes for store in stores), written + sum(store.written_bytes for store in stores)

    # ---------------------------------------------------------------- whole units: import and export

    def write_unit(self, index: int, buffers: UnitBuffers) -> None:
        """A unit as it begins: weights, and what the masters hold beyond them if anything."""
        requests: list[Request] = []
        rest = rest_range(self._shape.units[index], self._sizes, self._numerics)[0]
        if buffers.trainable is not None:
            requests.append((self._addresses[Role.SIDE_0, index], buffers.trainable))
        if buffers.rest is not None and bool(buffers.rest.view(torch.int64).any()):
            requests.append((self._addresses[Role.SIDE_0, index] + rest, buffers.rest))
        if buffers.frozen is not None:
            requests.append((self._addresses[Role.FROZEN, index], buffers.frozen))
        self.units.submit_write(requests).wait()

    def read_unit(self, index: int, side: int) -> UnitBuffers:
        """A unit's weights and masters as they stand."""
        unit = self._shape.units[index]
        start, stop = rest_range(unit, self._sizes, self._numerics)
        total = self._sizes.weights_of(unit) + stop - start
        pool = HostPool(total)
        pool.reserve(total)
        requests: list[Request] = []

        def fetch(role: Role, start: int, nbytes: int) -> Tensor | None:
            if not nbytes:
                return None
            buffer = pool.allocate(nbytes, unit.name)
            requests.append((self._addresses[role, index] + start, buffer))
            return buffer

        role = Role.SIDE_1 if side else Role.SIDE_0
        buffers = UnitBuffers(
            trainable=fetch(role, 0, self._sizes.trainable_of(unit)),
            frozen=fetch(Role.FROZEN, 0, self._sizes.frozen_of(unit)),
            rest=fetch(role, start, stop - start),
        )
        self.units.submit_read(requests).wait()
        return buffers

    def describe(self) -> dict[str, Any]:
        return {"store_bytes": self.units.nbytes, "spill_bytes": self.spill.nbytes if self.spill is not None else 0}

    def close(self) -> None:
        with ExitStack() as both:
            both.callback(self.units.close)
            both.callback(self.commits.close)
            if self.spill is not None:
                both.callback(self.spill.close)
