"""Inputs that are almost right: valid ones, damaged at random, as bytes or, below a checksum that fits again, as values.

Random bytes are refused by the first check of any parser. What is behind it is reached by inputs that differ from valid ones in
a few places. The same seed gives the same inputs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

STRANGE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.5, -0.0, float("nan"), float("inf"),
    "", "0", "01", "\0", "é", "\ud800", "../x", "a" * 5000, [], {}, [[]], [None], {"": {}}, {"a": [1, {"b": []}]},
)  # fmt: skip
"""values that a parser may not have thought of"""
_INTEGERS = (b"\x00" * 4, b"\xff" * 4, b"\xff\xff\xff\x7f", b"\x00" * 8, b"\xff" * 8, b"\x00\x00\x00\x01")


class Mutator:
    """Makes damaged inputs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def bytes(self, seeds: Sequence[bytes]) -> bytes:
        """One of the seeds, with one to four changes."""
        data = bytearray(self._random.choice(seeds))
        for _ in range(self._random.randint(1, 4)):
            self._random.choice(self._changes)(self, data, seeds)
        return bytes(data)

    def value(self, seed: Any) -> Any:
        """What JSON can hold, with one to three of its parts changed, dropped, doubled or moved."""
        whole = [deepcopy(seed)]
        for _ in range(self._random.randint(1, 3)):
            holder, key = self._part(whole)
            choice = self._random.random()
            if choice < 0.6:
                holder[key] = deepcopy(self._random.choice(STRANGE))
            elif choice < 0.75 and holder is not whole:
                del holder[key]
            elif choice < 0.9:
                other, there = self._part(whole)
                holder[key] = deepcopy(other[there])
            elif isinstance(holder, list):
                holder.insert(key, deepcopy(holder[key]))
            else:
                holder[self._random.choice(("", "new", "step"))] = deepcopy(holder[key])
        return whole[0]

    def _part(self, whole: list[Any]) -> tuple[Any, Any]:
        """Somewhere in a value: what holds it, and under which key."""
        holder: Any = whole
        while True:
            keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
            key = self._random.choice(keys)
            inner = holder[key]
            if not isinstance(inner, list | dict) or not inner or self._random.random() < 0.3:
                return holder, key
            holder = inner

    def _place(self, data: bytearray) -> int:
        return self._random.randrange(len(data) + 1)

    def _flip(self, data: bytearray, seeds: Sequence[bytes]) -> None:
        if data:
            data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def _overwrite(self, data: bytearray, seeds: Sequence[bytes]) -> None:
        start = self._place(data)
        data[start : start + 8] = self._random.choice(_INTEGERS)

    def _cut(self, data: bytearray, seeds: Sequence[bytes]) -> None:
        del data[self._place(data) :]

    def _drop(self, data: bytearray, seeds: Sequence[bytes]) -> None:
        start = self._place(data)
        del data[start : start + self._random.randrange(64)]

    def _repeat(self, data: bytearray, seeds: Sequence[bytes]) -> None:
        start = self._place(data)
        data[start:start] = data[start : start + self._random.randrange(64)]

    def _splice(self, data: bytearray, seeds: Sequence[bytes]) -> None:
        other, start = self._random.choice(seeds), self._place(data)
        data[start:] = other[start:]

    def _noise(self, data: bytearray, seeds: Sequence[bytes]) -> None:
        start = self._place(data)
        data[start : start + 16] = self._random.randbytes(self._random.randrange(32))

    _changes: Sequence[Callable[[Mutator, bytearray, Sequence[bytes]], None]] = (
        _flip, _flip, _overwrite, _cut, _drop, _repeat, _splice, _noise,
    )  # fmt: skip
