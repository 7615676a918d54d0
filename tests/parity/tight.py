"""A run with as few slots as it takes, whose tensors are wherever they can be: every kind of operation and of wait occurs."""

from __future__ import annotations

from lohan import Plan
from lohan.plan.plan import UnitPlan, Update
from lohan.schedule.ops import Tier

MODEL = "llama-tied"
"""its vocabulary comes in two pieces, each of which is embedding and head: gradients come in two parts"""
PLAN = Plan(
    units=(
        UnitPlan(update=Update.SPECULATE),
        UnitPlan(update=Update.DEFER),
        UnitPlan(update=Update.DEFER),
        UnitPlan(update=Update.SPECULATE),
        UnitPlan(update=Update.DEFER, gradient=Tier.HOST),
    ),
    boundaries=(Tier.SSD, Tier.SSD, Tier.DEVICE, Tier.HOST, Tier.SSD),
    chunk_elements=8192,
    prefetch=1,
    weight_slots=2,
    gradient_slots=1,
    state_slots=1,
    boundary_slots=1,
    device_prefetch=1,
    device_weight_slots=2,
    device_gradient_slots=1,
    device_boundary_slots=2,
)
