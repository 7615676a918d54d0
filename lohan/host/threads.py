"""Threads that begin, or say that they cannot.

A system that is short of memory refuses a thread its stack: `start` says so. Or it refuses what the new thread needs for its
first line of Python: then CPython's `start` waits for ever (github.com/python/cpython/issues/140746), and a Worker's does not.

    start_all   several threads begin, or none
    Crew        threads that take jobs from one queue: they begin with it, so that later nothing can keep one from beginning
    Job         who waits for one hears of whatever kept it from being done
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from lohan.errors import ThreadError, WorkerError

Part = TypeVar("Part")
Result = TypeVar("Result")

CHECK_S = 0.1
NUM_CHECKS = 100
"""of whether a thread has begun; they are counted, not seconds, as a process may be stopped (Ctrl-Z) meanwhile"""


class Worker(threading.Thread):
    """A thread that ends with the process."""

    def __init__(self, name: str, work: Callable[[], None] | None = None) -> None:
        super().__init__(target=work, name=name, daemon=True)
        self._started = _Beginning()  # what `Thread.start` waits for; a CPython that has another way needs none of this

    def start(self) -> None:
        try:
            super().start()
        except (RuntimeError, MemoryError) as error:
            remedy = "Free memory, or raise the limits on memory and threads (ulimit -v, ulimit -u)"
            reason = f"the system does not let the thread {self.name!r} begin ({error or type(error).__name__})"
            raise ThreadError(f"{reason}. {remedy}") from error


class _Beginning(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        for _ in range(NUM_CHECKS):
            if super().wait(CHECK_S):
                return True
        raise RuntimeError(f"not one line of it ran within {NUM_CHECKS * CHECK_S:g} s")


def start_all(workers: Iterable[Worker], end: Callable[[], None]) -> None:
    """`end` tells those that have begun to end, if one cannot."""
    begun: list[Worker] = []
    try:
        for worker in workers:
            worker.start()
            begun.append(worker)
    except BaseException:
        end()
        for worker in begun:
            worker.join()
        raise


class Job(Generic[Result]):
    """Something that a crew does."""

    def __init__(self, work: Callable[[], Result], crew: Crew) -> None:
        self._work, self._crew = work, crew
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._is_done = threading.Event()

    def wait(self) -> Result:
        """Its result, or what it raised."""
        while not self._is_done.wait(CHECK_S):
            if not self._crew.is_alive:
                raise WorkerError(f"the threads {self._crew.name!r} have ended, and left something undone")
        if self._error is not None:
            raise self._error
        return self._result  # type: ignore[return-value]

    def do(self) -> None:
        try:
            self._result = self._work()
        except BaseException as error:  # whatever it is, who waits hears of it
            self._error = error
        finally:
            self._is_done.set()


class Crew:
    """`num` threads."""

    def __init__(self, name: str, num: int) -> None:
        self.name = name
        self._jobs: SimpleQueue[Job[Any] | None] = SimpleQueue()
        self._workers = [Worker(f"{name} {index}", self._work) for index in range(num)]
        start_all(self._workers, self._end)

    @property
    def is_alive(self) -> bool:
        return any(worker.is_alive() for worker in self._workers)

    def submit(self, work: Callable[[], Result]) -> Job[Result]:
        """Let somebody do it. Returns at once."""
        job = Job(work, self)
        self._jobs.put(job)
        return job

    def each(self, work: Callable[[Part], Result], parts: Sequence[Part]) -> list[Result]:
        """`work` done on every part; the results in the order of the parts."""
        jobs = [self.submit(lambda part=part: work(part)) for part in parts]  # type: ignore[misc]
        return [job.wait() for job in jobs]

    def close(self) -> None:
        """Let them finish what was submitted."""
        self._end()
        for worker in self._workers:
            worker.join()

    def _end(self) -> None:
        for _ in self._workers:
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.do()
            del job  # it may hold a great deal, and the next one may be long in coming
