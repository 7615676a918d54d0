"""Orders have everything once and are the same for ever, and so have packed rows, which hold little air."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.data.order import grouped, shuffled
from lohan.data.packing import Packing, pack

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=60)


def test_an_order_is_the_same_for_ever() -> None:
    """A run that continues with another version of anything needs the order that it began with."""
    assert shuffled(10, 0, 0).tolist() == [1, 8, 9, 3, 6, 5, 0, 7, 4, 2]
    assert shuffled(10, 42, 1, 0).tolist() == [8, 5, 1, 2, 0, 3, 4, 6, 9, 7]


@given(num=st.integers(0, 300), seeds=st.lists(st.integers(-(2**63), 2**63), min_size=1, max_size=3))
def test_an_order_has_everything_once(num: int, seeds: list[int]) -> None:
    assert sorted(shuffled(num, *seeds)) == list(range(num))


def test_seed_and_epoch_each_change_the_order() -> None:
    orders = {tuple(shuffled(50, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25
    assert tuple(shuffled(50, 1, 0)) != tuple(shuffled(50, 0, 1))


def test_an_order_is_even() -> None:
    """Where a number comes to stand says nothing about it: the mean place of each, over many seeds, is the middle."""
    places = np.mean([np.argsort(shuffled(20, seed)) for seed in range(2000)], axis=0)
    assert np.abs(places - 9.5).max() < 5 * np.sqrt((20**2 - 1) / 12 / 2000)


@given(lengths=LENGTHS, together=st.integers(1, 7), pool=st.integers(1, 40))
def test_grouping_keeps_everything(lengths: list[int], together: int, pool: int) -> None:
    order = grouped(shuffled(len(lengths), 1), np.array(lengths), together, pool * together, 1)
    assert sorted(order) == list(range(len(lengths)))


def test_grouped_runs_are_of_similar_length_and_in_no_order() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 800)
    runs = lengths[grouped(shuffled(800, 1), lengths, 4, 200, 1)].reshape(-1, 4)
    spread = np.ptp(runs, axis=1).mean()
    assert spread < np.ptp(lengths[shuffled(800, 1)].reshape(-1, 4), axis=1).mean() / 10
    assert abs(np.corrcoef(np.arange(200), runs.mean(axis=1))[0, 1]) < 0.2


# ---------------------------------------------------------------- packing


def best_fit(lengths: list[int], capacity: int) -> Counter[tuple[int, ...]]:
    """One after the other, the longest first, each into the fullest row that has room."""
    rows: list[list[int]] = []
    for length in sorted(lengths, reverse=True):
        row = max((row for row in rows if sum(row) + length <= capacity), key=sum, default=None)
        if row is None:
            rows.append(row := [])
        row.append(length)
    return Counter(tuple(row) for row in rows)


@given(lengths=LENGTHS)
def test_rows_are_as_many_as_of_best_fit(lengths: list[int]) -> None:
    """Rows that are equally full can be taken in any order, so shapes may differ, but not how many rows are how full."""
    shapes = pack(dict(Counter(lengths)), 20)
    assert all(sum(shape) <= 20 for shape in shapes)
    assert Counter(length for shape, num in shapes.items() for length in shape * num) == Counter(lengths)
    assert sum(shapes.values()) <= best_fit(lengths, 20).total()


@given(lengths=LENGTHS, epoch=st.integers(0, 3))
def test_packed_rows_hold_everything_once(lengths: list[int], epoch: int) -> None:
    packing = Packing(np.array(lengths), 20)
    members = packing.epoch(7, epoch)
    rows = [members[row] for row in range(len(packing))]
    assert sorted(one for row in rows for one in row) == list(range(len(lengths)))
    assert all(sum(lengths[one] for one in row) <= 20 for row in rows)


def test_packed_rows_differ_by_epoch() -> None:
    packing = Packing(np.random.default_rng(0).integers(1, 20, 300), 20)

    def rows(epoch: int) -> set[frozenset[int]]:
        members = packing.epoch(0, epoch)
        return {frozenset(members[row]) for row in range(len(packing))}

    assert rows(0) == rows(0)
    assert len(rows(0) & rows(1)) < len(packing) / 4


def test_packing_takes_time_by_lengths_not_by_examples() -> None:
    """A hundred million examples are packed by counting them."""
    shapes = pack(dict.fromkeys(range(1, 1025), 100_000), 1024)
    assert sum(num * sum(shape) for shape, num in shapes.items()) == 100_000 * 1024 * 1025 // 2
    assert len(shapes) < 5000


@pytest.mark.parametrize("capacity", [20, 50])
def test_there_is_little_air(capacity: int) -> None:
    lengths = np.random.default_rng(1).integers(1, 20, 2000)
    assert lengths.sum() / (len(Packing(lengths, capacity)) * capacity) > 0.99
