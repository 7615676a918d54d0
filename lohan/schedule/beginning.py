"""What slots hold when a schedule begins: what it may read without having written it.

    SSD       of every unit the side with the current version; frozen weights
    host      weights and state that RAM keeps, unless they are stale
    either    the gradients of units whose update is pending

Everything else (the other side, rings, boundaries) holds nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from lohan.plan.plan import Plan
from lohan.schedule.layout import Layout
from lohan.schedule.ops import Access, Tier, What
from lohan.schedule.slots import Role


def found_at_start(layout: Layout, plan: Plan, pending: Set[int], stale: Set[tuple[Role, int]]) -> Iterator[Access]:
    """All that a schedule may read before it has written it."""
    for unit in range(len(layout.shape.units)):
        if plan.use_ssd:
            yield from layout.weights_on_ssd(unit, 0)
            for chunk, first, num in layout.chunks(unit, plan.chunk_elements):
                yield from layout.state_on_ssd(unit, 0, chunk, first, num)
        weights = layout.table.permanent(Tier.HOST, Role.WEIGHTS, unit)
        if weights is not None and (Role.WEIGHTS, unit) not in stale:
            yield from layout.weights(weights, unit, 0)
        state = layout.table.permanent(Tier.HOST, Role.STATE, unit)
        if state is not None and (Role.STATE, unit) not in stale:
            for chunk, first, num in layout.chunks(unit, plan.chunk_elements):
                yield from layout.state(state, first * layout.sizes.state, unit, 0, chunk, num)
        gradient = layout.table.permanent(plan.units[unit].gradient, Role.GRADIENT, unit)
        if gradient is not None and unit in pending:
            yield layout.gradient(gradient, unit, 1, What.GRADIENT)
