"""A pairwise cover of a product of settings: few combinations, in which any two values of any two settings meet."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

CANDIDATES = 20
"""combinations that are tried for each that is taken"""

Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(settings: Mapping[str, Any]) -> set[Pair]:
    """All pairs of values in one combination."""
    return set(combinations(sorted(settings.items(), key=lambda item: item[0]), 2))


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Greedy: each combination begins with a pair that is missing and covers as many others as it can. Always the same list."""
    chance = random.Random(0)
    missing = {
        ((one, value), (other, another))
        for one, other in combinations(sorted(factors), 2)
        for value in factors[one]
        for another in factors[other]
    }
    cover = []
    while missing:
        seed = min(missing, key=repr)
        candidates = [_grow(dict(seed), factors, missing, chance) for _ in range(CANDIDATES)]
        best = max(candidates, key=lambda candidate: len(pairs_of(candidate) & missing))
        missing -= pairs_of(best)
        cover.append({name: best[name] for name in factors})
    return cover


def _grow(
    settings: dict[str, Any], factors: Mapping[str, Sequence[Any]], missing: set[Pair], chance: random.Random
) -> dict[str, Any]:
    """The other settings in a random order, each with the value that covers the most missing pairs."""
    names = [name for name in factors if name not in settings]
    chance.shuffle(names)
    for name in names:
        values = list(factors[name])
        chance.shuffle(values)
        settings[name] = max(values, key=lambda value: len(pairs_of({**settings, name: value}) & missing))
    return settings
