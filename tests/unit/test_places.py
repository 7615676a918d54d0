"""Where units go: never to where a commit that a crash may come back to has another one."""

from __future__ import annotations

import random

import pytest

from lohan.config import StoreMode
from lohan.errors import ScheduleError
from lohan.keep.manifest import Layout, UnitSize
from lohan.run.places import NOWHERE, SPARE_PLACES, UnitLayout

SIZES = [8192, 4096, 4096, 0, 4096, 4096, 4096, 4096, 8192]
LAYOUT = Layout(2, (2, 4, 4), tuple(UnitSize(f"unit {i}", size, 4096 * (i == 3)) for i, size in enumerate(SIZES)))
TRAINED = [unit for unit, size in enumerate(SIZES) if size]


@pytest.mark.parametrize("mode", StoreMode)
def test_extents_do_not_overlap_and_fill_the_store(mode: StoreMode) -> None:
    layout = UnitLayout(mode, LAYOUT)
    end = 0
    for extent in sorted(layout.extents, key=lambda extent: extent.address):
        assert extent.address == end
        end += extent.nbytes
    assert end == layout.nbytes == layout.contents.nbytes
    params = sum(SIZES)
    spare = {StoreMode.DOUBLE: params, StoreMode.LOG: SPARE_PLACES * 4096 + 2 * 8192, StoreMode.SINGLE: 4096 + 8192}[mode]
    assert layout.nbytes == 12 * (params + spare) + 2 * params + 2 * 4096


@pytest.mark.parametrize("mode", StoreMode)
def test_no_two_units_share_a_place_and_none_goes_where_one_is_that_has_not_left(mode: StoreMode) -> None:
    places, choices = UnitLayout(mode, LAYOUT).places, random.Random(1)
    for _ in range(50):
        order = choices.sample(TRAINED, choices.randint(0, len(TRAINED)))
        targets, at = places.next_of(order), list(places.now)
        for unit in order:
            others = {place for other, place in enumerate(at) if other != unit}
            assert targets[unit] not in others
            assert (targets[unit] == at[unit]) == (mode is StoreMode.SINGLE)
            at[unit] = targets[unit]
        aside = places.aside(order)
        assert not set(aside.values()) & set(places.now)
        for unit in order:
            places.move(unit, targets[unit])
        again = UnitLayout(mode, LAYOUT).places
        again.restore(places.now)
        assert again.now == places.now and places.now[3] == NOWHERE


@pytest.mark.parametrize("mode", StoreMode)
@pytest.mark.parametrize("change", ["two in one", "elsewhere", "of another size", "somewhere for nothing", "too few"])
def test_places_that_no_run_has_are_refused(mode: StoreMode, change: str) -> None:
    places = UnitLayout(mode, LAYOUT).places
    changed = list(places.now)
    match change:
        case "two in one":
            changed[1] = changed[2]
        case "elsewhere":
            changed[1] = 1000
        case "of another size":
            changed[1], changed[0] = changed[0], changed[1]
        case "somewhere for nothing":
            changed[3] = len(places.addresses) - 1
        case _:
            changed.pop()
    with pytest.raises(ScheduleError, match="no run of this model has"):
        places.restore(changed)
