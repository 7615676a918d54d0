"""The gradient norm is a fixed tree: its bits depend on neither the order of arrival nor the instruction set."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lohan import native
from lohan.errors import ScheduleError
from lohan.optim import NORM_BLOCK, GradientNorm, clip_coefficient, reference, tensor_sum_of_squares


def gradient(num: int, seed: int = 0) -> torch.Tensor:
    """Magnitudes of twelve decades, so that every change in the order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num, generator=generator) * 10.0 ** (torch.rand(num, generator=generator) * 12 - 6)


@pytest.mark.parametrize("isa", native.INSTRUCTION_SETS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@given(num=st.integers(0, 200) | st.sampled_from([1023, 4096, 33_333]), seed=st.integers(0, 2**16))
def test_sums_have_the_bits_of_the_reference(isa: str, dtype: torch.dtype, num: int, seed: int) -> None:
    values = gradient(num, seed).to(dtype)
    with native.instruction_set(isa):
        assert native.sum_of_squares(values) == reference.sum_of_squares(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_tensor_is_summed_in_blocks_from_its_start(dtype: torch.dtype) -> None:
    grad = gradient(2 * NORM_BLOCK + 12_345).to(dtype)
    total = tensor_sum_of_squares(grad)
    blocks = [grad[:NORM_BLOCK], grad[NORM_BLOCK : 2 * NORM_BLOCK], grad[2 * NORM_BLOCK :]]
    sums = [native.sum_of_squares(block) for block in blocks]
    assert total == sums[0] + sums[1] + sums[2]
    assert total == pytest.approx(grad.double().square().sum().item(), rel=1e-12)


def added_in_order(values: Iterable[float]) -> float:
    """Python's own `sum` compensates its rounding from 3.12 on."""
    return functools.reduce(operator.add, values, 0.0)


def test_the_total_does_not_depend_on_the_order_of_arrival() -> None:
    """For sums of which the order of additions decides the last bits, among the units as well as within each."""
    draw = random.Random(5)
    by_unit = [[draw.random() for _ in range(50)] for _ in range(50)]
    unit_sums = [added_in_order(sums) for sums in by_unit]
    expected = math.sqrt(added_in_order(unit_sums))
    assert math.sqrt(added_in_order(reversed(unit_sums))) != expected
    assert math.sqrt(added_in_order(added_in_order(reversed(sums)) for sums in by_unit)) != expected
    arrivals = list(itertools.product(range(50), range(50)))
    for _ in range(20):
        draw.shuffle(arrivals)
        norm = GradientNorm()
        for unit, tensor in arrivals:
            norm.add(unit, tensor, by_unit[unit][tensor])
        assert norm.total() == expected


def test_the_norm_is_that_of_torch() -> None:
    grads = [gradient(1000, seed) for seed in range(4)]
    norm = GradientNorm()
    for index, grad in enumerate(grads):
        norm.add(index // 2, index % 2, tensor_sum_of_squares(grad))
    assert norm.total() == pytest.approx(torch.cat(grads).double().norm().item(), rel=1e-14)
    assert list(norm.unit_sums()) == [0, 1]
    assert GradientNorm().total() == 0.0


def test_a_gradient_summed_twice_is_an_error() -> None:
    norm = GradientNorm()
    norm.add(3, 1, 2.0)
    with pytest.raises(ScheduleError, match="tensor 1 of unit 3"):
        norm.add(3, 1, 2.0)


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("max_norm", [0.5, 1.0])
def test_the_clip_coefficient_is_that_of_torch(scale: float, max_norm: float) -> None:
    weight = torch.nn.Parameter(torch.ones(16))
    weight.grad = torch.full((16,), 0.25 * scale)
    norm = torch.nn.utils.clip_grad_norm_([weight], max_norm)
    coefficient = clip_coefficient(norm.item(), max_norm)
    torch.testing.assert_close(torch.full((16,), 0.25 * scale) * coefficient, weight.grad, rtol=2e-7, atol=0.0)
    assert coefficient == torch.tensor(coefficient, dtype=torch.float32).item()


def test_nothing_is_clipped_within_the_limit_or_without_one() -> None:
    assert clip_coefficient(0.5, 1.0) == 1.0
    assert clip_coefficient(1e9, None) == 1.0
    assert clip_coefficient(float("inf"), 1.0) == 0.0
    assert math.isnan(clip_coefficient(float("nan"), 1.0))
