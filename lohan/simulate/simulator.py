"""A Schedule in virtual time: the object that the executor runs, with durations instead of work.

The clock jumps from one completion to the next. Between two of them every busy lane works at a constant rate, which
`Contention.rates` gives for the lanes that are busy. Each jump has three phases:

    start     each lane starts its next operations in program order, as the docstring of `schedule.ops` says: when all waits are
              complete and, unless the lane overlaps, the operation before is
    advance   to the moment at which the first operation has no work left; the operations that an overlapping lane serves
              at once share its rate equally
    complete  operations without work left, in the order of their lane: one that is done before its predecessor holds

No decision is made here that the executor does not make, so that a difference between measured and simulated time is a
difference of durations or of contention, never of order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from lohan.errors import OptionError, ScheduleError
from lohan.schedule.ops import OVERLAPPING_LANES, Lane, Op, Schedule
from lohan.simulate.contention import Contention
from lohan.simulate.timeline import Span, Timeline

_ROUNDING_S = 1e-12
"""work left that is a rounding error: far below any operation, far above the precision of its seconds"""


@dataclass(frozen=True, slots=True)
class Costs:
    """What operations cost on some machine, measured or described."""

    alone_s: Callable[[Op], float]
    """seconds that an operation takes of its lane while all other lanes are idle; for a mapping, its `__getitem__`"""
    contention: Contention = field(default_factory=Contention)
    """what lanes cost each other"""


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Run `schedule` in virtual time."""
    alone_s = operation_seconds(schedule, costs)
    run = _Run(schedule, alone_s, costs.contention)
    while run.num_left:
        run.start()
        run.advance()
        run.complete()
    return Timeline(schedule.name, tuple(run.spans()), run.now_s, lane_work(schedule, alone_s))


def operation_seconds(schedule: Schedule, costs: Costs) -> list[float]:
    """The seconds of every operation alone, checked, in program order."""
    alone_s = [costs.alone_s(op) for op in schedule.ops]
    for op, seconds in zip(schedule.ops, alone_s, strict=True):
        if not 0 <= seconds < inf:
            raise OptionError("alone_s", seconds, f"{op} cannot take that long", "Give finite seconds, not negative")
    return alone_s


def lane_work(schedule: Schedule, alone_s: Sequence[float]) -> dict[Lane, float]:
    """The seconds of all operations of each lane together: `Timeline.work_s`, of a measured run too."""
    work_s = dict.fromkeys(Lane, 0.0)
    for op in schedule.ops:
        work_s[op.lane] += alone_s[op.index]
    return work_s


class _Flight:
    """An operation that has started."""

    __slots__ = ("done", "gbps", "left_s", "op")

    def __init__(self, op: Op, alone_s: float) -> None:
        self.op = op
        self.left_s = alone_s
        self.done = False
        self.gbps = op.nbytes / alone_s / 1e9 if alone_s > 0 else 0.0


class _LaneState:
    """One lane between what it has to start and what it has completed."""

    def __init__(self, ops: Sequence[Op], overlaps: bool, served_at_once: int) -> None:
        self.to_start = deque(ops)
        self.in_flight: deque[_Flight] = deque()
        """started and not complete, in order"""
        self.served: list[_Flight] = []
        """those of them that progress"""
        self.queued: deque[_Flight] = deque()
        """those of them that have yet to be served"""
        self.overlaps = overlaps
        self.served_at_once = served_at_once
        self.ready_s = 0.0
        """since when only waits keep the next operation from starting"""

    @property
    def gbps(self) -> float:
        """What the served operations move, had they the lane to themselves."""
        return sum(flight.gbps for flight in self.served) / len(self.served)

    def add(self, flight: _Flight) -> None:
        self.in_flight.append(flight)
        self.queued.append(flight)
        self.serve()

    def serve(self) -> None:
        """Fill the places of operations that have no work left with queued ones."""
        while self.queued and len(self.served) < self.served_at_once:
            self.served.append(self.queued.popleft())

    def seconds_to_next(self, rate: float) -> float:
        """Until the first served operation has no work left."""
        return min(flight.left_s for flight in self.served) * len(self.served) / rate

    def progress(self, work_s: float) -> None:
        """Divide `work_s` among the served operations; those with no work left make place."""
        each_s = work_s / len(self.served)
        for flight in self.served:
            flight.left_s -= each_s
            flight.done = flight.left_s <= _ROUNDING_S
        self.served = [flight for flight in self.served if not flight.done]
        self.serve()

    def pop_complete(self) -> _Flight | None:
        """The oldest operation in flight, if it has no work left."""
        return self.in_flight.popleft() if self.in_flight and self.in_flight[0].done else None


class _Run:
    """A schedule under way."""

    def __init__(self, schedule: Schedule, alone_s: Sequence[float], contention: Contention) -> None:
        for index, op in enumerate(schedule.ops):
            if op.index != index or not all(0 <= wait < index for wait in op.waits):
                raise ScheduleError(f"{schedule.name}: {op}, at position {index}, waits for {op.waits}: not all before it")
        self.ops, self.alone_s, self.contention = schedule.ops, alone_s, contention
        self.lanes = {
            lane: _LaneState(schedule.lane(lane), lane in OVERLAPPING_LANES, contention.served_at_once) for lane in Lane
        }
        self.now_s = 0.0
        self.num_left = len(self.ops)
        self.start_s = [0.0] * len(self.ops)
        self.waited_s = [0.0] * len(self.ops)
        self.end_s: list[float] = [inf] * len(self.ops)
        """inf until the operation is complete"""

    def start(self) -> None:
        """Start all that may start now. Starting completes nothing, so one pass over the lanes is enough."""
        for state in self.lanes.values():
            while state.to_start and (state.overlaps or not state.in_flight):
                op = state.to_start[0]
                if any(self.end_s[wait] == inf for wait in op.waits):
                    break
                state.add(_Flight(state.to_start.popleft(), self.alone_s[op.index]))
                self.start_s[op.index] = self.now_s
                self.waited_s[op.index] = self.now_s - state.ready_s
                if state.overlaps:
                    state.ready_s = self.now_s

    def advance(self) -> None:
        """Let the busy lanes work until one of them has done an operation. As every wait points back, one is busy."""
        busy = {lane: state for lane, state in self.lanes.items() if state.served}
        rates = self.contention.rates({lane: state.gbps for lane, state in busy.items()})
        jump_s = min(state.seconds_to_next(rates[lane]) for lane, state in busy.items())
        for lane, state in busy.items():
            state.progress(jump_s * rates[lane])
        self.now_s += jump_s

    def complete(self) -> None:
        """Complete what has no work left, as far as the order of its lane allows."""
        for state in self.lanes.values():
            while (flight := state.pop_complete()) is not None:
                self.end_s[flight.op.index] = self.now_s
                self.num_left -= 1
                if not state.overlaps:
                    state.ready_s = self.now_s

    def spans(self) -> list[Span]:
        return [Span.of(op, self.start_s[op.index], self.end_s[op.index], self.waited_s[op.index]) for op in self.ops]
