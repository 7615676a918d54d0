"""Runs a Schedule: every lane works through its operations in order. It makes no decisions.

    run = executor.start(schedule, ssd, work)     lanes begin; the schedule before has been finished
    with run.compute(kind, site, unit): ...       the caller *is* the compute lane: one call for each of its operations
    run.wait_for(op)                              the host waits for one operation
    run.finish()                                  all lanes are done; the measured spans

One thread drives each lane of the host, and each copy stream. For every operation it waits for what the operation waits for,
begins it, performs it, and records its event. A lane that keeps several operations in flight has a second thread, which
records their completion in order.

Whatever goes wrong on any thread ends the run, and no other can begin: the first error is kept, every wait on the device is cut
short, and the error reaches the caller, once (`admit`, `check`). Whoever calls after that is told that the engine has stopped.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from lohan.device.protocol import Device, Event
from lohan.errors import ClosedError, LohanError, ScheduleError, WorkerError
from lohan.host.threads import Worker, start_all
from lohan.run.memory import Memory
from lohan.run.ssd_map import SsdMap
from lohan.schedule.ops import OVERLAPPING_LANES, STREAM_LANES, Kind, Lane, Op, Schedule
from lohan.simulate.timeline import Span
from lohan.ssd.base import Ticket

Work = Callable[[Op, list[Tensor], list[Tensor]], None]
"""what the optimizer lane does for an operation: its reads and writes as host memory"""


class Executor:
    """The lanes of one device and its stores."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.error: BaseException | None = None
        self.is_told = False
        """whether the caller knows of the error"""
        self._run: Run | None = None
        self._error_lock = threading.Lock()
        lanes = [Lane.SSD_READ, Lane.SSD_WRITE, Lane.OPTIMIZER] + ([] if device.is_host else [Lane.UPLOAD, Lane.DOWNLOAD])
        self._workers: dict[Lane, _Worker] = {}
        try:
            for lane in lanes:
                self._workers[lane] = _Worker(lane, self)
        except BaseException:  # a thread that cannot begin: the others end
            self.close()
            raise

    def start(self, schedule: Schedule, memory: Memory, ssd: SsdMap, work: Work) -> Run:
        """Begin a schedule; the one before must be finished."""
        self.check()
        if self._run is not None and self.is_busy:
            raise ScheduleError(f"{schedule.name} cannot begin before {self._run.schedule.name} is finished")
        self.device.bind(schedule, memory.tensors)
        self._run = Run(self, schedule, memory, ssd, work)
        for lane, worker in self._workers.items():
            if self._run.lanes[lane]:
                worker.runs.put(self._run)
        return self._run

    @property
    def is_busy(self) -> bool:
        """Whether a schedule has begun and not been finished."""
        return self._run is not None and not self._run.finished

    @property
    def share_computed(self) -> float | None:
        """How far the compute lane is, from 0 to 1; none when it has nothing left to begin. Any thread may ask."""
        if (run := self._run) is None or run.num_computed >= (num_ops := len(run.lanes[Lane.COMPUTE])):
            return None
        return run.num_computed / num_ops

    def fail(self, error: BaseException) -> None:
        """Keep the first error and wake everything that waits."""
        with self._error_lock:
            if self.error is not None:
                return
            self.error = error
        self.device.abort(error)

    def check(self) -> None:
        """Raise what went wrong so far."""
        if self.error is not None:
            raise self.error

    def admit(self) -> None:
        """The caller begins something new: raise what went wrong since its last call, or say that it knows already."""
        if self.is_told:
            raise ClosedError(f"the engine has stopped at an error: {self.error!r}. Open it again to go on") from self.error
        self.is_told = self.error is not None
        self.check()

    def stop(self, error: BaseException) -> None:
        """The caller is about to get `error`, and cannot go on from it."""
        self.fail(error)
        self.is_told = True

    def close(self) -> None:
        """End the threads. A run that is not finished is abandoned."""
        if self.is_busy:
            self.fail(ClosedError("the engine was closed in the middle of a step"))
        for worker in self._workers.values():
            worker.runs.put(None)
        for worker in self._workers.values():
            worker.join()


