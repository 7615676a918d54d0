"""The kernels of kernels.cpp, called on torch tensors.

The library is built when lohan is installed and loaded here with ctypes, which lets go of the GIL during a call: a worker
thread that updates weights does not hold up the others. A call uses one thread and works in place on 1-D contiguous CPU
tensors; every tensor is checked first, because a kernel would write past the end of a wrong one without a word.

All instruction sets give the same bits, so the fastest is taken; `instruction_set()` forces one, for tests.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lohan.errors import NativeError

LIBRARY_PATH = Path(__file__).with_name("libkernels.so")


class AdamWScalars(ctypes.Structure):
    """What an AdamW update multiplies with: computed in double by the caller, rounded to fp32 here, once."""

    _fields_ = [
        (name, ctypes.c_float)
        for name in (
            "clip",
            "keep",
            "gradient_weight",
            "beta2",
            "square_weight",
            "root_bias_correction2",
            "eps",
            "step_size",
        )
    ]
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


class SGDScalars(ctypes.Structure):
    """What an SGD update multiplies with, rounded to fp32 here."""

    _fields_ = [(name, ctypes.c_float) for name in ("clip", "weight_decay", "momentum", "lr")]
    clip: float
    """the gradient is multiplied by this first"""
    weight_decay: float
    momentum: float
    lr: float


def adamw(weight: Tensor, rest: Tensor | None, grad: Tensor, mean: Tensor, square: Tensor, scalars: AdamWScalars) -> None:
    """One AdamW update, in place, of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None)."""
    num = _check_master(weight, rest, grad)
    state = (_pointer("mean", mean, torch.float32, num), _pointer("square", square, torch.float32, num))
    if rest is None:
        _kernel("adamw_plain")(weight.data_ptr(), grad.data_ptr(), *state, ctypes.byref(scalars), num)
    else:
        _kernel("adamw_split")(weight.data_ptr(), rest.data_ptr(), grad.data_ptr(), *state, ctypes.byref(scalars), num)


def sgd(weight: Tensor, rest: Tensor | None, grad: Tensor, velocity: Tensor, scalars: SGDScalars) -> None:
    """One SGD update, in place, of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None)."""
    num = _check_master(weight, rest, grad)
    state = _pointer("velocity", velocity, torch.float32, num)
    if rest is None:
        _kernel("sgd_plain")(weight.data_ptr(), grad.data_ptr(), state, ctypes.byref(scalars), num)
    else:
        _kernel("sgd_split")(weight.data_ptr(), rest.data_ptr(), grad.data_ptr(), state, ctypes.byref(scalars), num)


def join(weight: Tensor, rest: Tensor, value: Tensor) -> None:
    """Write the fp32 values of a split master into `value`."""
    num = value.numel()
    _kernel("join")(
        _pointer("weight", weight, torch.bfloat16, num),
        _pointer("rest", rest, torch.int16, num),
        _pointer("value", value, torch.float32, num),
        num,
    )


def split(value: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Write fp32 values as a split master, without loss: `weight` is `value` rounded half up, `rest` what is missing."""
    num = value.numel()
    _kernel("split")(
        _pointer("value", value, torch.float32, num),
        _pointer("weight", weight, torch.bfloat16, num),
        _pointer("rest", rest, torch.int16, num),
        num,
    )


def sum_of_squares(values: Tensor) -> float:
    """The fp64 sum of the squares of bf16 or fp32 values, with an order of additions that only their number decides."""
    name = "sum_of_squares_fp32" if values.dtype == torch.float32 else "sum_of_squares_bf16"
    dtype = torch.float32 if values.dtype == torch.float32 else torch.bfloat16
    result: float = _kernel(name)(_pointer("values", values, dtype, values.numel()), values.numel())
    return result


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the kernels on one of `instruction_sets()` in this block, on every thread."""
    global _selected
    if name not in instruction_sets():
        raise NativeError(f"instruction set {name!r} is not one that this processor runs: {instruction_sets()}")
    before, _selected = _selected, name
    try:
        yield
    finally:
        _selected = before


def instruction_sets() -> tuple[str, ...]:
    """Those that this processor runs, the fastest last."""
    names: bytes = _library.lohan_instruction_sets()
    return tuple(names.decode().split())


def _check_master(weight: Tensor, rest: Tensor | None, grad: Tensor) -> int:
    """The number of elements of a master and its gradient, which have the same type and size."""
    dtype = torch.float32 if rest is None else torch.bfloat16
    num = weight.numel()
    _pointer("weight", weight, dtype, num)
    _pointer("grad", grad, dtype, num)
    if rest is not None:
        _pointer("rest", rest, torch.int16, num)
    return num


def _pointer(name: str, tensor: Tensor, dtype: torch.dtype, num: int) -> int:
    """The tensor's address, once it is known to hold what a kernel expects."""
    is_flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not is_flat or tensor.dtype != dtype or tensor.numel() != num:
        raise NativeError(
            f"{name}: a kernel wants {num} contiguous {dtype} on the CPU, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}, stride {tensor.stride()}, on {tensor.device}"
        )
    return tensor.data_ptr()


def _load() -> ctypes.CDLL:
    """The library, with the types of its functions."""
    try:
        library = ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise NativeError(f"lohan's kernels cannot be loaded ({error}). Build them with: pip install -e .") from error
    library.lohan_instruction_sets.restype = ctypes.c_char_p
    return library


_library = _load()
_selected = instruction_sets()[-1]

_POINTER_ARGUMENTS = {
    "adamw_split": 6,
    "adamw_plain": 5,
    "sgd_split": 5,
    "sgd_plain": 4,
    "join": 3,
    "split": 3,
    "sum_of_squares_bf16": 1,
    "sum_of_squares_fp32": 1,
}
"""how many pointers each kernel takes before the number of elements"""


def _typed(name: str, isa: str) -> Callable[..., Any]:
    function = getattr(_library, f"lohan_{name}_{isa}")
    function.argtypes = [ctypes.c_void_p] * _POINTER_ARGUMENTS[name] + [ctypes.c_size_t]
    function.restype = ctypes.c_double if name.startswith("sum") else None
    return function


_kernels = {(name, isa): _typed(name, isa) for isa in instruction_sets() for name in _POINTER_ARGUMENTS}


def _kernel(name: str) -> Callable[..., Any]:
    return _kernels[name, _selected]
