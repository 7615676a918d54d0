"""Makes steps durable, one after the other, on a thread of its own, beside the schedule that runs.

    commit   when all updates of a step are with the drives: flush them, then write the record that names their places
    admit    before a schedule overwrites a place: the record that no longer names it is durable

A step's updates may end in the schedule after it (those that waited for the norm), so a commit can begin with waiting for an
operation. A commit that fails is the last one: the error meets whoever is admitted next, and closing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from lohan.ssd.durable import Durable


class Commits:
    """The commits of one run, in order."""

    def __init__(self, durable: Durable) -> None:
        self._durable = durable
        self._thread = ThreadPoolExecutor(1, "lohan commit")
        self._last: Future[None] = Future()
        self._last.set_result(None)
        self.asked_step = self.durable_step = -1 if durable.resumed is None else durable.resumed.step
        """the step that the last commit is for; and the one that a crash now would come back to (-1: none)"""

    @property
    def keeps(self) -> bool:
        """Whether there is a record at all."""
        return self._durable.records is not None

    def commit(self, step: int, sides: Sequence[int], after: Callable[[], None] | None = None) -> None:
        """Make `step` durable, once `after` returns; `sides` are the places that it is in. Returns at once."""
        if not self.keeps or step == self.asked_step:
            return
        self.asked_step = step
        before, text = self._last, "".join(map(str, sides))
        self._last = self._thread.submit(self._commit, before, step, text, after)

    def admit(self) -> Callable[[], None]:
        """Waits until all commits asked for so far are durable; raises what kept one from it."""
        last = self._last
        return lambda: last.result()

    def wait(self) -> None:
        self.admit()()

    def close(self) -> None:
        """Let the last commit finish."""
        self._thread.shutdown()
        if self._durable.records is not None:
            self._durable.records.close()

    def _commit(self, before: Future[None], step: int, sides: str, after: Callable[[], None] | None) -> None:
        before.result()
        if after is not None:
            after()
        self._durable.store.flush()
        assert self._durable.records is not None, "commits are asked for where there is a record"
        self._durable.records.write(step, sides)
        self.durable_step = step
