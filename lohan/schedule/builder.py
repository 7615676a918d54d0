"""Builds a Schedule: walks the model's visits in order and writes down what has to happen for each.

A *visit* is one unit computing at one site, forward or backward. The walk, for every visit:

1. fetch ahead: weights (and boundaries) of visits up to `prefetch` further on are brought to the host; a unit whose update is
   pending is updated there, chunk by chunk.
2. upload ahead, where the device has memory of its own.
3. compute. A forward leaves the site's boundary where the plan keeps it; a backward leaves the unit's gradient on the host.
4. after a backward: the gradient's norm, and, unless the plan defers it, the update, chunk by chunk, written behind.

A pending update of what RAM keeps is written when the forward is over: until then the drive has the reading to do that the
forward waits for.

The walk only says what happens, in an order that would be right if nothing overlapped. What may overlap follows from the slots
that it takes: see `schedule.waits`. Every operation that moves bytes copies its `reads[i]` to its `writes[i]`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from lohan.model.shape import ModelShape
from lohan.plan.plan import Plan, Update
from lohan.schedule.ends import found_at_start, left_at_end
from lohan.schedule.layout import Layout
from lohan.schedule.ops import Access, Content, Kind, Lane, Op, Schedule, Tier, What
from lohan.schedule.slots import Ring, Role, Sizes, SlotTable
from lohan.schedule.waits import WaitDeriver


class Mode(Enum):
    """What a schedule is for."""

    TRAIN = "train"
    EVALUATE = "evaluate"
    """forward only"""
    DRAIN = "drain"
    """pending updates only"""


@dataclass(frozen=True, slots=True)
class Call:
    """What varies from one schedule of an engine to the next."""

    mode: Mode
    pending: frozenset[int] = frozenset()
    """units whose gradient of the step before still waits for its update"""
    stale: frozenset[tuple[Role, int]] = frozenset()
    """what RAM keeps in another version than the one to begin with (first step, discarded speculation): it is read again"""
    defer: bool = False
    """updates that the plan would speculate on wait for the norm instead: what would be redone anyway is not done first"""


@dataclass(slots=True)
class _Visit:
    """A unit computing at a site, and the slots it holds while it is on its way."""

    site: int
    unit: int
    backward: bool
    opens: bool
    """the first visit of its site in this direction"""
    closes: bool
    host: int = -1
    device: int = -1


class ScheduleBuilder:
    """Builds all schedules of one engine, over one slot table."""

    def __init__(self, shape: ModelShape, plan: Plan, sizes: Sizes, table: SlotTable, *, on_host: bool, sums: bool) -> None:
        self.shape, self.plan, self.sizes, self.table = shape, plan, sizes, table
        self.on_host, self.sums = on_host, sums

    def build(self, call: Call) -> Schedule:
        """The schedule for `call`."""
        return _Walk(self, call).walk()


class _Walk:
    """One walk over the visits of one schedule."""

    def __init__(self, builder: ScheduleBuilder, call: Call) -> None:
        self.shape, self.plan, self.sizes, self.table = builder.shape, builder.plan, builder.sizes, builder.table
        self.on_host, self.sums, self.call = builder.on_host, builder.sums, call
        self.rings: dict[tuple[Tier, Role], Ring] = builder.table.rings()
        self.ops: list[Op] = []
        self.deriver = WaitDeriver()
        self.version = [0] * len(self.shape.units)
        self.pending = set(call.pending)
        self.put_off: list[Callable[[], None]] = []
        """writes of updates whose bytes RAM keeps"""
        self.fresh: set[tuple[Role, int]] = set()
        """what RAM keeps and has been read or updated since the schedule began"""
        self.boundary_slot: dict[tuple[Tier, int], int] = {}
        self.partial: set[int] = set()
        self.waiting: list[Access] = []
        """gradients where they lie until the norm is known"""
        self.layout = Layout(self.shape, self.sizes, self.table)
        self.visits = self._visits()

    # ---------------------------------------------------------------- the walk

    def walk(self) -> Schedule:
        fetched = uploaded = 0
        for here, visit in enumerate(self.visits):
            last_ahead = here + self.plan.prefetch
            while fetched < len(self.visits) and fetched <= last_ahead and self._may_fetch(fetched, here):
                self._fetch(self.visits[fetched])
                fetched += 1
            while uploaded < fetched and uploaded <= here + self.plan.device_prefetch and self._may_upload(uploaded, here):
                self._upload(self.visits[uploaded])
                uploaded += 1
            if visit.backward:
                self._write_what_was_put_off()
                self._backward(visit)
            else:
                self._forward(visit)
        self._write_what_was_put_off()
        for unit in sorted(self.pending):
            self._drain(unit)
        found = found_at_start(self.layout, self.plan, self.call.pending, self.call.stale)
        left = left_at_end(self.layout, self.plan, self.version, self.waiting)
        return Schedule(self._name(), tuple(self.table.slots), tuple(self.ops), tuple(found), tuple(left))

    def _visits(self) -> list[_Visit]:
        """Every site in order, then, when training, every site that gradients flow through in reverse."""
        if self.call.mode is Mode.DRAIN:
            return []
        forward = [
            _Visit(site, unit, False, opens=unit == shape.units[0], closes=unit == shape.units[-1])
            for site, shape in enumerate(self.shape.sites)
            for unit in shape.units
        ]
        if self.call.mode is Mode.EVALUATE:
            return forward
        through = [visit for visit in reversed(forward) if self.shape.sites[visit.site].needs_backward]
        return forward + [_Visit(v.site, v.unit, True, opens=v.closes, closes=v.opens) for v in through]

    def _may_fetch(self, index: int, here: int) -> bool:
        """A backward visit reads what forward visits leave: it is fetched once they have all been written down."""
        if index == here:
            return True
        visit = self.visits[index]
        if visit.backward and not self.visits[here].backward:
            return False
        ring = self.rings.get((Tier.HOST, Role.BOUNDARY))
        return ring is None or ring.has_free or not (visit.backward and visit.opens)

    def _may_upload(self, index: int, here: int) -> bool:
        """A boundary is uploaded ahead as long as there are slots for it on the device."""
        visit = self.visits[index]
        ring = self.rings.get((Tier.DEVICE, Role.BOUNDARY))
        return index == here or ring is None or ring.has_free or not (visit.backward and visit.opens)

    def _name(self) -> str:
        return f"{self.call.mode.value}, {len(self.call.pending)} of {len(self.shape.units)} units pending"

    # ---------------------------------------------------------------- 1. fetch: SSD to host

    def _fetch(self, visit: _Visit) -> None:
        unit = visit.unit
        visit.host = self._weights_on_host(unit)
        if unit in self.pending:
            self._update_pending(unit, visit.host)
        if visit.backward and visit.opens:
            self._fetch_boundary(visit.site)

    def _weights_on_host(self, unit: int) -> int:
        """A host slot that holds the unit's weights, read unless they are there."""
        slot, warm = self._take(Tier.HOST, Role.WEIGHTS, unit)
        if not warm:
            sources = self.layout.weights_on_ssd(unit, self.version[unit])
            self._move(
                Kind.READ_WEIGHTS, Lane.SSD_READ, sources, self.layout.weights(slot, unit, self.version[unit]), unit=unit
            )
        return slot

    def _update_pending(self, unit: int, weights: int) -> None:
        """The update of the step before, in the place of the old weights."""
        self.pending.discard(unit)
        gradient, warm = self._take(Tier.HOST, Role.GRADIENT, unit)
        if not warm and self.plan.units[unit].gradient is Tier.SSD:
            self._read_gradient(unit, gradient, What.GRADIENT)
        self._update(unit, weights, gradient, puts_off=self.call.mode is Mode.TRAIN and self._keeps_all(unit))
        self._give(Tier.HOST, Role.GRADIENT, unit, gradient, forget=True)

    def _keeps_all(self, unit: int) -> bool:
        """Whether RAM keeps all that an update changes."""
        return all(self.table.permanent(Tier.HOST, role, unit) is not None for role in (Role.WEIGHTS, Role.STATE))

    def _write_what_was_put_off(self) -> None:
        """Before anything else of the backward pass is written, which must not come before the last step is whole."""
        for write in self.put_off:
            write()
        self.put_off.clear()

    def _drain(self, unit: int) -> None:
        weights = self._weights_on_host(unit)
        self._update_pending(unit, weights)
        self._give(Tier.HOST, Role.WEIGHTS, unit, weights)

    def _fetch_boundary(self, site: int) -> None:
        if self.plan.boundaries[site] is Tier.SSD and self._has_boundary(site):
            slot, warm = self._take(Tier.HOST, Role.BOUNDARY, site)
            self.boundary_slot[Tier.HOST, site] = slot
            if not warm:
                self._move_boundary(Kind.READ_BOUNDARY, Lane.SSD_READ, site, self._spilled(site), slot)

    # ---------------------------------------------------------------- 2. upload: host to device

    def _upload(self, visit: _Visit) -> None:
        if self.on_host:
            return
        visit.device, warm = self._take(Tier.DEVICE, Role.WEIGHTS, visit.unit)
        if not warm:
            unit = visit.unit
            sources, targets = (
                self.layout.weights(visit.host, unit, self.version[unit]),
                self.layout.weights(visit.device, unit, self.version[unit]),
            )
            self._move(Kind.UPLOAD_WEIGHTS, Lane.UPLOAD, sources, targets, unit=unit)
        if not visit.backward:
            self._give(Tier.HOST, Role.WEIGHTS, visit.unit, visit.host)
        elif visit.opens and self._has_boundary(visit.site):
            self._upload_boundary(visit.site)

    def _upload_boundary(self, site: int) -> None:
        slot, warm = self._take(Tier.DEVICE, Role.BOUNDARY, site)
        self.boundary_slot[Tier.DEVICE, site] = slot
        if not warm and self.plan.boundaries[site] is not Tier.DEVICE:
            source = self.boundary_slot.get((Tier.HOST, site), self.table.permanent(Tier.HOST, Role.BOUNDARY, site))
            assert source is not None, "a boundary that is not on the device is on the host by now"
            self._move_boundary(Kind.UPLOAD_BOUNDARY, Lane.UPLOAD, site, source, slot)

    # ---------------------------------------------------------------- 3. compute

    def _forward(self, visit: _Visit) -> None:
        reads = self.layout.weights(self._compute_slot(visit), visit.unit, self.version[visit.unit])
        keeps = visit.opens and self.call.mode is Mode.TRAIN and self._has_boundary(visit.site)
        writes: list[Access] = []
        if keeps:
            slot, _ = self._take(self._compute_tier, Role.BOUNDARY, visit.site)
            writes = [self.layout.boundary(slot, visit.site)]
        self._emit(Kind.FORWARD, Lane.COMPUTE, reads, writes, unit=visit.unit, site=visit.site)
        if keeps:
            self._keep_boundary(visit.site, writes[0].slot)
        if self.on_host:
            self._give(Tier.HOST, Role.WEIGHTS, visit.unit, visit.host)
        else:
            self._give(Tier.DEVICE, Role.WEIGHTS, visit.unit, visit.device)

    def _keep_boundary(self, site: int, slot: int) -> None:
        """From where the compute lane left it to where the plan keeps it."""
        tier = self.plan.boundaries[site]
        host = slot
        if not self.on_host and tier is not Tier.DEVICE:
            host, _ = self._take(Tier.HOST, Role.BOUNDARY, site)
            self._move_boundary(Kind.DOWNLOAD_BOUNDARY, Lane.DOWNLOAD, site, slot, host)
            self._give(Tier.HOST, Role.BOUNDARY, site, host)
        self._give(self._compute_tier, Role.BOUNDARY, site, slot)
        if tier is Tier.SSD:
            self._move_boundary(Kind.WRITE_BOUNDARY, Lane.SSD_WRITE, site, host, self._spilled(site))

    def _backward(self, visit: _Visit) -> None:
        unit, site = visit.unit, visit.site
        reads = self.layout.weights(self._compute_slot(visit), unit, self.version[unit])
        if self._has_boundary(site):
            slot = self.boundary_slot.get((self._compute_tier, site))
            slot = self.table.permanent(self._compute_tier, Role.BOUNDARY, site) if slot is None else slot
            assert slot is not None, "a site's boundary is fetched with its first backward visit"
            reads.append(self.layout.boundary(slot, site))
        gradient = self._differentiate(visit, reads) if self.shape.units[unit].trainable_elements else -1
        if gradient < 0:
            self._emit(Kind.BACKWARD, Lane.COMPUTE, reads, [], unit=unit, site=site)
        if not self.on_host:
            self._give(Tier.DEVICE, Role.WEIGHTS, unit, visit.device)
        if visit.closes:
            self._release_boundary(site)
        if gradient >= 0:
            self._finish_gradient(visit, gradient)
        self._give(Tier.HOST, Role.WEIGHTS, unit, visit.host)

    def _differentiate(self, visit: _Visit, reads: list[Access]) -> int:
        """The backward operation of a unit with gradients; returns the host slot in which its gradient ends up."""
        unit, site = visit.unit, visit.site
        host, warm = self._take(Tier.HOST, Role.GRADIENT, unit)
        if unit in self.partial and not warm and self.plan.units[unit].gradient is Tier.SSD:
            self._read_gradient(unit, host, What.PARTIAL)
        slot = host
        if not self.on_host:
            slot, warm = self._take(Tier.DEVICE, Role.GRADIENT, unit)
            if unit in self.partial and not warm:
                source, target = (self.layout.gradient(s, unit, self.version[unit] + 1, What.PARTIAL) for s in (host, slot))
                self._move(Kind.UPLOAD_GRADIENT, Lane.UPLOAD, [source], [target], unit=unit)
        if unit in self.partial:
            reads = [*reads, self.layout.gradient(slot, unit, self.version[unit] + 1, What.PARTIAL)]
        what = What.PARTIAL if self._comes_again(visit) else What.GRADIENT
        writes = [self.layout.gradient(slot, unit, self.version[unit] + 1, what)]
        if self.sums:
            sums, _ = self._take(self._compute_tier, Role.SUM, unit)
            nbytes = self.shape.units[unit].trainable_elements * 4
            writes.append(Access(sums, 0, nbytes, Content(What.SCRATCH, unit)))
            self._give(self._compute_tier, Role.SUM, unit, sums)
        self._emit(Kind.BACKWARD, Lane.COMPUTE, reads, writes, unit=unit, site=site)
        if not self.on_host:
            source, target = (self.layout.gradient(s, unit, self.version[unit] + 1, what) for s in (slot, host))
            self._move(Kind.DOWNLOAD_GRADIENT, Lane.DOWNLOAD, [source], [target], unit=unit)
            self._give(Tier.DEVICE, Role.GRADIENT, unit, slot)
        return host

    def _release_boundary(self, site: int) -> None:
        for tier in (Tier.HOST, Tier.DEVICE):
            if (slot := self.boundary_slot.pop((tier, site), None)) is not None:
                self._give(tier, Role.BOUNDARY, site, slot)

    # ---------------------------------------------------------------- 4. gradients and updates

    def _finish_gradient(self, visit: _Visit, gradient: int) -> None:
        unit, plan = visit.unit, self.plan.units[visit.unit]
        again = self._comes_again(visit)
        if plan.gradient is Tier.SSD and (again or plan.update is not Update.IMMEDIATE):
            what = What.PARTIAL if again else What.GRADIENT
            region = self.table.permanent(Tier.SSD, Role.GRADIENT, unit)
            assert region is not None, "a gradient that waits on the SSD has its place there"
            source, target = (self.layout.gradient(s, unit, self.version[unit] + 1, what) for s in (gradient, region))
            self._move(Kind.WRITE_GRADIENT, Lane.SSD_WRITE, [source], [target], unit=unit)
        if again:
            self.partial.add(unit)
        else:
            reads = [self.layout.gradient(gradient, unit, self.version[unit] + 1, What.GRADIENT)]
            self._emit(Kind.NORM, Lane.OPTIMIZER, reads, [], unit=unit, nbytes=reads[0].stop)
            place = self.table.permanent(plan.gradient, Role.GRADIENT, unit)
            if place is not None and plan.update is not Update.IMMEDIATE:
                self.waiting.append(self.layout.gradient(place, unit, self.version[unit] + 1, What.GRADIENT))
            waits = plan.update is Update.DEFER or (plan.update is Update.SPECULATE and self.call.defer)
            if not waits:
                self._update(unit, visit.host, gradient)
        self._give(Tier.HOST, Role.GRADIENT, unit, gradient)

    def _update(self, unit: int, weights: int, gradient: int, *, puts_off: bool = False) -> None:
        """All chunks of a unit's update: weights in their host slot, master and state chunk by chunk."""
        before, after = self.version[unit], self.version[unit] + 1
        sizes = self.sizes
        for chunk, first, num in self.layout.chunks(unit, self.plan.chunk_elements):
            slot, warm = self._take(Tier.HOST, Role.STATE, unit)
            base = first * sizes.state if self.plan.units[unit].state is Tier.HOST else 0
            if not warm:
                sources = self.layout.state_on_ssd(unit, before, chunk, first, num)
                self._move(
                    Kind.READ_STATE,
                    Lane.SSD_READ,
                    sources,
                    self.layout.state(slot, base, unit, before, chunk, num),
                    unit,
                    chunk,
                )
            span = (first * sizes.weight, (first + num) * sizes.weight)
            old, new = (Access(weights, *span, Content(What.WEIGHTS, unit, version)) for version in (before, after))
            pull = Access(gradient, *span, Content(What.GRADIENT, unit, after))
            state_before, state_after = (
                self.layout.state(slot, base, unit, version, chunk, num) for version in (before, after)
            )
            nbytes = num * (3 * sizes.weight + 2 * sizes.state)
            reads, writes = [old, pull, *state_before], [new, *state_after]
            self._emit(Kind.UPDATE, Lane.OPTIMIZER, reads, writes, unit=unit, chunk=chunk, nbytes=nbytes)
            if self.plan.use_ssd:
                targets = [
                    self.layout.side(unit, after, *span, What.WEIGHTS),
                    *self.layout.state_on_ssd(unit, after, chunk, first, num),
                ]
                write = partial(self._move, Kind.WRITE_UPDATE, Lane.SSD_WRITE, [new, *state_after], targets, unit, chunk)
                self.put_off.append(write) if puts_off else write()
            self._give(Tier.HOST, Role.STATE, unit, slot, forget=True)
        self.version[unit] = after
        self.fresh.add((Role.STATE, unit))

    def _read_gradient(self, unit: int, slot: int, what: What) -> None:
        region = self.table.permanent(Tier.SSD, Role.GRADIENT, unit)
        assert region is not None, "a gradient that waits on the SSD has its place there"
        source, target = (self.layout.gradient(s, unit, self.version[unit] + 1, what) for s in (region, slot))
        self._move(Kind.READ_GRADIENT, Lane.SSD_READ, [source], [target], unit=unit)

    def _comes_again(self, visit: _Visit) -> bool:
        """Whether a later site of the backward pass visits the unit as well: tied weights."""
        later = self.shape.sites[: visit.site]
        return any(visit.unit in site.units and site.needs_backward for site in later)

    # ---------------------------------------------------------------- slots

    @property
    def _compute_tier(self) -> Tier:
        return Tier.HOST if self.on_host else Tier.DEVICE

    def _compute_slot(self, visit: _Visit) -> int:
        return visit.host if self.on_host else visit.device

    def _take(self, tier: Tier, role: Role, owner: int) -> tuple[int, bool]:
        """A slot, and whether it holds what the owner left there: its own for good, or the next one of the ring."""
        slot = self.table.permanent(tier, role, owner)
        if slot is None:
            return self.rings[tier, role].take(owner)
        stale = (role, owner) in self.call.stale and (role, owner) not in self.fresh
        if role is Role.WEIGHTS:
            self.fresh.add((role, owner))
        return slot, not stale

    def _give(self, tier: Tier, role: Role, owner: int, slot: int, *, forget: bool = False) -> None:
        if self.table.permanent(tier, role, owner) is None:
            self.rings[tier, role].give(slot, forget=forget)

    def _has_boundary(self, site: int) -> bool:
        return any(self.table.permanent(tier, Role.BOUNDARY, site) is not None for tier in Tier)

    def _spilled(self, site: int) -> int:
        slot = self.table.permanent(Tier.SSD, Role.BOUNDARY, site)
        assert slot is not None, "a boundary that the plan puts on the SSD has its place there"
        return slot

    # ---------------------------------------------------------------- operations

    def _move_boundary(self, kind: Kind, lane: Lane, site: int, source: int, target: int) -> None:
        self._move(kind, lane, [self.layout.boundary(source, site)], [self.layout.boundary(target, site)], site=site)

    def _move(
        self,
        kind: Kind,
        lane: Lane,
        sources: Sequence[Access],
        targets: Sequence[Access],
        unit: int = -1,
        chunk: int = -1,
        site: int = -1,
    ) -> None:
        nbytes = sum(source.stop - source.start for source in sources)
        self._emit(kind, lane, sources, targets, unit=unit, site=site, chunk=chunk, nbytes=nbytes)

    def _emit(
        self,
        kind: Kind,
        lane: Lane,
        reads: Sequence[Access],
        writes: Sequence[Access],
        *,
        unit: int = -1,
        site: int = -1,
        chunk: int = -1,
        nbytes: int = 0,
    ) -> None:
        waits = self.deriver.add(lane, reads, writes)
        self.ops.append(Op(len(self.ops), kind, lane, unit, site, chunk, tuple(reads), tuple(writes), waits, nbytes))
