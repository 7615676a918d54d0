"""The kernels of kernels.cpp, called on torch tensors.

ctypes lets go of the GIL during a call, so a worker thread that updates weights does not hold up the others. A call uses
one thread and works in place on 1-D contiguous CPU tensors; every tensor is checked first, because a kernel would write
past the end of a wrong one without a word.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lohan.errors import NativeError
from lohan.native.library import INSTRUCTION_SETS, instruction_set, kernel

__all__ = [
    "INSTRUCTION_SETS",
    "AdamWScalars",
    "SGDScalars",
    "adamw",
    "instruction_set",
    "join",
    "sgd",
    "split",
    "sum_of_squares",
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


def adamw(weight: Tensor, rest: Tensor | None, grad: Tensor, mean: Tensor, square: Tensor, scalars: AdamWScalars) -> None:
    """One AdamW update, in place, of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None)."""
    num = weight.numel()
    state = _array("mean", mean, torch.float32, num), _array("square", square, torch.float32, num)
    form, arrays = _master(weight, rest, grad)
    kernel(f"adamw_{form}")(*arrays, *state, ctypes.byref(scalars), ctypes.c_size_t(num))


def sgd(weight: Tensor, rest: Tensor | None, grad: Tensor, velocity: Tensor, scalars: SGDScalars) -> None:
    """One SGD update, in place, of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None)."""
    num = weight.numel()
    state = _array("velocity", velocity, torch.float32, num)
    form, arrays = _master(weight, rest, grad)
    kernel(f"sgd_{form}")(*arrays, state, ctypes.byref(scalars), ctypes.c_size_t(num))


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


def _master(weight: Tensor, rest: Tensor | None, grad: Tensor) -> tuple[str, list[ctypes.c_void_p]]:
    """Which form a master has, and its arrays with the gradient's behind them, in the order of the kernels' arguments."""
    num = weight.numel()
    if rest is None:
        return "plain", [_array("weight", weight, torch.float32, num), _array("grad", grad, torch.float32, num)]
    parts = [_array("weight", weight, torch.bfloat16, num), _array("rest", rest, torch.int16, num)]
    return "split", [*parts, _array("grad", grad, torch.bfloat16, num)]


def _array(name: str, tensor: Tensor, dtype: torch.dtype, num: int) -> ctypes.c_void_p:
    """The tensor's address, once it is known to hold what a kernel expects."""
    is_flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not is_flat or tensor.dtype != dtype or tensor.numel() != num:
        raise NativeError(
            f"{name}: a kernel wants {num} contiguous {dtype} on the CPU, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}, stride {tensor.stride()}, on {tensor.device}"
        )
    return ctypes.c_void_p(tensor.data_ptr())
