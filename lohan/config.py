"""What a run is set to, in one place. No torch.

`Numerics` fixes the bits of the result; nothing else does. `Budgets` bounds memory. Where tensors live and when they move is a
`Plan`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from lohan.errors import OptionError

_UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}


def parse_bytes(option: str, value: int | str) -> int:
    """`3GiB`, `512MiB`, `2GB` or a number of bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        num = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?I?B?)\s*", str(value).upper())
        unit = match and _UNITS.get(match[2] if match[2] in _UNITS else match[2] + "B")
        if not match or not unit:
            raise OptionError(option, value, "not a size", "Write it like 24GiB, 512MiB or a number of bytes")
        num = int(float(match[1]) * unit)
    if num <= 0:
        raise OptionError(option, value, "a size must be positive", "Write it like 24GiB, 512MiB or a number of bytes")
    return num


class DType(Enum):
    """What the device computes with. Masters and optimizer state are fp32 always."""

    BF16 = "bf16"
    FP32 = "fp32"

    @property
    def nbytes(self) -> int:
        return 2 if self is DType.BF16 else 4


class StoreMode(Enum):
    """How a run's state is kept on the SSD while it changes; the result is the same."""

    DOUBLE = "double"
    """two places for every unit, in turn: a crash costs at most the step in progress"""
    LOG = "log"
    """the same in little more than half the space: one place for every unit and a few to spare. Every update waits for the
    norm, its gradients and the norm on the SSD: the redo log"""
    SINGLE = "single"
    """one place for every unit, overwritten: a crash costs the run back to its last checkpoint"""


@dataclass(frozen=True, slots=True)
class Numerics:
    """All that the bits of the result depend on, besides model, data and optimizer. Never chosen by a planner."""

    dtype: DType = DType.BF16
    slice_rows: int = 0
    """rows of a micro-batch that run through a unit at once; 0: all of them. Each micro-batch is cut for itself"""
    loss_tile: int = 4096
    """rows of the vocabulary whose logits exist at once; 0: the model's own loss on all logits"""
    seed: int = 0
    """of dropout and all other randomness inside the model"""

    def __post_init__(self) -> None:
        if self.slice_rows < 0:
            raise OptionError("slice_rows", self.slice_rows, "it cannot be negative", "Use 0 for whole micro-batches")
        if self.loss_tile < 0 or self.loss_tile % 128:
            raise OptionError("loss_tile", self.loss_tile, "not a multiple of 128", "Use a multiple of 128, or 0 for no tiles")

    @property
    def rest_bytes(self) -> int:
        """of the part of the fp32 master that the weight does not hold"""
        return 2 if self.dtype is DType.BF16 else 0


def parse_store_mode(value: str) -> StoreMode | None:
    """`double`, `log`, `single`; None for `auto`."""
    if value == "auto":
        return None
    try:
        return StoreMode(value)
    except ValueError:
        known = ", ".join(mode.value for mode in StoreMode)
        raise OptionError("store", value, "no such way of keeping state", f"Choose one of: auto, {known}") from None


def parse_dtype(value: str) -> DType:
    """`bf16` or `fp32`."""
    try:
        return DType(value)
    except ValueError:
        known = ", ".join(d.value for d in DType)
        raise OptionError("dtype", value, "not a dtype that lohan computes with", f"Choose one of: {known}") from None


def keyed_seed(seed: int, step: int, slice_index: int, place: int) -> int:
    """A seed for one slice at one place of the model in one step: splitmix64 over the four numbers."""
    mixed = 0
    for part in (seed, step, slice_index, place):
        mixed = (mixed + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 31
    return mixed >> 1
