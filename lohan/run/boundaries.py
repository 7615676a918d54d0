"""The inputs of a site, kept in its boundary slot from its forward to its backward: all slices, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lohan.errors import ScheduleError
from lohan.model.shape import align

ALIGN_BYTES = 256


def boundary_bytes(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> int:
    """What the inputs of one slice need in the slot."""
    return sum(align(dtype.itemsize * torch.Size(shape).numel(), ALIGN_BYTES) for shape, dtype in shapes)


@dataclass(frozen=True, slots=True)
class Kept:
    """Where an input lies in the slot."""

    start: int
    stop: int
    shape: torch.Size
    dtype: torch.dtype

    def find(self, slot: Tensor) -> Tensor:
        """The input again, as a leaf that wants a gradient."""
        return slot[self.start : self.stop].view(self.dtype).view(self.shape).detach().requires_grad_()


class BoundaryWriter:
    """Fills a boundary slot during a forward operation."""

    def __init__(self, slot: Tensor | None, name: str) -> None:
        self._slot, self._name, self._end = slot, name, 0

    def keep(self, tensor: Tensor) -> Kept:
        """Copy one input to the slot."""
        nbytes = tensor.numel() * tensor.dtype.itemsize
        kept = Kept(self._end, self._end + nbytes, tensor.shape, tensor.dtype)
        self._end = align(kept.stop, ALIGN_BYTES)
        if self._slot is None:
            return kept
        if kept.stop > self._slot.numel():
            raise ScheduleError(
                f"{self._name}: its inputs are larger than the {self._slot.numel()} bytes that the plan keeps for them"
            )
        self._slot[kept.start : kept.stop].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return kept
