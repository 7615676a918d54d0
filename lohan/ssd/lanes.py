"""Threads that carry out the pieces of requests, and the tickets that tell when they are done.

Each drive has two lanes, one for reads and one for writes, so that a write never delays a read and a slow drive never holds
the threads of another. A lane is a queue and a few threads, which spend their time in system calls without the GIL; Python
does a constant number of things per piece.

    submit   the ticket counts its pieces; each is put on its lane's queue
    run      a thread takes the next piece, transfers it, sleeps if the lane is throttled
    finish   the ticket counts down; at zero its waiters wake

A piece of a ticket that already failed is skipped. A failure stays in its ticket: others go on.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from lohan.errors import ClosedError, StallError
from lohan.host.threads import Worker, start_all
from lohan.ssd.throttle import Pacer, sleep_until

NUM_CHECKS = 20
"""looks at a store's progress before it counts as stalled"""


class Progress:
    """Whether pieces of a store finish: what a stall is told by."""

    def __init__(self, stall_s: float) -> None:
        self.stall_s = stall_s
        self.num_finished = 0
        self._num_at_stall = -1

    def stall(self) -> None:
        """A ticket gave up waiting."""
        self._num_at_stall = self.num_finished

    @property
    def is_stalled(self) -> bool:
        """Whether nothing finished since."""
        return self._num_at_stall == self.num_finished


class PieceTicket:
    """A count of pieces that are not finished, and the first error among them."""

    def __init__(self, what: str, num_pieces: int, progress: Progress) -> None:
        self.error: BaseException | None = None
        self.started_s: float | None = None
        self.finished_s: float | None = None
        self._what = what
        self._num_left = num_pieces
        self._progress = progress
        self._lock = threading.Lock()
        self._all_finished = threading.Event()
        if num_pieces == 0:
            self.started_s = self.finished_s = time.perf_counter()
            self._all_finished.set()

    @property
    def done(self) -> bool:
        return self._all_finished.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        until_s = math.inf if timeout_s is None else time.perf_counter() + timeout_s
        check_s = self._progress.stall_s / NUM_CHECKS
        num_seen, num_quiet = -1, 0
        # Checks without news are counted, not seconds: a process that was stopped (Ctrl-Z) for a minute has not stalled.
        while not self._all_finished.wait(max(0.0, min(check_s, until_s - time.perf_counter()))):
            num_quiet = num_quiet + 1 if self._progress.num_finished == num_seen else 0
            num_seen = self._progress.num_finished
            if num_quiet == NUM_CHECKS:
                self._progress.stall()
                raise StallError(
                    f"{self._what}: {self._num_left} pieces are not done, and none of the store finished for "
                    f"{self._progress.stall_s:g} s. The drive does not answer: look at the kernel log (dmesg)"
                )
            if time.perf_counter() >= until_s:
                raise TimeoutError(f"{self._what}: {self._num_left} pieces are not done after {timeout_s:g} s")
        if self.error is not None:
            raise self.error

    def start_piece(self) -> None:
        if self.started_s is None:
            self.started_s = time.perf_counter()

    def finish_piece(self, error: BaseException | None) -> None:
        """Count one piece as done: no thread touches its buffer any more."""
        with self._lock:
            self._progress.num_finished += 1
            self.error = self.error or error
            self._num_left -= 1
            if self._num_left == 0:
                self.finished_s = time.perf_counter()
                self._all_finished.set()


@dataclass(frozen=True, slots=True)
class Piece:
    """One transfer: what `transfer` does is up to the store; it holds the buffer, so that the memory stays."""

    ticket: PieceTicket
    nbytes: int
    transfer: Callable[[], None]


class Lane:
    """One direction of one drive."""

    def __init__(self, name: str, num_threads: int, pacer: Pacer) -> None:
        self.moved_bytes = 0
        """of pieces that succeeded"""
        self._name = name
        self._pacer = pacer
        self._queue: SimpleQueue[Piece | None] = SimpleQueue()
        self._closed = False
        self._lock = threading.Lock()
        self._threads = [Worker(f"{name}-{index}", self._work) for index in range(num_threads)]
        start_all(self._threads, self.close)

    def put(self, piece: Piece) -> None:
        self._queue.put(piece)

    def close(self) -> None:
        """Skip what has not started; the threads end after what they do now. Returns at once: see `join`."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)

    def join(self, until_s: float) -> bool:
        """Whether all threads ended by `until_s`."""
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.perf_counter()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        # A function call per piece, so that an idle thread holds on to no buffer.
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        piece = self._queue.get()
        if piece is None:
            return False
        error: BaseException | None = None
        try:
            self._run(piece)
        except BaseException as caught:  # whatever it is, the caller hears of it in wait()
            error = caught
        piece.ticket.finish_piece(error)
        return True

    def _run(self, piece: Piece) -> None:
        if self._closed:
            raise ClosedError(f"{self._name}: the store was closed before this piece started")
        if piece.ticket.error is not None:
            return
        piece.ticket.start_piece()
        until_s = self._pacer.reserve(piece.nbytes)
        piece.transfer()
        sleep_until(until_s)
        with self._lock:
            self.moved_bytes += piece.nbytes