@dataclass(frozen=True, slots=True)
class _Noted:
    """What the thread that drives a lane saw of an operation."""

    op: Op
    began_s: float
    ended_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class _Submitted:
    """An operation in flight on an overlapping lane."""

    run: Run
    op: Op
    tickets: list[Ticket]
    began_s: float
    waited_s: float


class Run:
    """One execution of one schedule."""

    def __init__(self, executor: Executor, schedule: Schedule, memory: Memory, ssd: SsdMap, work: Work) -> None:
        self.schedule = schedule
        self.lanes: Mapping[Lane, tuple[Op, ...]] = {lane: schedule.lane(lane) for lane in Lane}
        self._noted: list[_Noted] = []
        self._spans: list[Span] | None = None
        self.finished = False
        self.began_s = time.perf_counter()
        self._executor, self._memory, self._ssd, self._work = executor, memory, ssd, work
        self._device = executor.device
        self._events: list[Event] = [self._device.event(op.lane) for op in schedule.ops]
        self.num_computed = 0
        """operations of the compute lane that have begun"""

    # ---------------------------------------------------------------- the compute lane

    @contextmanager
    def compute(self, kind: Kind, site: int, unit: int) -> Iterator[tuple[Op, list[Tensor], list[Tensor]]]:
        """The next operation of the compute lane, which must be this one: its memory is ready inside."""
        op = self._expect(kind, site, unit)
        waited_s = self.wait(op)
        began_s = time.perf_counter()
        try:
            self._device.begin(Lane.COMPUTE, op)
            yield op, *self.tensors(op)
            self._done(op, began_s, waited_s)
        except BaseException as error:
            self._executor.fail(error)
            raise

    def _expect(self, kind: Kind, site: int, unit: int) -> Op:
        ops = self.lanes[Lane.COMPUTE]
        op = ops[self.num_computed] if self.num_computed < len(ops) else None
        if op is None or (op.kind, op.site, op.unit) != (kind, site, unit):
            error = ScheduleError(
                f"the model departs from the order that was recorded at the start: expected {op or 'the end'}, "
                f"got {kind.value} of unit {unit} at site {site}. Its forward must visit the same modules in every step"
            )
            self._executor.fail(error)
            raise error
        self.num_computed += 1
        return op

    @contextmanager
    def failing(self) -> Iterator[None]:
        """What goes wrong inside ends the run on all lanes."""
        try:
            yield
        except BaseException as error:
            self._executor.fail(error)
            raise

    def end_compute(self) -> None:
        """The caller has nothing more to compute: whatever the schedule still expects would be waited for in vain."""
        left = self.lanes[Lane.COMPUTE][self.num_computed :]
        if left:
            error = ScheduleError(
                f"the model departs from the order that was recorded at the start: expected {left[0]}, got the end. "
                "Its forward must visit the same modules in every step, and its loss must depend on them"
            )
            self._executor.fail(error)
            raise error

    # ---------------------------------------------------------------- the caller

    def wait_for(self, op: Op) -> None:
        """Block until an operation is complete."""
        self._executor.check()
        self._device.synchronize(self._events[op.index])

    def finish(self) -> list[Span]:
        """Block until every lane is done with the schedule."""
        if not self.finished:
            self.end_compute()
            for ops in self.lanes.values():
                if ops:
                    self.wait_for(ops[-1])
            self._executor.check()
            self._spans = self.spans
            self.finished = True
        return self.spans

    @property
    def spans(self) -> list[Span]:
        """What was measured of the operations that are complete."""
        if self._spans is not None:
            return self._spans
        return [span for noted in list(self._noted) if (span := self._span(noted)) is not None]

    def _span(self, noted: _Noted) -> Span | None:
        """An operation of a stream was only enqueued when it was noted: the device knows when it ran."""
        began_s, ended_s = noted.began_s, noted.ended_s
        if noted.op.lane in STREAM_LANES and not self._device.is_host:
            event = self._events[noted.op.index]
            if not event.is_complete:
                return None
            assert event.times_s is not None, "a device knows when its streams worked"
            began_s, ended_s = event.times_s
        return Span.of(noted.op, began_s - self.began_s, ended_s - self.began_s, noted.waited_s)

    # ---------------------------------------------------------------- the lanes

    def wait(self, op: Op) -> float:
        """Everything that `op` waits for; returns the seconds that the calling thread was blocked."""
        began_s = time.perf_counter()
        for index in op.waits:
            self._device.wait(op.lane, self._events[index])
        return time.perf_counter() - began_s

    def perform(self, op: Op) -> None:
        """A whole operation of a lane that does one at a time."""
        waited_s = self.wait(op)
        began_s = time.perf_counter()
        self._device.begin(op.lane, op)
        reads, writes = self.tensors(op)
        if op.lane is Lane.OPTIMIZER:
            self._work(op, reads, writes)
        else:
            for source, destination in zip(reads, writes, strict=True):
                self._device.copy(op.lane, destination, source)
        self._done(op, began_s, waited_s)

    def submit(self, op: Op) -> _Submitted:
        """The first half of an operation of a lane that keeps several in flight."""
        waited_s = self.wait(op)
        self._device.begin(op.lane, op)
        began_s = time.perf_counter()
        tickets = self._ssd.submit(op, self._memory.view)
        return _Submitted(self, op, tickets, began_s, waited_s)

    def complete(self, submitted: _Submitted) -> None:
        """The second half: in order of submission."""
        for ticket in submitted.tickets:
            ticket.wait()
        began_s = min((t.started_s or submitted.began_s for t in submitted.tickets), default=submitted.began_s)
        self._done(submitted.op, began_s, submitted.waited_s)

    def tensors(self, op: Op) -> tuple[list[Tensor], list[Tensor]]:
        """The memory that an operation reads and writes."""
        return [self._memory.view(a) for a in op.reads], [self._memory.view(a) for a in op.writes]

    def _done(self, op: Op, began_s: float, waited_s: float) -> None:
        """Note what was measured of an operation, and tell those that wait for it."""
        self._noted.append(_Noted(op, began_s, time.perf_counter(), waited_s))
        self._device.record(op.lane, self._events[op.index])


