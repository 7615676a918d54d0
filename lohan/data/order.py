"""Orders that come from a seed and nothing else: the same on every machine, with every version of every library, for ever.

A run that continues asks for the order again instead of having kept it, so it must not hang on a generator that others change.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Order = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1


def shuffled(num: int, *seeds: int) -> Order:
    """The numbers below `num`, sorted by a hash of each and of the seeds."""
    start = 0
    for seed in seeds:
        start = int(_mixed(np.array([((start + _GOLDEN) ^ seed) & _MASK], np.uint64))[0])
    with np.errstate(over="ignore"):
        keys = _mixed(np.arange(num, dtype=np.uint64) * np.uint64(_GOLDEN) + np.uint64(start))
    return np.argsort(keys, kind="stable")


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The end of SplitMix64, which no two values leave equal."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def grouped(order: Order, lengths: NDArray[np.int64], num_together: int, num_pool: int, *seeds: int) -> Order:
    """Runs of `num_together` of similar length: sorted within pools of the given order; the runs are then shuffled.

    What does not fill a run stays at the end.
    """
    pools = [order[at : at + num_pool] for at in range(0, len(order), num_pool)]
    by_length = np.concatenate([pool[np.argsort(lengths[pool], kind="stable")] for pool in pools])
    num_full = len(order) // num_together
    runs = by_length[: num_full * num_together].reshape(num_full, num_together)
    return np.concatenate([runs[shuffled(num_full, *seeds)].ravel(), by_length[num_full * num_together :]])
