"""The arithmetic of the native kernels, to be read: the same functions, and the same bits, in torch.

Only elementwise fp32 operations with one rounding each are used. torch's own `lerp_`, `addcmul_` and `add_(alpha=)` contract
to FMA in the vectorised part of a tensor but not in its tail, so that their bits would depend on where a chunk ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_intdigest

from lohan.native import AdamWScalars, Ranges, SGDScalars, Sums

SUM_LANES = 32
"""partial sums of a sum of squares; element i belongs to lane i % SUM_LANES"""


def update(
    rule: str, weight: Tensor, rest: Tensor | None, grad: Tensor, state: Sequence[Tensor], ranges: Ranges, sums: Sums | None
) -> None:
    """Update ranges of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None), in place."""
    with summing([weight, *([] if rest is None else [rest]), *state], sums):
        for start, stop, scalars in ranges:
            span = slice(start, stop)
            master = weight[span], None if rest is None else rest[span], grad[span]
            if isinstance(scalars, AdamWScalars):
                adamw(*master, state[0][span], state[1][span], scalars)
            elif isinstance(scalars, SGDScalars):
                sgd(*master, state[0][span], scalars)
            else:
                raise TypeError(f"there is no rule {rule!r} with {type(scalars).__name__}")


@contextmanager
def summing(arrays: Sequence[Tensor], sums: Sums | None) -> Iterator[None]:
    """What the block finds in the arrays and what it leaves there, as checksums."""
    if sums is None:
        yield
        return
    _sum(arrays, sums.before, sums.grain_elements)
    yield
    _sum(arrays, sums.after, sums.grain_elements)


def _sum(arrays: Sequence[Tensor], sums: Sequence[NDArray[np.uint64] | None], grain_elements: int) -> None:
    for array, wanted in zip(arrays, sums, strict=True):
        data, grain_bytes = array.view(torch.uint8).numpy().data, grain_elements * array.element_size()
        for grain in range(0 if wanted is None else len(wanted)):
            assert wanted is not None
            wanted[grain] = xxh3_64_intdigest(data[grain * grain_bytes : (grain + 1) * grain_bytes])


def adamw(weight: Tensor, rest: Tensor | None, grad: Tensor, mean: Tensor, square: Tensor, scalars: AdamWScalars) -> None:
    """One AdamW update, in place, of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None)."""
    master = _joined(weight, rest)
    gradient = grad.float() * scalars.clip
    master = master * scalars.keep
    if scalars.gradient_weight < 0.5:
        mean.copy_(mean + scalars.gradient_weight * (gradient - mean))
    else:  # from the nearer end, as torch's lerp: exact at both ends
        mean.copy_(gradient + (scalars.gradient_weight - 1) * (gradient - mean))
    square.copy_(square * scalars.beta2 + (scalars.square_weight * gradient) * gradient)
    denominator = _sqrt(square) / scalars.root_bias_correction2 + scalars.eps
    _store(master - (scalars.step_size * mean) / denominator, weight, rest)


def sgd(weight: Tensor, rest: Tensor | None, grad: Tensor, velocity: Tensor, scalars: SGDScalars) -> None:
    """One SGD update, in place, of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None)."""
    master = _joined(weight, rest)
    gradient = grad.float() * scalars.clip + scalars.weight_decay * master
    velocity.copy_(velocity * scalars.momentum + gradient)
    _store(master - scalars.lr * velocity, weight, rest)


def join(weight: Tensor, rest: Tensor, value: Tensor) -> None:
    """Write the fp32 values of a split master into `value`."""
    bits = (weight.view(torch.int16).to(torch.int32) << 16) + rest.to(torch.int32)
    value.copy_(bits.view(torch.float32))


def split(value: Tensor, weight: Tensor, rest: Tensor) -> None:
    """Write fp32 values as a split master, without loss: `weight` is `value` rounded half up, `rest` what is missing."""
    bits = value.view(torch.int32)
    high = (bits + 0x8000) >> 16
    weight.view(torch.int16).copy_(high)
    rest.copy_(bits - (high << 16))


def sum_of_squares(values: Tensor) -> float:
    """The fp64 sum of the squares of bf16 or fp32 values: lanes one behind the other, then halves folded onto halves."""
    rows = torch.nn.functional.pad(values.double(), (0, -values.numel() % SUM_LANES)).view(-1, SUM_LANES)
    lanes = torch.zeros(SUM_LANES, dtype=torch.float64)
    for row in rows * rows:
        lanes += row
    while lanes.numel() > 1:
        lower, upper = lanes.chunk(2)
        lanes = lower + upper
    return lanes.item()


def _sqrt(values: Tensor) -> Tensor:
    """Rounded correctly, as IEEE wants it; torch's fp32 root is off by one ulp for one value in six, its fp64 root is not."""
    return values.double().sqrt().float()


def _joined(weight: Tensor, rest: Tensor | None) -> Tensor:
    if rest is None:
        return weight
    master = torch.empty_like(weight, dtype=torch.float32)
    join(weight, rest, master)
    return master


def _store(master: Tensor, weight: Tensor, rest: Tensor | None) -> None:
    if rest is None:
        weight.copy_(master)
    else:
        split(master, weight, rest)
