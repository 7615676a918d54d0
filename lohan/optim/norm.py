"""The global norm of a gradient, with bits that depend neither on how the gradient was cut nor on when its parts came.

    NORM_BLOCK elements of a tensor -> tensor -> unit -> total

Blocks are counted from the start of each tensor. A block is summed in fp64 by the native kernel, in an order fixed by its
length; above it, sums are added one behind the other: blocks by position, tensors in the order of the unit's layout, units
in the order of the model. What has no gradient is left out, which is the same as adding zero.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

from lohan import native
from lohan.errors import ScheduleError
from lohan.optim.team import ALONE, Team

NORM_BLOCK = 2**20
"""elements that one kernel call sums; part of the numerics"""


def tensor_sum_of_squares(grad: Tensor, team: Team = ALONE) -> float:
    """The sum of squares of one whole parameter's gradient (or of one piece of a split parameter), 1-D and contiguous."""
    total = 0.0
    for block_sum in team.each(native.sum_of_squares, torch.split(grad, NORM_BLOCK)):
        total += block_sum
    return total


class GradientNorm:
    """Collects the sums of one step, in any order and from any thread, and adds them up in the order of the model."""

    def __init__(self) -> None:
        self._sums: dict[tuple[int, int], float] = {}

    def add(self, unit: int, tensor: int, sum_of_squares: float) -> None:
        """Record a tensor by the position of its unit in the model, and its own in the unit's layout."""
        if (unit, tensor) in self._sums:
            raise ScheduleError(f"the gradient of tensor {tensor} of unit {unit} was summed twice in one step")
        self._sums[unit, tensor] = sum_of_squares

    def unit_sums(self) -> dict[int, float]:
        """The sum of each unit that had a gradient, in the order of the model."""
        sums: dict[int, float] = {}
        for (unit, _), tensor_sum in sorted(self._sums.items()):
            sums[unit] = sums.get(unit, 0.0) + tensor_sum
        return sums

    def total(self) -> float:
        """The norm over all units."""
        total = 0.0
        for unit_sum in self.unit_sums().values():
            total += unit_sum
        return math.sqrt(total)


def clip_coefficient(norm: float, max_norm: float | None) -> float:
    """What gradients are multiplied with, as in torch's `clip_grad_norm_`, rounded to fp32; None never clips.

    An infinite norm gives zero and NaN gives NaN: a caller that must leave the state untouched looks at the norm first.
    """
    if max_norm is None:
        return 1.0
    return ctypes.c_float(min(max_norm / (norm + 1e-6), 1.0)).value
