"""Budgets are hard: one byte below the smallest that works is refused before anything moves, and the smallest one holds."""

from __future__ import annotations

from typing import Any

import pytest

from lohan import Engine
from lohan.device import open_device
from lohan.errors import BudgetError
from lohan.ssd.memory_store import MemoryStore
from tests.parity.harness import open_engine, steps, tiny_model

DEVICE_BYTES = 64 * 2**20
CHOICES = [("cpu", "host_memory"), ("emulated", "host_memory"), ("emulated", "device_memory")]


def opened(architecture: str, device: str, **budgets: Any) -> Engine:
    memory_bytes = budgets.pop("device_memory", DEVICE_BYTES) if device == "emulated" else None
    return open_engine(tiny_model(architecture), device=open_device(device, memory_bytes), **budgets)


def refused(architecture: str, device: str, option: str, nbytes: int) -> int:
    """The smallest budget that works, from the refusal of one that does not."""
    with opened(architecture, device, **{option: nbytes}) as engine:
        before = engine._transferred()
        with pytest.raises(BudgetError, match=f"{option}={nbytes}: ") as caught:
            engine.step(steps()[0])
        assert engine._transferred() == before, "it was refused before the run"
        assert caught.value.option == option
        return caught.value.needed_bytes


@pytest.mark.parametrize(("device", "option"), CHOICES)
@pytest.mark.parametrize("architecture", ["llama-tied", "gpt2"])
def test_the_smallest_budget_works_and_one_byte_less_is_refused(architecture: str, device: str, option: str) -> None:
    needed = refused(architecture, device, option, 4096)
    assert refused(architecture, device, option, needed - 1) == needed
    with opened(architecture, device, **{option: needed}) as engine:
        for batches in steps()[:3]:
            report = engine.step(batches)
        engine.evaluate(steps()[3])
        peak = report.peak_host_bytes if option == "host_memory" else engine.device.peak_bytes
        assert 0 < peak <= needed


def test_a_batch_that_is_too_large_is_refused_and_smaller_ones_go_on() -> None:
    with opened("llama-tied", "emulated") as engine:
        engine.step(steps()[0])
        needed = engine.device.peak_bytes
    with opened("llama-tied", "emulated", device_memory=2 * needed) as engine, opened("llama-tied", "emulated") as roomy:
        reports = [one.step(steps()[0]) for one in (engine, roomy)]
        larger = [{name: tensor.repeat(40, 1) for name, tensor in batch.items()} for batch in steps()[1]]
        with pytest.raises(BudgetError, match="device_memory"):
            engine.step(larger)
        reports += [one.step(steps()[1]) for one in (engine, roomy)]
        losses = [report.loss for report in reports]
        assert losses[::2] == losses[1::2]


def larger(batches: list[dict[str, Any]], times: int) -> list[dict[str, Any]]:
    return [{name: tensor.repeat(times, 1) for name, tensor in batch.items()} for batch in batches]


def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    """Foreseen batches: of training, and of an evaluation that is larger than any step."""
    with opened("llama-tied", "cpu") as engine:
        engine.step(steps()[0])
        small = engine.step(steps()[1]).peak_host_bytes
    for room in ({"room_for": larger(steps()[0], 60)}, {"room_for": steps()[0], "room_for_evaluation": larger(steps()[0], 60)}):
        made: list[str] = []

        def make_store(nbytes: int, name: str, unlinked: bool, made: list[str] = made) -> MemoryStore:
            made.append(name)
            return MemoryStore(nbytes)

        with pytest.raises(BudgetError, match="host_memory") as caught:
            opened("llama-tied", "cpu", host_memory=small, make_store=make_store, **room)
        assert made == [] and caught.value.needed_bytes > small
        with opened("llama-tied", "cpu", host_memory=caught.value.needed_bytes, make_store=make_store, **room) as engine:
            plan = engine._ready().preparer.adopt()
            engine.step(steps()[0])
            evaluated = engine.evaluate(larger(steps()[0], 60 if "room_for_evaluation" in room else 1))
            assert engine._ready().preparer.adopt() is plan, "nothing was planned again"
        with opened("llama-tied", "cpu") as roomy:
            roomy.step(steps()[0])
            assert evaluated == pytest.approx(roomy.evaluate(steps()[0]), rel=1e-6)


def test_an_evaluation_needs_less_than_a_step_of_the_same_batch() -> None:
    batch = larger(steps()[0], 60)
    needed = []
    for room in ({"room_for": batch}, {"room_for_evaluation": batch}):
        with pytest.raises(BudgetError) as caught:
            opened("llama-tied", "cpu", host_memory=4096, **room)
        needed.append(caught.value.needed_bytes)
    assert needed[1] < 0.8 * needed[0]
