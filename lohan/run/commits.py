"""Makes steps durable, one after the other, on a thread of its own, beside the schedule that runs.

    commit   when all that a state consists of is with the drives: flush it, then write the record that names its places, and
             the checksums of the store with it
    admit    before a schedule overwrites a place: the record that no longer names it is durable

A step's updates may end in the schedule after it (those that waited for the norm), so a commit can begin with waiting for an
operation. A commit that fails is the last one: the error meets whoever is admitted next, and closing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from lohan.host.threads import Crew, Job
from lohan.ssd.checked import CheckedStore
from lohan.ssd.durable import Durable
from lohan.ssd.records import Commit

NOTHING = -1
"""the step of a run that a crash now would not come back to"""


class Commits:
    """The commits of one run, in order."""

    def __init__(self, durable: Durable, store: CheckedStore) -> None:
        self._records, self._store = durable.records, store
        self._thread = Crew("lohan commit", 1)
        self._last: Job[None] | None = None
        resumed = durable.resumed
        self.asked = None if resumed is None else Commit(resumed.step, resumed.places, resumed.redo, resumed.whole)
        """what the last commit is for"""
        self.durable_step = NOTHING if resumed is None else resumed.step
        """the step that a crash now would come back to"""

    @property
    def keeps(self) -> bool:
        """Whether there is a record at all."""
        return self._records is not None

    def commit(self, state: Commit, after: Callable[[], None] | None = None) -> None:
        """Make a state durable, once `after` returns. Returns at once."""
        if not self.keeps or state == self.asked:
            return
        self.asked = state
        self._last = self._thread.submit(partial(self._commit, self._last, state, after))

    def admit(self) -> Callable[[], None]:
        """Waits until all commits asked for so far are durable; raises what kept one from it."""
        return _nothing_asked if self._last is None else self._last.wait

    def wait(self) -> None:
        self.admit()()

    def close(self) -> None:
        """Let the last commit finish."""
        self._thread.close()
        if self._records is not None:
            self._records.close()

    def _commit(self, before: Job[None] | None, state: Commit, after: Callable[[], None] | None) -> None:
        if before is not None:
            before.wait()
        if after is not None:
            after()
        self._store.flush()
        assert self._records is not None, "commits are asked for where there is a record"
        self._records.write(replace(state, table=self._store.table()))
        self.durable_step = state.step if state.whole else NOTHING


def _nothing_asked() -> None:
    """No commit was asked for."""
