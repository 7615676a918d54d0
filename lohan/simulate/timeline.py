"""What happened when: the record of a step, measured or simulated alike.

A `Span` is one operation in time. Seconds count from the start of the step, on the clock of whoever made the record. A
`Timeline` is all spans of a step together with the work that each lane had, so that a run can say what limited it:

    speed of light = work of the busiest lane, as measured alone / time of the step
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lohan.schedule.ops import Lane, Op


@dataclass(frozen=True, slots=True)
class Span:
    """One operation, from its start to its completion."""

    op: int
    """its index in the schedule"""
    lane: Lane
    name: str
    """what people see: "forward unit 3" """
    start_s: float
    end_s: float
    waited_s: float
    """how long the lane could have started it, had its waits been complete"""
    nbytes: int

    @classmethod
    def of(cls, op: Op, start_s: float, end_s: float, waited_s: float) -> Span:
        """The span of `op`, named after its kind and the place that it serves."""
        name = op.kind.value
        for place, number in (("unit", op.unit), ("site", op.site), ("chunk", op.chunk)):
            if number >= 0:
                name += f" {place} {number}"
        return cls(op.index, op.lane, name, start_s, end_s, waited_s, op.nbytes)


@dataclass(frozen=True, slots=True)
class LaneUse:
    """How a lane spent a step. `busy_s + waiting_s` is the moment at which its last operation completed."""

    busy_s: float
    """with at least one operation in flight"""
    waiting_s: float
    """with nothing in flight and something still to come"""
    bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A whole step in time."""

    name: str
    spans: tuple[Span, ...]
    step_s: float
    work_s: Mapping[Lane, float]
    """seconds that the operations of each lane take alone, with nothing beside them"""

    @property
    def lanes(self) -> dict[Lane, LaneUse]:
        """The use of every lane that had an operation."""
        return lane_use(self.spans)

    @property
    def busiest_lane(self) -> Lane:
        """The lane with the most work: no schedule of these operations is faster than it."""
        return max(Lane, key=lambda lane: self.work_s.get(lane, 0.0))

    @property
    def speed_of_light(self) -> float:
        """The share of the step that its busiest lane needs in any case; 1 for a step in which nothing happens."""
        return self.work_s.get(self.busiest_lane, 0.0) / self.step_s if self.step_s > 0 else 1.0


def lane_use(spans: Iterable[Span]) -> dict[Lane, LaneUse]:
    """What each lane did; spans of a lane that lie over each other count once as time, each as bytes."""
    busy_s: dict[Lane, float] = {}
    last_end_s: dict[Lane, float] = {}
    num_bytes: dict[Lane, int] = {}
    for span in sorted(spans, key=lambda span: span.start_s):
        lane, end_s = span.lane, last_end_s.get(span.lane, 0.0)
        busy_s[lane] = busy_s.get(lane, 0.0) + max(0.0, span.end_s - max(span.start_s, end_s))
        last_end_s[lane] = max(span.end_s, end_s)
        num_bytes[lane] = num_bytes.get(lane, 0) + span.nbytes
    return {lane: LaneUse(busy_s[lane], last_end_s[lane] - busy_s[lane], num_bytes[lane]) for lane in Lane if lane in busy_s}
