"""Which examples share a row.

    shapes     the lengths that make up each row: best fit, longest first, of all lengths that there are. Once for a dataset
    members    which example takes which place of its length, and the order of rows: shuffled, once an epoch

So all epochs have equally many rows, and steps can be counted and found without going through the epochs before. Examples of
equal length are alike to the first part, which therefore takes time by the number of different lengths.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lohan.data.order import Order, shuffled

Shape = tuple[int, ...]
"""lengths in a row, the longest first"""


@dataclass(frozen=True, slots=True)
class Members:
    """The examples of each row of an epoch, in the order of rows."""

    examples: Order
    starts: Order
    ends: Order

    def __getitem__(self, row: int) -> list[int]:
        members: list[int] = self.examples[self.starts[row] : self.ends[row]].tolist()
        return members


class Packing:
    """The rows of every epoch."""

    def __init__(self, lengths: NDArray[np.int64], capacity: int) -> None:
        self._lengths = lengths
        shapes = pack(
            {int(length): int(num) for length, num in zip(*np.unique(lengths, return_counts=True), strict=True)}, capacity
        )
        num_places = np.concatenate([np.full(num, len(shape)) for shape, num in shapes.items()])
        self._ends = np.cumsum(num_places)
        self._starts = self._ends - num_places
        places = np.concatenate([np.tile(np.array(shape), num) for shape, num in shapes.items()])
        self._places_by_length = np.argsort(places, kind="stable")

    def __len__(self) -> int:
        return len(self._starts)

    def epoch(self, *seeds: int) -> Members:
        """The examples of each row."""
        order = shuffled(len(self._lengths), *seeds, 0)
        examples = np.empty_like(order)
        examples[self._places_by_length] = order[np.argsort(self._lengths[order], kind="stable")]
        rows = shuffled(len(self), *seeds, 1)
        return Members(examples, self._starts[rows], self._ends[rows])


def pack(num_of_length: dict[int, int], capacity: int) -> dict[Shape, int]:
    """How many rows there are of each shape: best fit, the longest first, no row above capacity."""
    shapes: dict[int, dict[Shape, int]] = defaultdict(dict)  # by the space that is left
    spaces: list[int] = []
    empty: Shape = ()
    for length in sorted(num_of_length, reverse=True):
        left = num_of_length[length]
        while left:
            at = bisect_left(spaces, length)
            if at == len(spaces):
                space, shape, num = capacity, empty, left  # as many empty rows as wanted
            else:
                space = spaces[at]
                shape, num = shapes[space].popitem()
                if not shapes[space]:
                    del spaces[at]
            # The fullest row that has room takes all it can, and so do all rows of its shape.
            each = min(space // length, left)
            num_filled = min(num, left // each)
            left -= num_filled * each
            if shape and num > num_filled:
                _keep(shapes, spaces, space, shape, num - num_filled)
            _keep(shapes, spaces, space - each * length, shape + (length,) * each, num_filled)
    return {shape: num for group in shapes.values() for shape, num in group.items()}


def _keep(shapes: dict[int, dict[Shape, int]], spaces: list[int], space: int, shape: Shape, num: int) -> None:
    if not shapes[space]:
        insort(spaces, space)
    shapes[space][shape] = shapes[space].get(shape, 0) + num
