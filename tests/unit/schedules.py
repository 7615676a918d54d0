"""Small models and plans, drawn at random, for tests of schedules."""

from __future__ import annotations

import random
from dataclasses import dataclass

from lohan.model.shape import ModelShape, SiteShape, UnitKind, UnitShape, lay_out
from lohan.plan.plan import Plan, UnitPlan, Update
from lohan.schedule.builder import Call, Mode, ScheduleBuilder
from lohan.schedule.ops import Schedule, Tier
from lohan.schedule.slots import Role, Sizes, SlotTable

BF16_ADAMW = Sizes(weight=2, state_planes=(2, 4, 4))


def model(rng: random.Random) -> ModelShape:
    """Embedding (in pieces), blocks, norm, head (in pieces, sometimes tied), some of it frozen."""
    pieces, blocks, tied = rng.randint(1, 3), rng.randint(1, 4), rng.random() < 0.4

    def unit(name: str, kind: UnitKind) -> UnitShape:
        trainable = rng.random() < 0.9
        size = rng.choice([4096, 5000, 20000])
        tensors = [
            (f"{name}.a", (size,), trainable, True, 0),
            (f"{name}.b", (rng.randint(1, 3000),), rng.random() < 0.8, False, 0),
        ]
        return lay_out(name, kind, tensors)

    units = [unit(f"embed[{i}]", UnitKind.EMBEDDING) for i in range(pieces)]
    sites = [SiteShape("embed", UnitKind.EMBEDDING, tuple(range(pieces)))]
    for block in range(blocks):
        sites.append(SiteShape(f"block{block}", UnitKind.MODULE, (len(units),)))
        units.append(unit(f"block{block}", UnitKind.MODULE))
    first = 0 if tied else len(units)
    if not tied:
        units += [unit(f"head[{i}]", UnitKind.HEAD) for i in range(pieces)]
    sites.append(SiteShape("head", UnitKind.HEAD, tuple(range(first, first + pieces))))
    return ModelShape(tuple(units), tuple(sites))


def plan(rng: random.Random, shape: ModelShape, *, updates: tuple[Update, ...]) -> Plan:
    """Any valid plan."""
    prefetch, device_prefetch = rng.randint(0, 3), rng.randint(0, 2)

    def tier() -> Tier:
        return rng.choice([Tier.HOST, Tier.SSD])

    return Plan(
        units=tuple(UnitPlan(tier(), tier(), tier(), rng.choice(updates)) for _ in shape.units),
        boundaries=tuple(rng.choice([Tier.HOST, Tier.SSD, Tier.DEVICE]) for _ in shape.sites),
        chunk_elements=rng.choice([4096, 8192, 65536]),
        prefetch=prefetch,
        weight_slots=prefetch + 1 + rng.randint(0, 2),
        gradient_slots=rng.randint(1, 3),
        state_slots=rng.randint(1, 3),
        boundary_slots=rng.randint(1, 3),
        device_prefetch=device_prefetch,
        device_weight_slots=device_prefetch + 1 + rng.randint(0, 2),
        device_gradient_slots=rng.randint(1, 2),
        device_boundary_slots=rng.randint(1, 3),
    )


@dataclass
class Drawn:
    """A schedule and what it was made from."""

    shape: ModelShape
    plan: Plan
    call: Call
    schedule: Schedule


def draw(seed: int) -> Drawn:
    """A schedule for a random model, plan and call."""
    rng = random.Random(seed)
    shape = model(rng)
    on_host = rng.random() < 0.5
    chosen = plan(rng, shape, updates=rng.choice([(Update.IMMEDIATE,), (Update.SPECULATE, Update.DEFER)]))
    boundary_bytes = [0 if site.kind is UnitKind.EMBEDDING else rng.randint(1, 9000) for site in shape.sites]
    sums = rng.random() < 0.5
    table = SlotTable(shape, chosen, BF16_ADAMW, boundary_bytes, on_host=on_host, sums=sums)
    builder = ScheduleBuilder(shape, chosen, BF16_ADAMW, table, on_host=on_host, sums=sums)
    mode = rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.EVALUATE, Mode.DRAIN])
    trainable = [i for i, unit in enumerate(shape.units) if unit.trainable_elements]
    may_wait = [i for i in trainable if chosen.units[i].update is not Update.IMMEDIATE]
    pending = frozenset() if mode is Mode.EVALUATE else frozenset(i for i in may_wait if rng.random() < 0.6)
    kept = [(role, unit) for role in (Role.WEIGHTS, Role.STATE) for unit in range(len(shape.units))]
    stale = frozenset(one for one in kept if table.permanent(Tier.HOST, *one) is not None and rng.random() < 0.5)
    call = Call(mode, pending, stale, defer=rng.random() < 0.3)
    return Drawn(shape, chosen, call, builder.build(call))