class _Worker:
    """The threads of one lane, for all runs."""

    def __init__(self, lane: Lane, executor: Executor) -> None:
        self.lane = lane
        self.runs: queue.SimpleQueue[Run | None] = queue.SimpleQueue()
        self._executor = executor
        self._flying: queue.SimpleQueue[_Submitted | None] = queue.SimpleQueue()
        self._threads = [Worker(f"lohan {lane.value}", self._work)]
        if lane in OVERLAPPING_LANES:
            self._threads.append(Worker(f"lohan {lane.value} done", self._land))
        start_all(self._threads, lambda: self.runs.put(None))

    def join(self) -> None:
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        try:
            while (run := self.runs.get()) is not None:
                for op in run.lanes[self.lane]:
                    if not self._guard(op, lambda op=op, run=run: self._start(run, op)):  # type: ignore[misc]
                        break
        except BaseException as error:  # not even the guard could be called: no memory for its frame
            self._executor.fail(error)
        finally:
            self._flying.put(None)

    def _start(self, run: Run, op: Op) -> None:
        if self.lane in OVERLAPPING_LANES:
            self._flying.put(run.submit(op))
        else:
            run.perform(op)

    def _land(self) -> None:
        try:
            while (submitted := self._flying.get()) is not None:
                self._guard(submitted.op, lambda s=submitted: s.run.complete(s))  # type: ignore[misc]
        except BaseException as error:
            self._executor.fail(error)

    def _guard(self, op: Op, action: Callable[[], None]) -> bool:
        """Whether it went well; what did not is raised where the user can see it."""
        if self._executor.error is not None:
            return False
        try:
            action()
        except LohanError as error:
            self._executor.fail(error)
        except BaseException as error:
            wrapped = WorkerError(f"{op}: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            self._executor.fail(wrapped)
        return self._executor.error is None
