"""What the optimizer lane does: the norm of a unit's gradient, and its update, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lohan.config import Numerics
from lohan.model.shape import UnitShape
from lohan.optim.base import Optimizer
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
    ) -> None:
        """`present` says which tensors of a unit have a gradient in this step; it fills as backward goes on."""
        self.norm = GradientNorm()
        self._units, self._optimizer, self._chunk_elements = units, optimizer, chunk_elements
        self._dtype = torch.bfloat16 if numerics.rest_bytes else torch.float32
        self._split = bool(numerics.rest_bytes)
        self._now, self._pending, self._team = now, pending, team
        self._present, self._present_pending = present, present_pending

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
        first = op.chunk * self._chunk_elements

        def work(part: tuple[int, int, bool]) -> None:
            start, stop, decay = part
            self._optimizer.update(
                weight[start:stop],
                None if rest is None else rest[start:stop],
                gradient[start:stop],
                [plane[start:stop] for plane in state],
                step=hyper.step,
                lr=hyper.lr,
                weight_decay=self._optimizer.weight_decay if decay else 0.0,
                clip=hyper.clip,
            )

        parts = []
        for segment in _segments(self._units[op.unit], present):
            start, stop = max(segment.start - first, 0), min(segment.stop - first, weight.numel())
            parts += [(*part, segment.decay) for part in self._team.cut(start, stop) if start < stop]
        self._team.each(work, parts)


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
