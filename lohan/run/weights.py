"""A unit's weights in its modules, for as long as one operation runs; its gradients on their way to their slot.

Nothing is assigned to a Parameter's `.data`: the tensors that a module finds in `_parameters` are views of a slot, put there
on entry and replaced by the placeholder (on the meta device) on exit. So a use outside an operation fails loudly, and what
autograd saves in a backward are views of a slot that is held until that operation is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lohan.model.shape import UnitShape
from lohan.model.units import Binding


@dataclass(frozen=True, slots=True)
class UnitMemory:
    """What a compute operation finds in its reads: the weights, and what comes behind them."""

    weights: list[Tensor]
    """one view for each tensor of the unit, in its order"""
    others: list[Tensor]


def unpack(shape: UnitShape, dtype: torch.dtype, reads: Sequence[Tensor]) -> UnitMemory:
    """Typed views of a unit's tensors in the slot ranges that an operation reads."""
    ranges = list(reads)
    flat = {True: ranges.pop(0).view(dtype) if shape.trainable_elements else None}
    flat[False] = ranges.pop(0).view(dtype) if shape.frozen_elements else None
    return UnitMemory(unpack_flat(shape, flat), ranges)


def unpack_flat(shape: UnitShape, flat: dict[bool, Tensor | None]) -> list[Tensor]:
    """The tensors of a unit in its trainable (True) and frozen (False) buffers."""
    views = []
    for tensor in shape.tensors:
        buffer = flat[tensor.trainable]
        assert buffer is not None, "a unit with such a tensor has such a buffer"
        views.append(buffer[tensor.offset : tensor.end].view(tensor.shape))
    return views


@contextmanager
def bound(bindings: Sequence[tuple[Binding, Tensor]]) -> Iterator[None]:
    """The given tensors stand in their modules."""
    before = [binding.module._parameters[binding.attribute] for binding, _ in bindings]
    try:
        for binding, tensor in bindings:
            places: dict[str, Any] = binding.module._parameters
            places[binding.attribute] = tensor
        yield
    finally:
        for (binding, _), parameter in zip(bindings, before, strict=True):
            binding.module._parameters[binding.attribute] = parameter


class GradientSink:
    """Takes the gradients of one backward operation as autograd makes them: fp32 sums over the slices, rounded once.

    With one slice and nothing there yet, a gradient is its own sum. A tied unit finds the rounded gradient of its earlier visit
    in the slot, and adds to it in fp32. A tensor that gets no gradient at all stays out of `present`: it is not updated.
    """

    def __init__(
        self, shape: UnitShape, dtype: torch.dtype, slot: Tensor, sums: Tensor | None, num_slices: int, present: set[int]
    ) -> None:
        trainable = [(index, tensor) for index, tensor in enumerate(shape.tensors) if tensor.trainable]
        flat = slot.view(dtype)
        self._slot = {i: flat[t.offset : t.end].view(t.shape) for i, t in trainable}
        self._sums: dict[int, Tensor] | None = None
        if num_slices > 1:
            assert sums is not None, "several slices have a slot for their sums"
            wide = sums.view(torch.float32)
            self._sums = {i: wide[t.offset : t.end].view(t.shape) for i, t in trainable}
        self._before = present
        self._now: set[int] = set()

    def leaf(self, index: int, weight: Tensor) -> Tensor:
        """A fresh leaf for autograd whose gradient comes here."""
        leaf = weight.detach().requires_grad_()
        leaf.register_post_accumulate_grad_hook(lambda tensor: self._take(index, tensor))  # type: ignore[no-untyped-call]
        return leaf

    def _take(self, index: int, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None, "the hook runs after a gradient was accumulated"
        self.add(index, gradient)

    def add(self, index: int, gradient: Tensor, rows: slice = slice(None)) -> None:
        """Add one slice's gradient of a tensor, or of some of its rows."""
        slot = self._slot[index]
        if self._sums is not None:
            if index not in self._now:
                self._sums[index].copy_(slot) if index in self._before else self._sums[index].zero_()
            self._sums[index][rows].add_(gradient)
        elif index in self._before:
            slot[rows].copy_(slot[rows].float().add_(gradient))
        else:
            slot[rows].copy_(gradient)
        self._now.add(index)

    def finish(self) -> set[int]:
        """Round the sums into the slot. Returns the tensors that have a gradient."""
        if self._sums is not None:
            for index in sorted(self._now):
                self._slot[index].copy_(self._sums[index])
        return self._before | self._now
