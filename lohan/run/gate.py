"""Keeps a schedule from overwriting on the SSD what the newest durable commit names.

Three things are overwritten in a step, each only after certain commits are durable:

    the place to which a pending update goes    those asked for before the schedule: they name no such place any more. In the
                                                mode `log` it may be the place that another unit left a moment ago: then the
                                                commit in which that one has moved, too
    the place of a unit's last version,         all, the last step's included: nobody comes back to that version
    by an update of this schedule's own step
    gradients of the last step                  all: no update has to be made again from them
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass

from lohan.device.events import block
from lohan.run.commits import Commits
from lohan.schedule.ops import Kind, Op

COMMIT_EVERY = 2
"""units that move in each commit, where their old places are needed: half of the spare ones, so that the others are written
meanwhile"""


@dataclass(frozen=True, slots=True)
class Move:
    """A unit whose pending update a schedule writes."""

    unit: int
    place: int
    """where it goes"""
    last_write: Op
    """after which it is there"""


class Gate:
    """For one schedule; open once its commits have been asked for."""

    def __init__(self, commits: Commits, pending: Set[int], followed: Mapping[int, int], check: Callable[[], None]) -> None:
        """`followed`: for a unit that goes to the place of another one, that one. `check` raises what keeps it from opening."""
        self._commits, self._pending, self._followed = commits, pending, followed
        self._wait_for_earlier = self._wait_for_all = commits.admit()
        self._moved: dict[int, Callable[[], None]] = {}
        self._is_open, self._check = threading.Event(), check

    def asked(self, moves: Sequence[Move]) -> None:
        """A commit in which these units have moved has just been asked for."""
        wait = self._commits.admit()
        self._moved.update({move.unit: wait for move in moves})

    def open(self) -> None:
        """All commits of this schedule have been asked for."""
        self._wait_for_all = self._commits.admit()
        self._is_open.set()

    def admit(self, op: Op) -> None:
        """Return once `op` may write; raise what kept a commit from becoming durable."""
        if op.kind not in (Kind.WRITE_UPDATE, Kind.WRITE_GRADIENT):
            return
        if op.kind is Kind.WRITE_GRADIENT or op.unit not in self._pending or op.writes[0].content.version != 1:
            block(self._is_open, self._check)
            self._wait_for_all()
            return
        self._wait_for_earlier()
        if op.unit in self._followed:
            block(self._is_open, self._check)
            self._moved[self._followed[op.unit]]()
