"""Units whose only copy is in RAM: the counterpart of `run.storage` for `placement="memory"`."""

from __future__ import annotations

import torch
from torch import Tensor

from lohan.config import Numerics
from lohan.model.shape import ModelShape
from lohan.run.memory import Memory
from lohan.run.transfer import UnitBuffers
from lohan.schedule.slots import Role, Sizes


class Ram:
    """Whole units out of what RAM keeps."""

    def __init__(self, memory: Memory, shape: ModelShape, sizes: Sizes, numerics: Numerics, chunk_elements: int) -> None:
        self._memory, self._shape, self._sizes, self._numerics = memory, shape, sizes, numerics
        self._chunk_elements = chunk_elements

    def read_unit(self, index: int) -> UnitBuffers:
        """A unit's weights and masters as they stand; there is one side only."""
        unit = self._shape.units[index]
        trainable, frozen = self._sizes.trainable_of(unit), self._sizes.frozen_of(unit)
        weights, state = self._memory.kept(Role.WEIGHTS, index), self._memory.kept(Role.STATE, index)
        assert weights is not None, "without an SSD, RAM keeps the weights of every unit"
        rest = None
        if self._numerics.rest_bytes and state is not None:
            rest = torch.empty(unit.trainable_elements * self._numerics.rest_bytes, dtype=torch.uint8)
            for in_state, in_rest in self._rests(index, state, rest):
                in_rest.copy_(in_state)
        return UnitBuffers(weights[:trainable], weights[trainable : trainable + frozen], rest)

    def _rests(self, index: int, state: Tensor, rest: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The rest of the masters, chunk by chunk: the first plane of each chunk of state, and where it is in one piece."""
        total, each, size = self._shape.units[index].trainable_elements, self._chunk_elements, self._numerics.rest_bytes
        pairs = []
        for first in range(0, total, each):
            num, base = min(each, total - first), first * self._sizes.state
            pairs.append((state[base : base + num * size], rest[first * size : (first + num) * size]))
        return pairs
