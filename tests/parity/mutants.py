"""Ways in which a schedule can be wrong. Each mutant is one mistake in an otherwise right schedule."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

from lohan.schedule.ops import MOVING_LANES, Access, Op, Schedule, Tier, What


@dataclass(frozen=True)
class Mutant:
    """A wrong schedule, and what kind of mistake it has: mutants of one kind resemble each other."""

    kind: str
    mistake: str
    schedule: Schedule = field(repr=False)


def with_ops(schedule: Schedule, *changed: Op) -> Schedule:
    ops = list(schedule.ops)
    for op in changed:
        ops[op.index] = op
    return replace(schedule, ops=tuple(ops))


def without_a_wait(schedule: Schedule) -> Iterator[Mutant]:
    """Every single wait, dropped."""
    for op in schedule.ops:
        for wait in op.waits:
            waits = tuple(other for other in op.waits if other != wait)
            yield _mutant(schedule, "does not wait for", op, schedule.ops[wait], replace(op, waits=waits))


def one_event_early(schedule: Schedule) -> Iterator[Mutant]:
    """Every single wait, for the operation before on that lane: a slot is read, or used again, one event too early."""
    for op in schedule.ops:
        for wait in op.waits:
            lane = schedule.lane(schedule.ops[wait].lane)
            place = lane.index(schedule.ops[wait])
            earlier = (lane[place - 1].index,) if place else ()
            waits = tuple(other for other in op.waits if other != wait) + earlier
            yield _mutant(schedule, "does not quite wait for", op, schedule.ops[wait], replace(op, waits=waits))


def swapped_moves(schedule: Schedule) -> Iterator[Mutant]:
    """Moves of one kind and size, two at a time: one gets what the other should have, or it goes where the other should."""
    alike: dict[object, list[Op]] = defaultdict(list)
    for op in schedule.ops:
        if op.lane in MOVING_LANES:
            alike[op.kind, tuple(access.nbytes for access in op.reads)].append(op)
    for ops in alike.values():
        for one, other in zip(ops, ops[1:], strict=False):
            if one.reads != other.reads:
                ones, others = replace(one, reads=other.reads), replace(other, reads=one.reads)
                yield _mutant(schedule, "swaps its payload with", one, other, ones, others)
            if _places(one.reads) != _places(other.reads):
                ones, others = (replace(a, reads=_moved(a.reads, b.reads)) for a, b in ((one, other), (other, one)))
                yield _mutant(schedule, "reads from the place of", one, other, ones, others)
            if _places(one.writes) != _places(other.writes):
                ones, others = (replace(a, writes=_moved(a.writes, b.writes)) for a, b in ((one, other), (other, one)))
                yield _mutant(schedule, "writes to the place of", one, other, ones, others)


def next_weights(schedule: Schedule) -> Iterator[Mutant]:
    """Weights one step ahead: of the next version, and, where the SSD has them, from the side where that one will be."""
    sides = {slot.name: slot.index for slot in schedule.slots if slot.tier is Tier.SSD}
    for op in schedule.ops:
        for position, access in enumerate(op.reads):
            if access.content.what is not What.WEIGHTS:
                continue
            later = replace(access, content=replace(access.content, version=access.content.version + 1))
            wrong = [later]
            name = schedule.slots[access.slot].name
            if name.endswith(("side 0", "side 1")):
                other = sides[name[:-1] + ("1" if name.endswith("0") else "0")]
                wrong += [replace(access, slot=other), replace(later, slot=other)]
            for one in wrong:
                reads = (*op.reads[:position], one, *op.reads[position + 1 :])
                yield Mutant(
                    f"{op.kind.value} ahead", f"{op} reads {one} for {access}", with_ops(schedule, replace(op, reads=reads))
                )


WAYS: dict[str, Callable[[Schedule], Iterator[Mutant]]] = {
    function.__name__: function for function in (without_a_wait, one_event_early, swapped_moves, next_weights)
}


def _mutant(schedule: Schedule, does: str, op: Op, other: Op, *changed: Op) -> Mutant:
    return Mutant(f"{op.kind.value} {does} {other.kind.value}", f"{op} {does} {other}", with_ops(schedule, *changed))


def _places(accesses: tuple[Access, ...]) -> list[tuple[int, int]]:
    return [(access.slot, access.start) for access in accesses]


def _moved(accesses: tuple[Access, ...], to: tuple[Access, ...]) -> tuple[Access, ...]:
    """The same contents in other places."""
    return tuple(replace(place, content=access.content) for access, place in zip(accesses, to, strict=True))
