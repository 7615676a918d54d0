"""Threads that do the optimizer's arithmetic together, where computing leaves cores free.

Updates are elementwise and sums of squares are made of blocks, so that who does which part changes no bit. The kernels let go
of the GIL: the parts run side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from lohan.host.threads import Crew

Part = TypeVar("Part")
Result = TypeVar("Result")

PART_ELEMENTS = 2**18
"""of an update that one call of a kernel works on: 0.3 ms of one core, far above what a call costs"""


class Team:
    """`num` threads; one is the caller's own."""

    def __init__(self, num: int) -> None:
        self._crew = Crew("lohan optimizer", num) if num > 1 else None

    def each(self, work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """`work` done on every part; the results in the order of the parts."""
        if self._crew is None or len(parts) < 2:
            return [work(part) for part in parts]
        return self._crew.each(work, parts)

    def cut(self, num: int, grain_elements: int = 0) -> list[tuple[int, int]]:
        """A range of elements in parts for everybody, whole grains each."""
        if self._crew is None:
            return [(0, num)]
        each = max(PART_ELEMENTS, grain_elements)
        return [(first, min(first + each, num)) for first in range(0, num, each)]

    def close(self) -> None:
        if self._crew is not None:
            self._crew.close()


ALONE = Team(1)
"""the caller, and nobody else"""
