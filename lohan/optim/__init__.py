"""Optimizers, the norm that clips their gradients, and the schedules of their learning rates."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lohan.optim.adamw import AdamW
    from lohan.optim.base import Optimizer, Plane
    from lohan.optim.norm import NORM_BLOCK, GradientNorm, clip_coefficient, tensor_sum_of_squares
    from lohan.optim.schedules import LrSchedule, LrScheduleName, schedule_name
    from lohan.optim.sgd import SGD

_WHERE = {
    "NORM_BLOCK": "norm",
    "SGD": "sgd",
    "AdamW": "adamw",
    "GradientNorm": "norm",
    "LrSchedule": "schedules",
    "LrScheduleName": "schedules",
    "Optimizer": "base",
    "Plane": "base",
    "clip_coefficient": "norm",
    "schedule_name": "schedules",
    "tensor_sum_of_squares": "norm",
}


def __getattr__(name: str) -> Any:
    """Import on first use: schedules take no torch, so that arguments are checked at once."""
    if name not in _WHERE:
        raise AttributeError(f"module 'lohan.optim' has no attribute {name!r}")
    return getattr(import_module(f"lohan.optim.{_WHERE[name]}"), name)


__all__ = [
    "NORM_BLOCK",
    "SGD",
    "AdamW",
    "GradientNorm",
    "LrSchedule",
    "LrScheduleName",
    "Optimizer",
    "Plane",
    "clip_coefficient",
    "schedule_name",
    "tensor_sum_of_squares",
]
