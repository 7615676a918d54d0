"""A run's planes by pieces of a checkpoint: where each lies in the store, or in what RAM keeps.

In the store a unit's place has its planes one behind the other. In RAM the weights of a unit are one buffer, trainable ones
first, and its state is cut into chunks, each with its part of every plane.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lohan.keep.manifest import Layout, Piece
from lohan.run.memory import Memory
from lohan.run.storage import Storage
from lohan.schedule.slots import Role
from lohan.ssd.base import Ticket


class StoreState:
    """Of a run whose state is on the SSD; nothing is pending, nothing runs."""

    def __init__(self, storage: Storage, layout: Layout) -> None:
        self._storage, self._layout = storage, layout

    def submit_read(self, piece: Piece, into: Tensor) -> Ticket:
        return self._storage.units.submit_read([(self._address(piece), into)])

    def submit_write(self, piece: Piece, data: Tensor) -> Ticket:
        return self._storage.units.submit_write([(self._address(piece), data)])

    def _address(self, piece: Piece) -> int:
        if piece.plane < 0:
            address, start = self._storage.fixed[Role.FROZEN, piece.unit].address, 0
        else:
            address = self._storage.places.addresses[self._storage.places.now[piece.unit]]
            before = (self._layout.weight_bytes, *self._layout.state_bytes)[: piece.plane]
            start = self._layout.units[piece.unit].trainable * sum(before)
        return address + start + piece.first * piece.element_bytes


class MemoryState:
    """Of a run whose only copy is in RAM."""

    def __init__(self, memory: Memory, layout: Layout, chunk_elements: int) -> None:
        self._memory, self._layout, self._chunk_elements = memory, layout, chunk_elements

    def submit_read(self, piece: Piece, into: Tensor) -> _AtOnce:
        for in_memory, in_piece in self._parts(piece, into):
            in_piece.copy_(in_memory)
        return _AtOnce()

    def submit_write(self, piece: Piece, data: Tensor) -> _AtOnce:
        for in_memory, in_piece in self._parts(piece, data):
            in_memory.copy_(in_piece)
        return _AtOnce()

    def _parts(self, piece: Piece, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What RAM keeps of a piece, with its part of the buffer: one for each chunk of state that the piece has a share of."""
        unit, size = self._layout.units[piece.unit], piece.element_bytes
        kept = self._memory.kept(Role.WEIGHTS if piece.plane < 1 else Role.STATE, piece.unit)
        assert kept is not None, "without an SSD, RAM keeps the weights and the state of every unit"
        if piece.plane < 1:
            start = ((unit.trainable if piece.plane < 0 else 0) + piece.first) * size
            yield kept[start : start + piece.nbytes], buffer
            return
        planes = self._layout.state_bytes
        first, end = piece.first, piece.first + piece.num
        while first < end:
            chunk = first - first % self._chunk_elements
            of_chunk = min(self._chunk_elements, unit.trainable - chunk)
            num = min(end, chunk + of_chunk) - first
            start = chunk * sum(planes) + of_chunk * sum(planes[: piece.plane - 1]) + (first - chunk) * size
            done = (first - piece.first) * size
            yield kept[start : start + num * size], buffer[done : done + num * size]
            first += num


class _AtOnce:
    """A piece that is there already."""

    def wait(self) -> None:
        """Nothing to wait for."""
