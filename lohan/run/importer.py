"""A model's weights into a run, piece by piece: read, converted, checked, written. A few lanes do the same side by side.

    fill    every tensor of the unit that lies in the piece is read to its place there. Where it is not stored as the run has
            it, it becomes the weight, and the rest of its master, on the way
    write   checksums are made as the piece is handed over, and the lane waits until it is written

A piece is small: it stays in the processor's cache from one of these to the next, and memory does not grow with the model.
While one lane computes, the others keep the drive busy. The optimizer's state starts as zeros, and so do the rests of masters
that are stored in 16 bits; a file that was just allocated reads as zeros, and fresh memory too: nothing is written for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from queue import SimpleQueue

import torch
from torch import Tensor

from lohan import native
from lohan.config import Numerics
from lohan.errors import ModelError
from lohan.host.pool import HostPool
from lohan.host.threads import Crew, Job
from lohan.keep.manifest import PIECE_ELEMENTS, Layout, Piece
from lohan.keep.planes import RunState
from lohan.model.file_reader import pages
from lohan.model.shape import UnitShape
from lohan.model.weights_in import TensorSource

NUM_LANES = 3
MOST_FLYING = 2 * NUM_LANES
"""pieces that are handed to lanes, so that none waits for the next one; after an error they are still moved"""
FROZEN, WEIGHTS, REST = -1, 0, 1
"""planes of a unit"""
WIDEST_BYTES = 8
"""of an element of a file"""
Progress = Callable[[str, int, int | None], None]


def import_weights(
    source: TensorSource, units: Sequence[UnitShape], layout: Layout, numerics: Numerics, run: RunState, progress: Progress
) -> None:
    """All weights of a source into a run that has not begun."""
    if missing := {tensor.name for unit in units for tensor in unit.tensors} - source.dtypes.keys():
        raise ModelError(f"the source has no weights for {', '.join(sorted(missing))}")
    pieces = [piece for piece in layout.pieces() if piece.plane in (FROZEN, WEIGHTS)]
    lanes: SimpleQueue[_Lane] = SimpleQueue()

    def move(piece: Piece) -> None:
        lane = lanes.get()
        try:
            lane.move(units[piece.unit], piece)
        finally:
            lanes.put(lane)

    with ExitStack() as stack:
        for _ in range(NUM_LANES):
            lanes.put(stack.enter_context(closing(_Lane(source, layout, numerics, run))))
        crew = stack.enter_context(closing(Crew("lohan import", NUM_LANES)))
        flying: deque[Job[None]] = deque()
        for piece in pieces:
            if len(flying) == MOST_FLYING:
                flying.popleft().wait()
            progress("import weights", piece.unit, len(units))
            flying.append(crew.submit(partial(move, piece)))
        for job in flying:
            job.wait()
    progress("import weights", len(units), len(units))


class _Lane:
    """The memory of one lane."""

    def __init__(self, source: TensorSource, layout: Layout, numerics: Numerics, run: RunState) -> None:
        self._dtypes, self._run, self._rest_bytes = source.dtypes, run, numerics.rest_bytes
        self._dtype = torch.bfloat16 if numerics.rest_bytes else torch.float32
        weight_bytes, rest_bytes = (PIECE_ELEMENTS * each for each in (layout.weight_bytes, numerics.rest_bytes))
        self._pool = HostPool(weight_bytes + rest_bytes)
        self._pool.reserve(weight_bytes + rest_bytes)
        self._weight = self._pool.allocate(weight_bytes, "weights on their way")
        self._rest = self._pool.allocate(rest_bytes, "the rests of their masters")
        self._stored = pages(PIECE_ELEMENTS * WIDEST_BYTES)  # costs what is touched
        self._reader = source.open_reader()

    def close(self) -> None:
        self._reader.close()
        self._pool.close()

    def move(self, unit: UnitShape, piece: Piece) -> None:
        """From the source to the run."""
        planes = [piece, replace(piece, plane=REST, element_bytes=self._rest_bytes)]
        buffers = [buffer[: plane.nbytes] for buffer, plane in zip((self._weight, self._rest), planes, strict=True)]
        has_rest = self._fill(unit, piece, buffers[0].view(self._dtype), buffers[1].view(torch.int16))
        written = list(zip(planes, buffers, strict=True))[: 2 if has_rest else 1]
        for arrival in [self._run.submit_write(plane, buffer) for plane, buffer in written]:
            arrival.wait()

    def _fill(self, unit: UnitShape, piece: Piece, weight: Tensor, rest: Tensor) -> bool:
        """Bring all of a piece, zeros between tensors and behind them; whether there are rests that are not zero."""
        has_rest, end = False, 0
        for tensor in unit.tensors:
            start, stop = max(tensor.offset - piece.first, 0), min(tensor.end - piece.first, piece.num)
            if start >= stop or tensor.trainable != (piece.plane == WEIGHTS):
                continue
            weight[end:start].zero_()
            end, first = stop, tensor.first_element + piece.first + start - tensor.offset
            if self._dtypes[tensor.name] == self._dtype:
                self._reader.read(tensor.name, first, weight[start:stop])
                continue
            value = self._stored.view(self._dtypes[tensor.name])[: stop - start]
            self._reader.read(tensor.name, first, value)
            if not (tensor.trainable and self._rest_bytes):
                weight[start:stop].copy_(value)
                continue
            if not has_rest:
                rest.zero_()
            native.split(value.float(), weight[start:stop], rest[start:stop])
            has_rest = True
        weight[end:].zero_()
        return has_rest
