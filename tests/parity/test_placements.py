"""Every placement gives the bits of plain memory: twenty steps, two unequal micro-batches, some steps clipped.

In `make test` any two settings meet (a pairwise cover); the whole product of what decides the order of things is in the slow
tests, where the tiers take turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from itertools import cycle, islice, product
from pathlib import Path
from typing import Any

import pytest

from lohan import Plan
from lohan.device.emulated import EmulatedDevice
from lohan.engine import Engine
from lohan.plan.plan import UnitPlan, Update
from lohan.plan.policies import memory_plan
from lohan.schedule.ops import Tier
from lohan.ssd.base import Store
from lohan.ssd.file_store import FileStore
from tests.parity.cover import pairs_of, pairwise
from tests.parity.harness import ARCHITECTURES, in_memory, limit_of, memory_store, open_engine, steps, tiny_model, train

ORDER: dict[str, Sequence[Any]] = {
    "architecture": ARCHITECTURES,
    "dtype": ("bf16", "fp32"),
    "device": ("cpu", "emulated"),
    "update": ("speculate", "defer", "mixed", "immediate"),
    "prefetch": (0, 1, 2),
    "chunk_elements": (4096, 12288, 2**20),
}
"""what decides when things happen"""
TIERS: dict[str, Sequence[Any]] = {
    "weights": ("ssd", "host", "mixed"),
    "state": ("ssd", "host", "mixed"),
    "gradient": ("ssd", "host", "mixed"),
    "boundaries": ("ssd", "host", "device", "mixed"),
    "device_prefetch": (0, 1, 2),
    "spare_slots": (0, 2),
    "store": ("memory", "files"),
    "mode": ("double", "log", "single"),
}
"""what decides where things are"""
COVER = pairwise({**ORDER, **TIERS})
DEVICE_BYTES = 64 * 2**20


def name_of(settings: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


@cache
def shape_of(architecture: str) -> tuple[int, int]:
    """How many units and sites."""
    with open_engine(tiny_model(architecture), placement="memory") as engine:
        return len(engine.shape.units), len(engine.shape.sites)


def make_plan(settings: Mapping[str, Any]) -> Plan:
    """The plan that a combination of settings describes; `mixed` takes turns from unit to unit."""

    def turns(value: str, *kinds: str) -> Callable[[int], str]:
        order = list(islice(cycle(kinds), 64)) if value == "mixed" else [value] * 64
        return order.__getitem__

    mode = settings.get("mode", "double")
    weights, state = (turns(settings[name], "ssd", "host") for name in ("weights", "state"))
    gradient = turns("ssd" if mode == "log" else settings["gradient"], "ssd", "host")
    boundary = turns(settings["boundaries"], "ssd", "device", "host")
    update = turns(settings["update"] if mode == "double" else "defer", "defer", "speculate", "speculate")
    num_units, num_sites = shape_of(settings["architecture"])
    spare, prefetch, device_prefetch = settings["spare_slots"], settings["prefetch"], settings["device_prefetch"]
    return Plan(
        units=tuple(UnitPlan(Tier(weights(i)), Tier(state(i)), Tier(gradient(i)), Update(update(i))) for i in range(num_units)),
        boundaries=tuple(Tier(boundary(i)) for i in range(num_sites)),
        chunk_elements=settings["chunk_elements"],
        prefetch=prefetch,
        weight_slots=prefetch + 1 + spare,
        gradient_slots=1 + spare,
        state_slots=1 + spare,
        boundary_slots=1 + spare,
        device_prefetch=device_prefetch,
        device_weight_slots=device_prefetch + 1 + spare,
        device_gradient_slots=1 + spare,
        device_boundary_slots=1 + spare,
    )


def file_store(folder: Path, nbytes: int, name: str, vanishes: bool) -> Store:
    return FileStore.create([folder], nbytes, file_name=name, unlinked=vanishes, stripe_bytes=2**20)


def open_placed(settings: Mapping[str, Any], folder: Path, plan: Plan, **options: Any) -> Engine:
    """An engine as the settings describe it."""
    device: Any = settings["device"]
    if device == "emulated":
        device = EmulatedDevice(DEVICE_BYTES, jitter_s=0.0005, seed=hash(name_of(settings)) % 1000)
    return open_engine(
        tiny_model(settings["architecture"]),
        dtype=settings["dtype"],
        device=device,
        placement=plan,
        store=settings["mode"],
        make_store=memory_store if settings["store"] == "memory" else partial(file_store, folder),
        max_grad_norm=None if settings["update"] == "immediate" else limit_of(settings["architecture"]),
        **options,
    )


def check_placed(settings: Mapping[str, Any], folder: Path) -> None:
    clips, arithmetic = settings["update"] != "immediate", "cuda" if settings["device"] == "cuda" else "cpu"
    expected = in_memory(settings["architecture"], settings["dtype"], clips, arithmetic)
    plan = make_plan(settings)
    with open_placed(settings, folder, plan) as engine:
        assert plan != memory_plan(engine.shape)
        train(engine, steps()).assert_same(expected)


@pytest.mark.parametrize("settings", COVER, ids=name_of)
def test_any_two_settings_give_the_bits_of_memory(settings: Mapping[str, Any], tmp_path: Path) -> None:
    check_placed(settings, tmp_path)


def whole_product() -> list[dict[str, Any]]:
    """Every order of things; the tiers, of which there are too many, take turns."""
    orders = [dict(zip(ORDER, values, strict=True)) for values in product(*ORDER.values())]
    tiers = cycle([dict(zip(TIERS, values, strict=True)) for values in product(*TIERS.values())][::5])
    return [{**order, **tier} for order, tier in zip(orders, tiers, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("settings", whole_product(), ids=name_of)
def test_every_order_gives_the_bits_of_memory(settings: Mapping[str, Any], tmp_path: Path) -> None:
    check_placed(settings, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_some_steps_are_clipped_and_some_are_not(architecture: str) -> None:
    for dtype in ORDER["dtype"]:
        clipped = in_memory(architecture, dtype, clips=True).clipped
        assert any(clipped) and not all(clipped)


def test_edges_come_in_pieces() -> None:
    """Tied and untied; and one architecture whose blocks are larger than its edges."""
    pieces = {}
    for architecture in ("llama", "llama-tied", "gpt2", "mixtral"):
        with open_engine(tiny_model(architecture), placement="memory") as engine:
            pieces[architecture] = len(engine.shape.sites[-1].units), len(engine.shape.tied)
    assert pieces == {"llama": (2, 0), "llama-tied": (2, 2), "gpt2": (2, 2), "mixtral": (1, 0)}


def test_the_cover_covers_all_pairs() -> None:
    met = set().union(*(pairs_of(settings) for settings in COVER))
    factors = {**ORDER, **TIERS}
    assert len(met) == sum(len(a) * len(b) for i, a in enumerate(factors.values()) for b in list(factors.values())[:i])
