"""Where on the SSD each unit's weights and state are, and where its next version goes.

    double   every unit has two places of its own, which take turns
    log      units of one size share places, SPARE_PLACES more than there are units: an update goes to a free one, and the one
             that its unit leaves is free as soon as no commit can come back to it
    single   every unit has one place, and an update overwrites it; one more of each size takes what is not meant to stay

A place holds the planes of one unit, one behind the other: trainable weights, then the state.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

from lohan.config import StoreMode
from lohan.errors import ScheduleError
from lohan.keep.manifest import Layout, UnitSize
from lohan.model.shape import ModelShape, align
from lohan.schedule.slots import ALIGN_BYTES, Role, Sizes
from lohan.ssd.checked import SUM_BYTES, Extent
from lohan.ssd.durable import Contents

SPARE_PLACES = 4
NOWHERE = -1
"""the place of a unit that has nothing to train"""


def layout_of(shape: ModelShape, sizes: Sizes) -> Layout:
    """What a run of such a model has, in its store and in its checkpoints."""
    units = tuple(UnitSize(unit.name, unit.trainable_elements, unit.frozen_elements) for unit in shape.units)
    return Layout(sizes.weight, sizes.state_planes, units)


class Places:
    """The places of one run, numbered, and who is where."""

    def __init__(self, mode: StoreMode, layout: Layout) -> None:
        self.mode, self._layout = mode, layout
        self._elements: list[int] = []
        """that a place holds"""
        self._names: list[str] = []
        self.now = [NOWHERE] * len(layout.units)
        """the place of each unit"""
        trained = [(index, unit) for index, unit in enumerate(layout.units) if unit.trainable]
        if mode is StoreMode.DOUBLE:
            for index, unit in trained:
                self.now[index] = self._add(unit.trainable, unit.name + ", first place")
                self._add(unit.trainable, unit.name + ", second place")
        else:
            for elements in dict.fromkeys(unit.trainable for _, unit in trained):
                alike = [(index, unit.name) for index, unit in trained if unit.trainable == elements]
                num_spare = min(len(alike), SPARE_PLACES) if mode is StoreMode.LOG else 1
                for index, name in alike:
                    self.now[index] = self._add(elements, f"place of {name} at first")
                for spare in range(num_spare):
                    self._add(elements, f"spare place {spare} for units like {alike[0][1]}")
        self.first = tuple(self.now)
        """where each unit is before its first step"""
        element_bytes = layout.weight_bytes + sum(layout.state_bytes)
        sizes = [align(elements * element_bytes, ALIGN_BYTES) for elements in self._elements]
        *self.addresses, self.nbytes = accumulate(sizes, initial=0)

    def _add(self, elements: int, name: str) -> int:
        self._elements.append(elements)
        self._names.append(name)
        return len(self._elements) - 1

    def extents(self, place: int) -> Iterator[Extent]:
        """Every plane of a place, as it is checked."""
        address, elements = self.addresses[place], self._elements[place]
        for number, size in enumerate((self._layout.weight_bytes, *self._layout.state_bytes)):
            plane = "weights" if number == 0 else f"plane {number} of the state"
            grain_bytes = self._layout.grain_elements * size
            yield Extent(f"{self._names[place]}, {plane}", address, elements * size, grain_bytes)
            address += elements * size

    def next_of(self, units: Iterable[int]) -> dict[int, int]:
        """Where the next version of units goes: of these in this order, in the mode `log`, where one may get the place that
        another one left before it; otherwise of all."""
        if self.mode is not StoreMode.LOG:
            turn = self.mode is StoreMode.DOUBLE
            return {unit: place ^ turn for unit, place in enumerate(self.now) if place != NOWHERE}
        free: dict[int, deque[int]] = {}
        for place in sorted(set(range(len(self._elements))) - set(self.now)):
            free.setdefault(self._elements[place], deque()).append(place)
        targets: dict[int, int] = {}
        for unit in units:
            alike = free[self._elements[self.now[unit]]]
            targets[unit] = alike.popleft()
            alike.append(self.now[unit])
        return targets

    def aside(self, units: Iterable[int]) -> dict[int, int]:
        """A place that nobody is in for each of these units: for what is written to measure, and not meant to stay."""
        if self.mode is StoreMode.DOUBLE:
            turned = self.next_of(())
            return {unit: turned[unit] for unit in units}
        free = {self._elements[place]: place for place in set(range(len(self._elements))) - set(self.now)}
        return {unit: free[self._elements[self.now[unit]]] for unit in units}

    def move(self, unit: int, place: int) -> None:
        """The unit's version in `place` counts from now on."""
        self.now[unit] = place

    def restore(self, places: Sequence[int]) -> None:
        """As a commit has them."""
        taken = [place for place in places if place != NOWHERE]
        is_whole = len(places) == len(self.first) and len(set(taken)) == len(taken)
        if not is_whole or not all(self._fits(place, first) for place, first in zip(places, self.first, strict=True)):
            raise ScheduleError(f"a commit names the places {list(places)}, which no run of this model has")
        self.now = list(places)

    def _fits(self, place: int, first: int) -> bool:
        """Whether the unit that begins in `first` can be in `place`."""
        if first == NOWHERE or not 0 <= place < len(self._elements):
            return place == first == NOWHERE
        if self.mode is StoreMode.DOUBLE:
            return place | 1 == first | 1
        return self._elements[place] == self._elements[first]


class UnitLayout:
    """All that the store of a run holds, and where: places, frozen weights, gradients that wait for their update."""

    def __init__(self, mode: StoreMode, layout: Layout) -> None:
        self.layout, self.places = layout, Places(mode, layout)
        self.extents = [extent for place in range(len(self.places.addresses)) for extent in self.places.extents(place)]
        self.fixed: dict[tuple[Role, int], Extent] = {}
        """what has one place for good"""
        self.nbytes, grain_bytes = self.places.nbytes, layout.grain_elements * layout.weight_bytes
        for index, unit in enumerate(layout.units):
            for role, elements in ((Role.FROZEN, unit.frozen), (Role.GRADIENT, unit.trainable)):
                if elements:
                    nbytes = elements * layout.weight_bytes
                    extent = Extent(f"{unit.name}, {role.value}", self.nbytes, nbytes, grain_bytes)
                    self.fixed[role, index] = extent
                    self.extents.append(extent)
                    self.nbytes += align(nbytes, ALIGN_BYTES)

    @property
    def contents(self) -> Contents:
        """What a store for it has to hold."""
        table_bytes = SUM_BYTES * sum(extent.num_grains for extent in self.extents)
        return Contents(self.nbytes, table_bytes, self.places.mode, self.layout.to_dict())
