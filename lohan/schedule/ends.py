"""What slots hold at both ends of a schedule: what it may read without having written it, and what the next one relies on.

    SSD       of every unit the side with the current version; frozen weights
    host      weights and state that RAM keeps, unless they are stale
    either    the gradients of units whose update is pending

Everything else (the other side, rings, boundaries) holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set

from lohan.plan.plan import Plan
from lohan.schedule.layout import Layout
from lohan.schedule.ops import Access, Tier, What
from lohan.schedule.slots import Role


def found_at_start(layout: Layout, plan: Plan, pending: Set[int], stale: Set[tuple[Role, int]]) -> Iterator[Access]:
    """All that a schedule may read before it has written it."""
    for unit in range(len(layout.shape.units)):
        yield from _on_ssd(layout, plan, unit, 0)
        yield from _on_host(layout, plan, unit, 0, stale)
        gradient = layout.table.permanent(plan.units[unit].gradient, Role.GRADIENT, unit)
        if gradient is not None and unit in pending:
            yield layout.gradient(gradient, unit, 1, What.GRADIENT)


def left_at_end(layout: Layout, plan: Plan, versions: Sequence[int], waiting: Sequence[Access]) -> Iterator[Access]:
    """All that a schedule has to leave: units that it updated so often, and the gradients that may wait for the next one."""
    for unit, version in enumerate(versions):
        if version:
            yield from _on_ssd(layout, plan, unit, version)
            yield from _on_host(layout, plan, unit, version, frozenset())
    yield from waiting


def _on_ssd(layout: Layout, plan: Plan, unit: int, version: int) -> Iterator[Access]:
    if plan.use_ssd:
        yield from layout.weights_on_ssd(unit, version)
        for chunk, first, num in layout.chunks(unit, plan.chunk_elements):
            yield from layout.state_on_ssd(unit, version, chunk, first, num)


def _on_host(layout: Layout, plan: Plan, unit: int, version: int, stale: Set[tuple[Role, int]]) -> Iterator[Access]:
    weights = layout.table.permanent(Tier.HOST, Role.WEIGHTS, unit)
    if weights is not None and (Role.WEIGHTS, unit) not in stale:
        yield from layout.weights(weights, unit, version)
    state = layout.table.permanent(Tier.HOST, Role.STATE, unit)
    if state is not None and (Role.STATE, unit) not in stale:
        for chunk, first, num in layout.chunks(unit, plan.chunk_elements):
            yield from layout.state(state, first * layout.sizes.state, unit, version, chunk, num)
