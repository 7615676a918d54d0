"""A model's weights into units, and units back into tensors: import and export, unit by unit.

    import   tensors arrive in the model's order; each is cut to the units that hold it, as weight and rest of the master
    export   a tensor is put together from its units: the fp32 master, to be rounded by whoever writes it

A unit is written as soon as its last tensor has arrived, while the next one fills other buffers. Optimizer state starts as
zeros, which is what a file that was just allocated reads as, and fresh memory too: nothing is written for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lohan import native
from lohan.config import Numerics
from lohan.errors import ModelError
from lohan.host.pool import HostPool
from lohan.model.shape import TensorShape, UnitShape
from lohan.model.units import ModelMap
from lohan.schedule.slots import Sizes


@dataclass(slots=True)
class UnitBuffers:
    """A unit as import and export see it: flat uint8 buffers."""

    trainable: Tensor | None
    frozen: Tensor | None
    rest: Tensor | None
    """of the trainable elements' masters; None in fp32, and where all of it is zero"""


WriteUnit = Callable[[int, UnitBuffers], Callable[[], None]]
"""returns at once, with a function that returns when the buffers may be used again"""
MOST_WRITING = 1
"""units on their way to the store while the next one is filled"""
ReadUnit = Callable[[int], UnitBuffers]


class Importer:
    """Takes tensors by name and hands over whole units."""

    def __init__(self, model_map: ModelMap, sizes: Sizes, numerics: Numerics, write_unit: WriteUnit) -> None:
        self._map, self._sizes, self._numerics, self._write_unit = model_map, sizes, numerics, write_unit
        self._dtype = torch.bfloat16 if numerics.rest_bytes else torch.float32
        self._places = model_map.pieces()
        self._missing = {unit.index: {t.name for t in unit.shape.tensors} for unit in model_map.units}
        self._open: dict[int, UnitBuffers] = {}
        self._writing: deque[tuple[Callable[[], None], UnitBuffers]] = deque()
        self._pools: dict[int, HostPool] = {}
        """of each buffer, by its address"""
        self._free: dict[int, list[Tensor]] = {}
        """by size: a page that was touched once is not cleared again"""

    def take(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """All tensors of the model, once each."""
        for name, tensor in tensors:
            for index, place in self._places[name]:
                rows = tensor[place.first_row : place.first_row + place.shape[0]] if tensor.ndim else tensor
                self._put(index, place, rows)
                self._missing[index].discard(name)
                if not self._missing[index]:
                    buffers = self._open.pop(index)
                    self._writing.append((self._write_unit(index, buffers), buffers))
                    self._land(MOST_WRITING)
        self._land(0)
        for pool in self._pools.values():
            pool.close()
        if left := [name for names in self._missing.values() for name in names]:
            raise ModelError(f"the source has no weights for {', '.join(sorted(left))}")

    def _land(self, most: int) -> None:
        """Wait until no more than `most` units are on their way; their buffers are free again."""
        while len(self._writing) > most:
            wait, buffers = self._writing.popleft()
            wait()
            for buffer in (buffers.trainable, buffers.frozen):
                if buffer is not None:
                    self._free.setdefault(buffer.numel(), []).append(buffer)
            if buffers.rest is not None:
                self._pools.pop(buffers.rest.data_ptr()).close()

    def _buffers(self, index: int) -> UnitBuffers:
        if index not in self._open:
            unit = self._map.units[index].shape
            trainable, frozen = self._sizes.trainable_of(unit), self._sizes.frozen_of(unit)
            buffers = UnitBuffers(self._buffer(trainable), self._buffer(frozen), None)
            _clear_gaps(unit, buffers, self._sizes.weight)
            self._open[index] = buffers
        return self._open[index]

    def _buffer(self, nbytes: int) -> Tensor | None:
        """One that is free, or a new one; what it holds is of another unit."""
        if not nbytes:
            return None
        if free := self._free.get(nbytes):
            return free.pop()
        for others in self._free.values():  # of another size: their pages go back before new ones are taken
            while others:
                self._pools.pop(others.pop().data_ptr()).close()
        return self._fresh(nbytes)

    def _fresh(self, nbytes: int) -> Tensor:
        """Zeros."""
        pool = HostPool(nbytes)
        pool.reserve(nbytes)
        buffer = pool.allocate(nbytes, "a unit on its way")
        self._pools[buffer.data_ptr()] = pool
        return buffer

    def _put(self, index: int, place: TensorShape, rows: Tensor) -> None:
        flat, buffers = rows.detach().reshape(-1), self._buffers(index)
        span = slice(place.offset, place.end)
        if not place.trainable:
            assert buffers.frozen is not None
            buffers.frozen.view(self._dtype)[span].copy_(flat)
            return
        assert buffers.trainable is not None
        weight = buffers.trainable.view(self._dtype)[span]
        if not self._numerics.rest_bytes or flat.dtype == torch.bfloat16:
            weight.copy_(flat)
            return
        if buffers.rest is None:
            buffers.rest = self._fresh(self._map.units[index].shape.trainable_elements * self._numerics.rest_bytes)
        native.split(flat.float(), weight, buffers.rest.view(torch.int16)[span])


def _clear_gaps(unit: UnitShape, buffers: UnitBuffers, itemsize: int) -> None:
    """What lies between tensors and behind them."""
    for buffer, trainable in ((buffers.trainable, True), (buffers.frozen, False)):
        if buffer is not None:
            end = 0
            for tensor in sorted((t for t in unit.tensors if t.trainable == trainable), key=lambda t: t.offset):
                buffer[end * itemsize : tensor.offset * itemsize].zero_()
                end = tensor.end
            buffer[end * itemsize :].zero_()


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
