"""An optimizer's update of some arrays, and the checksums of what it finds and leaves, in one pass over memory.

A pass of its own for checksums costs as much as the update itself: both are as fast as memory. So the kernel sums tiles of the
arrays that the update has just brought into the cache. Its checksums are those of `xxhash.xxh3_64` over each grain.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lohan.errors import NativeError
from lohan.native.arrays import address_of
from lohan.native.library import kernel

TILE = 512
"""elements that are summed and updated at a time"""
MAX_STATE = 2
"""planes of state that an update may have"""

Scalars = ctypes.Structure
Ranges = Sequence[tuple[int, int, Scalars]]
"""first element, end, and what is done to them; in order, without overlap"""


@dataclass(frozen=True, slots=True)
class Sums:
    """Checksums of an update's arrays (weight, rest if there is one, state), grain by grain. The update fills them in."""

    grain_elements: int
    before: tuple[NDArray[np.uint64] | None, ...]
    """of each array as it was found; None where nobody wants to know"""
    after: tuple[NDArray[np.uint64], ...]

    @staticmethod
    def of(num_elements: int, grain_elements: int, wanted_before: Sequence[bool]) -> Sums:
        """Room for the sums of as many arrays as `wanted_before` has entries."""
        num = -(-num_elements // grain_elements)
        before = tuple(np.zeros(num, np.uint64) if wanted else None for wanted in wanted_before)
        return Sums(grain_elements, before, tuple(np.zeros(num, np.uint64) for _ in wanted_before))

    def cut(self, start: int, stop: int) -> Sums:
        """The sums of elements [start, stop), which begins with a grain: the same memory."""
        if start % self.grain_elements:
            raise ValueError(f"element {start} begins no grain of {self.grain_elements}")
        grains = slice(start // self.grain_elements, -(-stop // self.grain_elements))
        before = tuple(None if sums is None else sums[grains] for sums in self.before)
        return Sums(self.grain_elements, before, tuple(sums[grains] for sums in self.after))


class _Arrays(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("gradient", ctypes.c_void_p),
        ("state", ctypes.c_void_p * MAX_STATE),
    ]


class _Part(ctypes.Structure):
    _fields_ = [("start", ctypes.c_size_t), ("stop", ctypes.c_size_t), ("scalars", ctypes.c_void_p)]


class _Plane(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("element_bytes", ctypes.c_size_t),
        ("before", ctypes.c_void_p),
        ("after", ctypes.c_void_p),
    ]


class _Checked(ctypes.Structure):
    _fields_ = [
        ("num", ctypes.c_size_t),
        ("grain", ctypes.c_size_t),
        ("num_planes", ctypes.c_size_t),
        ("planes", ctypes.POINTER(_Plane)),
    ]


def update(
    rule: str, weight: Tensor, rest: Tensor | None, grad: Tensor, state: Sequence[Tensor], ranges: Ranges, sums: Sums | None
) -> None:
    """Update ranges of a split master (bf16 weight, int16 rest) or of an fp32 weight (rest None), in place."""
    num, dtype = weight.numel(), torch.float32 if rest is None else torch.bfloat16
    arrays = _Arrays(
        address_of("weight", weight, dtype, num),
        None if rest is None else address_of("rest", rest, torch.int16, num),
        address_of("grad", grad, dtype, num),
        (ctypes.c_void_p * MAX_STATE)(*(address_of("state", plane, torch.float32, num) for plane in state)),
    )
    if any(not 0 <= start <= stop <= num for start, stop, _ in ranges):
        raise NativeError(f"ranges {[(start, stop) for start, stop, _ in ranges]} of arrays of {num} elements")
    function = kernel(f"{rule}_{'plain' if rest is None else 'split'}")
    if sums is None:
        for start, stop, scalars in ranges:
            function(ctypes.byref(arrays), ctypes.byref(scalars), ctypes.c_size_t(start), ctypes.c_size_t(stop - start))
        return
    if num % TILE or sums.grain_elements % TILE:
        raise NativeError(f"{num} elements in grains of {sums.grain_elements} are not whole tiles of {TILE}")
    planes = [weight, *([] if rest is None else [rest]), *state]
    checked = _checked(planes, sums, num)
    parts = (_Part * len(ranges))(*(_Part(start, stop, ctypes.addressof(scalars)) for start, stop, scalars in ranges))
    kernel("update_checked")(function, ctypes.byref(arrays), parts, ctypes.c_size_t(len(ranges)), ctypes.byref(checked))


def _checked(planes: Sequence[Tensor], sums: Sums, num: int) -> _Checked:
    num_grains = -(-num // sums.grain_elements)
    if not all(len(one) == num_grains for one in (*sums.after, *(one for one in sums.before if one is not None))):
        raise NativeError(f"there is no room for the checksums of {num_grains} grains")
    entries = [
        _Plane(plane.data_ptr(), plane.element_size(), None if before is None else before.ctypes.data, after.ctypes.data)
        for plane, before, after in zip(planes, sums.before, sums.after, strict=True)
    ]
    return _Checked(num, sums.grain_elements, len(planes), (_Plane * len(planes))(*entries))
