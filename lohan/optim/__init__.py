"""Optimizers, the norm that clips their gradients, and the schedules of their learning rates."""

from __future__ import annotations

from lohan.optim.adamw import AdamW
from lohan.optim.base import Optimizer, Plane
from lohan.optim.norm import NORM_BLOCK, GradientNorm, clip_coefficient, tensor_sum_of_squares
from lohan.optim.schedules import LrSchedule, LrScheduleName, schedule_name
from lohan.optim.sgd import SGD

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
