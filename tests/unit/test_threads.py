"""Threads that cannot begin: an error, at once or soon, and none of their company is left behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count

import pytest

from lohan.device.cpu import CpuDevice
from lohan.errors import ThreadError, WorkerError
from lohan.host import threads
from lohan.host.threads import Crew, Worker
from lohan.run.executor import Executor
from lohan.ssd.memory_store import MemoryStore


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "NUM_CHECKS", 2)


@pytest.fixture
def nobody_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    others = [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    for thread in others:
        thread.join(30)
    assert not any(thread.is_alive() for thread in others)


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, *, first_line: bool) -> None:
    """The n-th thread that begins finds no memory: for its stack, or for its first line."""
    name, error = ("_bootstrap", MemoryError()) if first_line else ("start", RuntimeError("can't start new thread"))
    real, num_seen = getattr(threading.Thread, name), count()

    def begin(self: threading.Thread) -> None:
        if next(num_seen) == number:
            raise error
        real(self)

    monkeypatch.setattr(threading.Thread, name, begin)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("first_line", [False, True])
@pytest.mark.parametrize("number", range(4))
def test_a_crew_begins_as_a_whole(number: int, first_line: bool, monkeypatch: pytest.MonkeyPatch, nobody_left: None) -> None:
    refuse(monkeypatch, number, first_line=first_line)
    with pytest.raises(ThreadError, match=f"'crew {number}' begin .*Free memory"):
        Crew("crew", 4)


@pytest.mark.parametrize("number", range(5))
def test_an_executor_begins_as_a_whole(number: int, monkeypatch: pytest.MonkeyPatch, nobody_left: None) -> None:
    refuse(monkeypatch, number, first_line=False)
    with pytest.raises(ThreadError, match="lohan "):
        Executor(CpuDevice())


@pytest.mark.parametrize("number", range(8))
def test_a_store_begins_as_a_whole(number: int, monkeypatch: pytest.MonkeyPatch, nobody_left: None) -> None:
    refuse(monkeypatch, number, first_line=False)
    with pytest.raises(ThreadError, match="ssd-"):
        MemoryStore(2**20, threads=4)


def test_a_worker_that_begins_works() -> None:
    worked = threading.Event()
    worker = Worker("one", worked.set)
    worker.start()
    worker.join(30)
    assert worked.is_set() and not worker.is_alive()


def test_jobs_bring_results_and_errors() -> None:
    crew = Crew("crew", 3)
    assert crew.each(lambda part: part * 2, range(50)) == list(range(0, 100, 2))
    with pytest.raises(ZeroDivisionError):
        crew.submit(lambda: 1 // 0).wait()
    late = crew.submit(lambda: "done")
    crew.close()
    assert late.wait() == "done" and not crew.is_alive


def test_what_nobody_will_do_is_an_error() -> None:
    crew = Crew("crew", 1)
    crew.close()
    with pytest.raises(WorkerError, match="'crew' have ended"):
        crew.submit(lambda: None).wait()
