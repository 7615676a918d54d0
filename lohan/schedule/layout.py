"""Where things lie inside slots: the accesses that operations declare, with what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from lohan.model.shape import ModelShape
from lohan.schedule.ops import Access, Content, Tier, What
from lohan.schedule.slots import Role, Sizes, SlotTable

SIDES = (Role.SIDE_0, Role.SIDE_1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Makes accesses. Planes of one unit: weights first, then the optimizer's, in the order of `Sizes.state_planes`."""

    shape: ModelShape
    sizes: Sizes
    table: SlotTable

    def weights(self, slot: int, unit: int, version: int) -> list[Access]:
        """A unit's weights in a slot: first the trainable ones, then the frozen ones, which never change."""
        trainable, frozen = self.sizes.trainable_of(self.shape.units[unit]), self.sizes.frozen_of(self.shape.units[unit])
        spans = [
            Access(slot, 0, trainable, Content(What.WEIGHTS, unit, version)),
            Access(slot, trainable, trainable + frozen, Content(What.WEIGHTS, unit)),
        ]
        return [span for span in spans if span.stop > span.start]

    def weights_on_ssd(self, unit: int, version: int) -> list[Access]:
        """The same two ranges where the SSD has them."""
        spans = []
        if trainable := self.sizes.trainable_of(self.shape.units[unit]):
            spans.append(self.side(unit, version, 0, trainable, What.WEIGHTS))
        if (slot := self.table.permanent(Tier.SSD, Role.FROZEN, unit)) is not None:
            spans.append(Access(slot, 0, self.sizes.frozen_of(self.shape.units[unit]), Content(What.WEIGHTS, unit)))
        return spans

    def side(self, unit: int, version: int, start: int, stop: int, what: What, chunk: int = -1) -> Access:
        """A range of the unit's place on the SSD for this version: the two places take turns."""
        slot = self.table.permanent(Tier.SSD, SIDES[version % 2], unit)
        assert slot is not None, "every trainable unit has two places on the SSD"
        return Access(slot, start, stop, Content(what, unit, version, chunk))

    def chunks(self, unit: int, chunk_elements: int) -> list[tuple[int, int, int]]:
        """Number, first element and size of every chunk in which a unit is updated."""
        total = self.shape.units[unit].trainable_elements
        starts = range(0, total, chunk_elements)
        return [(chunk, first, min(chunk_elements, total - first)) for chunk, first in enumerate(starts)]

    def state_on_ssd(self, unit: int, version: int, chunk: int, first: int, num: int) -> list[Access]:
        """State of a chunk, elements [first, first + num): one range a plane."""
        total, spans = self.shape.units[unit].trainable_elements, []
        start = total * self.sizes.weight
        for size in self.sizes.state_planes:
            spans.append(self.side(unit, version, start + first * size, start + (first + num) * size, What.STATE, chunk))
            start += total * size
        return spans

    def state(self, slot: int, base: int, unit: int, version: int, chunk: int, num: int) -> list[Access]:
        """The same planes in a host slot, packed one behind the other."""
        spans = []
        for size in self.sizes.state_planes:
            spans.append(Access(slot, base, base + num * size, Content(What.STATE, unit, version, chunk)))
            base += num * size
        return spans

    def gradient(self, slot: int, unit: int, version: int, what: What) -> Access:
        """A unit's gradient; `version` is the one that its update makes."""
        return Access(slot, 0, self.sizes.trainable_of(self.shape.units[unit]), Content(what, unit, version))

    def boundary(self, slot: int, site: int) -> Access:
        """The input of a site, all slices one behind the other."""
        return Access(slot, 0, self.table.boundary_bytes[site], Content(What.BOUNDARY, site))
