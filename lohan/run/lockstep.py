"""Runs the model's forward for all slices of a batch in step, so that every unit is entered once for all of them.

Each slice runs the unmodified forward in a greenlet of its own. Where it reaches a site it stops, with the arguments of the
call; when all slices stand before the same site, the site runs for all of them and each goes on with its own result. So
slices may differ in length, and nothing is padded or concatenated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from greenlet import getcurrent, greenlet

from lohan.errors import ScheduleError


@dataclass(frozen=True, slots=True)
class Arrival:
    """A slice that stands before a site."""

    site: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    collects: Mapping[str, int]
    """what the slice's context collects from inside modules, and how much it has of it"""


class Lockstep:
    """Runs programs, one a slice, from site to site."""

    def __init__(self, run_site: Callable[[int, list[Arrival]], list[Any]], resumed: Callable[[int, int], None]) -> None:
        """`run_site(site, arrivals)` returns each slice's result; `resumed(slice, site)` is called before a slice goes on."""
        self._run_site, self._resumed = run_site, resumed
        self._conductor: greenlet | None = None

    def arrive(self, arrival: Arrival) -> Any:
        """Called within a program: stop before a site until its result is there."""
        assert self._conductor is not None and getcurrent() is not self._conductor, "only a running program arrives"
        return self._conductor.switch(arrival)

    def run(self, programs: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run all programs to their ends; their results."""
        self._conductor = getcurrent()
        slices = [greenlet(program) for program in programs]
        values: list[Any] = []
        try:
            for index, one in enumerate(slices):
                self._resumed(index, -1)
                values.append(one.switch())
            while not all(one.dead for one in slices):
                site = _common_site(values, slices)
                results = self._run_site(site, values)
                for index, one in enumerate(slices):
                    self._resumed(index, site)
                    values[index] = one.switch(results[index])
                    results[index] = None
        finally:
            self._conductor = None
            for one in slices:
                if not one.dead:
                    one.throw()
        return values


def _common_site(arrivals: list[Any], slices: list[greenlet]) -> int:
    """The site before which all slices stand."""
    sites: set[int | None] = {None if one.dead else arrival.site for arrival, one in zip(arrivals, slices, strict=True)}
    if len(sites) > 1:
        raise ScheduleError(f"slices of one batch take different ways through the model: they stand before sites {sites}")
    (site,) = sites
    assert site is not None, "not all slices have ended"
    return site
