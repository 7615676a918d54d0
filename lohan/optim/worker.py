"""What the optimizer lane does: the norm of a unit's gradient, and its update, chunk by chunk.

An update is the pass over master and state that compares what was read from the SSD with its checksums, and makes those of what
will be written: see `run.ssd_map`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lohan.config import Numerics
from lohan.model.shape import UnitShape
from lohan.native import Sums
from lohan.optim.base import Optimizer, Part
from lohan.optim.norm import GradientNorm, tensor_sum_of_squares
from lohan.optim.team import ALONE, Team
from lohan.schedule.ops import Kind, Op


@dataclass(frozen=True, slots=True)
class Hyper:
    """What one optimizer step is done with."""

    step: int
    """from 1"""
    lr: float
    clip: float
    """factor on the gradient"""


@dataclass(frozen=True, slots=True)
class _Segment:
    """Neighbouring tensors of a unit that are updated alike."""

    start: int
    stop: int
    decay: bool


class Expected(Protocol):
    """What the checksums of a plane have to be."""

    def compare(self, found: NDArray[np.uint64]) -> None: ...


class Checks(Protocol):
    """Checksums on their way from reads to updates, and from updates to writes."""

    def expected(self, op: Op) -> Sequence[Expected]:
        """Of every plane of state that an update works on; nothing if it was not read."""
        ...

    def left(self, op: Op, sums: Sequence[NDArray[np.uint64]]) -> None:
        """Of the weights and every plane of state that an update leaves."""
        ...


class UpdateWorker:
    """The arithmetic of one schedule. Called on the optimizer's thread."""

    def __init__(
        self,
        units: Sequence[UnitShape],
        optimizer: Optimizer,
        numerics: Numerics,
        chunk_elements: int,
        *,
        now: Hyper,
        pending: Hyper | None,
        present: Mapping[int, set[int]],
        present_pending: Mapping[int, set[int]],
        team: Team = ALONE,
        checks: Checks | None = None,
        grain_elements: int = 0,
    ) -> None:
        """`present` says which tensors of a unit have a gradient in this step; it fills as backward goes on.

        `checks`, where state comes from an SSD and goes there, wants the checksums of grains of that many elements.
        """
        self.norm = GradientNorm()
        self._units, self._optimizer, self._chunk_elements = units, optimizer, chunk_elements
        self._dtype = torch.bfloat16 if numerics.rest_bytes else torch.float32
        self._split = bool(numerics.rest_bytes)
        self._now, self._pending, self._team = now, pending, team
        self._present, self._present_pending = present, present_pending
        self._checks, self._grain_elements = checks, grain_elements

    def __call__(self, op: Op, reads: list[Tensor], writes: list[Tensor]) -> None:
        if op.kind is Kind.NORM:
            self._sum(op.unit, reads[0].view(self._dtype))
        else:
            self._update(op, reads)

    def _sum(self, unit: int, gradient: Tensor) -> None:
        for index in sorted(self._present.get(unit, ())):
            tensor = self._units[unit].tensors[index]
            self.norm.add(unit, index, tensor_sum_of_squares(gradient[tensor.offset : tensor.end], self._team))

    def _update(self, op: Op, reads: list[Tensor]) -> None:
        """In place: an update reads and writes the same ranges."""
        pending = op.unit in self._present_pending and op.writes[0].content.version == 1
        hyper = self._pending if pending else self._now
        assert hyper is not None, "a unit that is pending comes with what its step was done with"
        present = (self._present_pending if pending else self._present).get(op.unit, set())
        weight, gradient = reads[0].view(self._dtype), reads[1].view(self._dtype)
        planes = list(reads[2:])
        rest = planes.pop(0).view(torch.int16) if self._split else None
        state = [plane.view(torch.float32) for plane in planes]
        num, first = weight.numel(), op.chunk * self._chunk_elements
        parts = [
            Part(start, stop, self._optimizer.weight_decay if segment.decay else 0.0)
            for segment in _segments(self._units[op.unit], present)
            if (start := max(segment.start - first, 0)) < (stop := min(segment.stop - first, num))
        ]
        expected = [] if self._checks is None else self._checks.expected(op)
        sums = (
            None if self._checks is None else Sums.of(num, self._grain_elements, [False, *(bool(expected) for _ in reads[2:])])
        )

        def work(span: tuple[int, int]) -> None:
            start, stop = span
            self._optimizer.update(
                weight[start:stop],
                None if rest is None else rest[start:stop],
                gradient[start:stop],
                [plane[start:stop] for plane in state],
                step=hyper.step,
                lr=hyper.lr,
                clip=hyper.clip,
                parts=_within(parts, start, stop),
                sums=None if sums is None else sums.cut(start, stop),
            )

        self._team.each(work, self._team.cut(num, self._grain_elements))
        if self._checks is not None and sums is not None:
            for plane, found in zip(expected, sums.before[1:] if expected else (), strict=True):
                assert found is not None, "the sums that are compared were asked for"
                plane.compare(found)
            self._checks.left(op, sums.after)

    def _sums(self, op: Op, num: int, num_planes: int) -> tuple[Sequence[Expected], Sums | None]:
        """What the planes of state have to sum up to, and room for the sums; weights were compared when they were read."""
        if self._checks is None:
            return (), None
        expected = self._checks.expected(op)
        return expected, Sums.of(num, self._grain_elements, [False, *(bool(expected) for _ in range(num_planes))])


def _within(parts: Sequence[Part], start: int, stop: int) -> list[Part]:
    """The parts of elements [start, stop), counted from there."""
    cut = [(max(part.start, start), min(part.stop, stop), part.weight_decay) for part in parts]
    return [Part(first - start, end - start, decay) for first, end, decay in cut if first < end]


def _segments(unit: UnitShape, present: set[int]) -> list[_Segment]:
    """The tensors that are updated, joined where nothing lies between them. Updates are elementwise: joining changes no bit."""
    joined: list[_Segment] = []
    for index in sorted(present, key=lambda i: unit.tensors[i].offset):
        tensor = unit.tensors[index]
        if joined and joined[-1].stop == tensor.offset and joined[-1].decay == tensor.decay:
            joined[-1] = _Segment(joined[-1].start, tensor.end, tensor.decay)
        else:
            joined.append(_Segment(tensor.offset, tensor.end, tensor.decay))
    return joined
