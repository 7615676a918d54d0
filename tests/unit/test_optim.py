"""Optimizers do what torch's do, and refuse settings that cannot work."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lohan.errors import OptionError
from lohan.optim import SGD, AdamW, Plane
from lohan.optim.base import Part

NUM_STEPS = 20


def train(optimizer: AdamW | SGD, start: Tensor, grads: list[Tensor], lrs: list[float], weight_decay: float) -> Tensor:
    """The fp32 weight after all steps."""
    weight = start.clone()
    state = [torch.zeros_like(weight) for _ in optimizer.planes]
    for step, (grad, lr) in enumerate(zip(grads, lrs, strict=True), 1):
        optimizer.update(weight, None, grad, state, step=step, lr=lr, clip=1.0, parts=[Part(0, len(weight), weight_decay)])
    return weight


def train_in_torch(torch_class: Any, start: Tensor, grads: list[Tensor], lrs: list[float], **settings: Any) -> Tensor:
    weight = torch.nn.Parameter(start.clone())
    optimizer = torch_class([weight], lr=lrs[0], foreach=False, **settings)
    for grad, lr in zip(grads, lrs, strict=True):
        optimizer.param_groups[0]["lr"] = lr
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


def problem(num: int = 4099) -> tuple[Tensor, list[Tensor], list[float]]:
    """A start away from zero, gradients of many magnitudes, a learning rate that changes with every step."""
    torch.manual_seed(0)
    start = torch.rand(num) + 0.5
    magnitude = 10.0 ** (torch.rand(num) * 8 - 6)
    return start, [torch.randn(num) * magnitude for _ in range(NUM_STEPS)], [1e-2 / (1 + step) for step in range(NUM_STEPS)]


def relative_error(got: Tensor, expected: Tensor) -> float:
    return ((got.double() - expected.double()).abs() / expected.double().abs()).max().item()


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.4, 0.95)])
def test_adamw_is_torch_adamw(weight_decay: float, betas: tuple[float, float]) -> None:
    start, grads, lrs = problem()
    got = train(AdamW(betas=betas), start, grads, lrs, weight_decay)
    expected = train_in_torch(torch.optim.AdamW, start, grads, lrs, betas=betas, weight_decay=weight_decay)
    assert relative_error(got, expected) < 1e-6
    assert relative_error(got, start) > 1e-3


@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_sgd_is_torch_sgd(weight_decay: float, momentum: float) -> None:
    start, grads, lrs = problem()
    grads = [grad.clamp(-1, 1) for grad in grads]
    got = train(SGD(lr=0.1, momentum=momentum), start, grads, lrs, weight_decay)
    expected = train_in_torch(torch.optim.SGD, start, grads, lrs, momentum=momentum, weight_decay=weight_decay)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_weight_decay_is_that_of_the_call() -> None:
    """A zero gradient leaves a parameter without decay alone, whatever the optimizer's own weight decay."""
    start, zeros = torch.ones(5), [torch.zeros(5)]
    assert torch.equal(train(AdamW(weight_decay=0.5), start, zeros, [0.1], 0.0), start)
    assert torch.equal(train(AdamW(weight_decay=0.0), start, zeros, [0.1], 0.5), start * 0.95)


def test_the_first_adamw_step_has_the_size_of_the_learning_rate() -> None:
    """Bias correction counts steps from 1: the first update is lr, whatever the gradient's magnitude."""
    start, grad = torch.ones(3), torch.tensor([1e-3, -1.0, 1e3])
    moved = start - train(AdamW(), start, [grad], [0.25], 0.0)
    torch.testing.assert_close(moved, 0.25 * grad.sign(), rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("optimizer", [AdamW(), SGD(lr=0.1)])
def test_clipping_scales_the_gradient(optimizer: AdamW | SGD) -> None:
    grad = torch.randn(100, generator=torch.Generator().manual_seed(1))
    clipped, scaled = torch.ones(100), torch.ones(100)
    settings: dict[str, Any] = {"step": 1, "lr": 0.1, "parts": [Part(0, 100, 0.0)]}
    state = [[torch.zeros(100) for _ in optimizer.planes] for _ in range(2)]
    optimizer.update(clipped, None, grad, state[0], clip=0.125, **settings)
    optimizer.update(scaled, None, grad * 0.125, state[1], clip=1.0, **settings)
    assert torch.equal(clipped, scaled) and all(map(torch.equal, *state))


def test_optimizers_declare_their_state() -> None:
    assert AdamW().planes == (Plane("mean", 4), Plane("square", 4))
    assert SGD(lr=0.1).planes == (Plane("velocity", 4),)


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: AdamW(lr=-1.0), "lr"),
        (lambda: AdamW(lr=float("nan")), "lr"),
        (lambda: AdamW(betas=(1.0, 0.999)), r"betas\[0\]"),
        (lambda: AdamW(betas=(0.9, -0.1)), r"betas\[1\]"),
        (lambda: AdamW(eps=-1e-8), "eps"),
        (lambda: AdamW(weight_decay=-0.01), "weight_decay"),
        (lambda: AdamW(kernel="fast"), "kernel"),  # type: ignore[arg-type]
        (lambda: SGD(lr=0.1, momentum=1.5), "momentum"),
    ],
)
def test_impossible_settings_are_refused_by_name(make: Any, option: str) -> None:
    with pytest.raises(OptionError, match=f"^{option}="):
        make()
