"""The kernels of kernels.cpp, called on torch tensors.

ctypes lets go of the GIL during a call, so a worker thread that updates weights does not hold up the others. A call uses
one thread and works in place on 1-D contiguous CPU tensors. Updates are in `native.update`.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lohan.native.arrays import address_of
from lohan.native.library import INSTRUCTION_SETS, instruction_set, kernel
from lohan.native.update import Ranges, Sums, update

__all__ = [
    "INSTRUCTION_SETS",
    "AdamWScalars",
    "Ranges",
    "SGDScalars",
    "Sums",
    "instruction_set",
    "join",
    "split",
    "sum_of_squares",
    "update",
]


class AdamWScalars(ctypes.Structure):
    """What an AdamW update multiplies with: computed in double by the caller, rounded to fp32 here, once."""

    clip: float
    """the gradient is multiplied by this first"""
    keep: float
    """1 - lr * weight_decay"""
    gradient_weight: float
    """1 - beta1"""
    beta2: float
    square_weight: float
    """1 - beta2"""
    root_bias_correction2: float
    """sqrt(1 - beta2^step)"""
    eps: float
    step_size: float
    """lr / (1 - beta1^step)"""

    _fields_ = [(name, ctypes.c_float) for name in __annotations__]


class SGDScalars(ctypes.Structure):
    """What an SGD update multiplies with, rounded to fp32 here."""

    clip: float
    """the gradient is multiplied by this first"""
    weight_decay: float
    momentum: float
    lr: float

    _fields_ = [(name, ctypes.c_float) for name in __annotations__]


def join(weight: Tensor, rest: Tensor, value: Tensor) -> None:
    """Write the fp32 values of a split master into `value`."""
    num = value.numel()
    parts = _array("weight", weight, torch.bfloat16, num), _array("rest", rest, torch.int16, num)
    kernel("join")(*parts, _array("value", value, torch.float32, num), ctypes.c_size_t(num))


def split(value: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Write fp32 values as a split master, without loss: `weight` is `value` rounded half up, `rest` what is missing."""
    num = value.numel()
    parts = _array("weight", weight, torch.bfloat16, num), _array("rest", rest, torch.int16, num)
    kernel("split")(_array("value", value, torch.float32, num), *parts, ctypes.c_size_t(num))


def sum_of_squares(values: Tensor) -> float:
    """The fp64 sum of the squares of bf16 or fp32 values, with an order of additions that only their number decides."""
    name, dtype = ("fp32", torch.float32) if values.dtype == torch.float32 else ("bf16", torch.bfloat16)
    num = values.numel()
    function = kernel(f"sum_of_squares_{name}", ctypes.c_double)
    result: float = function(_array("values", values, dtype, num), ctypes.c_size_t(num))
    return result


def _array(name: str, tensor: Tensor, dtype: torch.dtype, num: int) -> ctypes.c_void_p:
    return ctypes.c_void_p(address_of(name, tensor, dtype, num))
