"""Units back into tensors, for export: the fp32 master of a tensor is put together from its units, and rounded by whoever
writes it. The way in is `run.importer`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lohan import native
from lohan.config import Numerics
from lohan.model.shape import TensorShape, UnitShape
from lohan.model.units import ModelMap
from lohan.schedule.slots import Sizes


@dataclass(slots=True)
class UnitBuffers:
    """A unit as export sees it: flat uint8 buffers."""

    trainable: Tensor | None
    frozen: Tensor | None
    rest: Tensor | None
    """of the trainable elements' masters; None in fp32"""


ReadUnit = Callable[[int], UnitBuffers]


class Exporter:
    """Puts tensors together from their units; keeps the last unit that it read."""

    def __init__(self, model_map: ModelMap, numerics: Numerics, read_unit: ReadUnit) -> None:
        self._map, self._read_unit = model_map, read_unit
        self._dtype = torch.bfloat16 if numerics.rest_bytes else torch.float32
        self._places = model_map.pieces()
        self._last: tuple[int, UnitBuffers] | None = None

    def tensor(self, name: str) -> Tensor:
        """The fp32 master of a trainable parameter; the weight of a frozen one."""
        places = self._places[self._map.aliases.get(name, name)]
        shape = places[0][1].shape
        trainable = places[0][1].trainable
        num_rows = sum(place.shape[0] for _, place in places) if shape else 0
        whole = torch.empty((num_rows, *shape[1:]) if shape else (), dtype=torch.float32 if trainable else self._dtype)
        for index, place in places:
            self._fill(index, place, whole[place.first_row : place.first_row + place.shape[0]] if shape else whole)
        return whole

    def _fill(self, index: int, place: TensorShape, rows: Tensor) -> None:
        if self._last is None or self._last[0] != index:
            self._last = None  # its memory, before the next unit takes as much
            self._last = (index, self._read_unit(index))
        unit, span = self._last[1], slice(place.offset, place.end)
        buffer = unit.trainable if place.trainable else unit.frozen
        assert buffer is not None
        weight = buffer.view(self._dtype)[span]
        if not place.trainable or unit.rest is None:
            rows.copy_(weight.view(place.shape))
        else:
            native.join(weight, unit.rest.view(torch.int16)[span], rows.view(-1))


def rest_range(unit: UnitShape, sizes: Sizes, numerics: Numerics) -> tuple[int, int]:
    """Where the rest of the masters lies in the unit's place on the SSD."""
    start = sizes.trainable_of(unit)
    return start, start + unit.trainable_elements * numerics.rest_bytes
