"""The simulator against schedules that were computed by hand, against bounds that every timing obeys, and its traces."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.errors import OptionError, ScheduleError
from lohan.schedule.ops import OVERLAPPING_LANES, Kind, Lane, Op, Schedule
from lohan.simulate.contention import Contention, fair_level
from lohan.simulate.simulator import Costs, simulate
from lohan.simulate.timeline import LaneUse, Span, Timeline, lane_use
from lohan.simulate.trace import write_trace

KINDS = {
    Lane.COMPUTE: Kind.FORWARD,
    Lane.UPLOAD: Kind.UPLOAD_WEIGHTS,
    Lane.DOWNLOAD: Kind.DOWNLOAD_GRADIENT,
    Lane.SSD_READ: Kind.READ_WEIGHTS,
    Lane.SSD_WRITE: Kind.WRITE_UPDATE,
    Lane.OPTIMIZER: Kind.UPDATE,
}


class Program:
    """A schedule written by hand, with the seconds of each operation."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.seconds: list[float] = []

    def add(self, lane: Lane, alone_s: float, waits: Sequence[int] = (), gigabytes: float = 0) -> int:
        op = Op(len(self.ops), KINDS[lane], lane, len(self.ops), -1, -1, (), (), tuple(waits), int(gigabytes * 1e9))
        self.ops.append(op)
        self.seconds.append(alone_s)
        return op.index

    @property
    def schedule(self) -> Schedule:
        return Schedule("by hand", (), tuple(self.ops))

    def simulate(self, contention: Contention | None = None) -> Timeline:
        return simulate(self.schedule, Costs(lambda op: self.seconds[op.index], contention or Contention()))


def times(timeline: Timeline) -> list[tuple[float, float]]:
    """Start and end of every operation, without the rounding errors of the clock."""
    return [(round(span.start_s, 9), round(span.end_s, 9)) for span in timeline.spans]


# ---------------------------------------------------------------------------------------------- schedules computed by hand


def test_a_chain_takes_the_sum() -> None:
    program = Program()
    read = program.add(Lane.SSD_READ, 2, gigabytes=3)
    upload = program.add(Lane.UPLOAD, 1, [read], gigabytes=3)
    program.add(Lane.COMPUTE, 4, [upload])
    timeline = program.simulate()
    assert times(timeline) == [(0, 2), (2, 3), (3, 7)]
    assert timeline.step_s == 7
    assert timeline.lanes[Lane.COMPUTE] == LaneUse(busy_s=4, waiting_s=3, bytes=0)
    assert timeline.lanes[Lane.SSD_READ] == LaneUse(busy_s=2, waiting_s=0, bytes=3_000_000_000)
    assert timeline.busiest_lane is Lane.COMPUTE
    assert timeline.speed_of_light == pytest.approx(4 / 7)


def test_lanes_overlap_and_one_lane_does_not() -> None:
    program = Program()
    for _ in range(3):
        upload = program.add(Lane.UPLOAD, 1)
        program.add(Lane.COMPUTE, 2, [upload])
    timeline = program.simulate()
    assert times(timeline) == [(0, 1), (1, 3), (1, 2), (3, 5), (2, 3), (5, 7)]
    assert [span.waited_s for span in timeline.spans] == [0, 1, 0, 0, 0, 0]


def test_one_slot_alternates_and_two_overlap() -> None:
    def step(num_slots: int) -> float:
        program = Program()
        computes: list[int] = []
        for unit in range(4):
            reused = [computes[unit - num_slots]] if unit >= num_slots else []
            computes.append(program.add(Lane.COMPUTE, 3, [program.add(Lane.UPLOAD, 2, reused)]))
        return program.simulate().step_s

    assert step(num_slots=1) == 4 * (2 + 3)
    assert step(num_slots=2) == 2 + 4 * 3


def test_the_head_of_a_lane_blocks_what_is_behind_it() -> None:
    program = Program()
    slow = program.add(Lane.COMPUTE, 5)
    program.add(Lane.SSD_READ, 1, [slow])
    program.add(Lane.SSD_READ, 1)
    timeline = program.simulate(Contention(served_at_once=1))
    assert times(timeline) == [(0, 5), (5, 6), (5, 7)]


def test_operations_in_flight_share_their_lane_and_complete_in_order() -> None:
    program = Program()
    long = program.add(Lane.SSD_READ, 3)
    short = program.add(Lane.SSD_READ, 1)
    program.add(Lane.COMPUTE, 1, [short])
    timeline = program.simulate()
    # The short one has no work left at 2, but the long one, with 2 of its 3 s left then, is complete first.
    assert times(timeline) == [(0, 4), (0, 4), (4, 5)]
    assert timeline.lanes[Lane.SSD_READ].busy_s == 4
    assert timeline.spans[long].waited_s == timeline.spans[short].waited_s == 0


def test_operations_behind_those_served_at_once_queue() -> None:
    program = Program()
    for _ in range(3):
        program.add(Lane.SSD_WRITE, 1)
    assert times(program.simulate(Contention(served_at_once=1))) == [(0, 1), (0, 2), (0, 3)]
    assert times(program.simulate(Contention(served_at_once=2))) == [(0, 2), (0, 2), (0, 3)]
    assert times(program.simulate(Contention(served_at_once=3))) == [(0, 3), (0, 3), (0, 3)]


def test_operations_without_duration() -> None:
    program = Program()
    first = program.add(Lane.SSD_READ, 0, gigabytes=1)
    second = program.add(Lane.SSD_READ, 0, [first])
    program.add(Lane.COMPUTE, 2, [second])
    assert times(program.simulate()) == [(0, 0), (0, 0), (0, 2)]
    assert Program().simulate().speed_of_light == 1


# ------------------------------------------------------------------------------------------------------------- contention


def test_fair_level() -> None:
    assert fair_level(4, [(1, 1), (1, 3)]) == float("inf")
    assert fair_level(4, [(1, 1), (1, 5)]) == 3
    assert fair_level(4, [(1, 3), (1, 5)]) == 2
    assert fair_level(2, [(2, 1), (1, 1), (1, 0.2)]) == pytest.approx(1.8 / 3)
    assert fair_level(2, [(1, 0), (2, 1)]) == float("inf")


def test_compute_and_optimizer_share_the_cores() -> None:
    program = Program()
    program.add(Lane.COMPUTE, 4)
    program.add(Lane.OPTIMIZER, 2)
    # Three threads on two cores: both at 2/3 until the optimizer is done at 3; compute, with 2 of 4 s left, then alone.
    contention = Contention(cores=2, compute_threads=2, optimizer_threads=1)
    timeline = program.simulate(contention)
    assert times(timeline) == [(0, 5), (0, 3)]
    assert timeline.work_s[Lane.COMPUTE] == 4
    assert program.simulate().step_s == 4


def test_io_takes_cores_and_is_not_slowed_by_them() -> None:
    program = Program()
    program.add(Lane.COMPUTE, 4)
    program.add(Lane.SSD_READ, 2, gigabytes=4)
    # 2 GB/s at 0.1 core-seconds a GB are 0.2 of 2 cores: compute runs at 0.9 for 2 s, then alone for 2.2 s.
    contention = Contention(cores=2, compute_threads=2, io_cpu_s_per_gb=0.1)
    assert times(program.simulate(contention)) == [(0, 4.2), (0, 2)]
    # The same bytes in two operations that are in flight together.
    program = Program()
    program.add(Lane.COMPUTE, 4)
    program.add(Lane.SSD_READ, 1, gigabytes=2)
    program.add(Lane.SSD_READ, 1, gigabytes=2)
    assert times(program.simulate(contention)) == [(0, 4.2), (0, 2), (0, 2)]


def test_compute_beside_a_gpu_needs_next_to_no_core() -> None:
    busy = {Lane.COMPUTE: 0.0, Lane.OPTIMIZER: 40.0, Lane.SSD_READ: 10.0}
    for threads in (0, 0.2):
        rates = Contention(cores=4, compute_threads=threads, optimizer_threads=4, io_cpu_s_per_gb=0.04).rates(busy)
        assert rates == {Lane.COMPUTE: 1, Lane.SSD_READ: 1, Lane.OPTIMIZER: pytest.approx((4 - threads - 0.4) / 4)}


def test_a_lane_may_keep_a_thread_busy_in_part() -> None:
    contention = Contention(cores=2, compute_threads=1.5, optimizer_threads=1)
    # Two threads of 0.75 and one of 1: two thirds each.
    rates = contention.rates({Lane.COMPUTE: 0, Lane.OPTIMIZER: 0})
    assert rates == {Lane.COMPUTE: pytest.approx(2 / 3 / 0.75), Lane.OPTIMIZER: pytest.approx(2 / 3)}


def test_every_resource_counts_what_the_ones_before_it_left() -> None:
    drive_and_cores = Contention(
        cores=2, compute_threads=2, io_cpu_s_per_gb=0.1, read_gbps=2, write_gbps=2, mixed_gbps=2, compute_memory_gbps=4
    )
    busy = {Lane.COMPUTE: 0.0, Lane.SSD_READ: 2.0, Lane.SSD_WRITE: 2.0}
    # Drive: 1 GB/s each way. Cores: 1.8 are left for two threads, 0.9 each. Memory: 3 GB/s are left for 0.9 x 4.
    assert drive_and_cores.rates(busy) == {Lane.COMPUTE: pytest.approx(0.9), Lane.SSD_READ: 0.5, Lane.SSD_WRITE: 0.5}
    and_memory = replace(drive_and_cores, memory_gbps=5)
    assert and_memory.rates(busy) == {Lane.COMPUTE: pytest.approx(0.75), Lane.SSD_READ: 0.5, Lane.SSD_WRITE: 0.5}


def test_reading_and_writing_share_the_drive_as_measured() -> None:
    contention = Contention(read_gbps=2.6, write_gbps=5.5, mixed_gbps=3.7)
    program = Program()
    program.add(Lane.SSD_READ, 1 / 2.6, gigabytes=1)
    program.add(Lane.SSD_WRITE, 1 / 5.5, gigabytes=1)
    timeline = program.simulate(contention)
    assert timeline.step_s == pytest.approx(2 / 3.7)
    assert timeline.spans[0].end_s == pytest.approx(timeline.spans[1].end_s)
    reading, writing = {Lane.SSD_READ: 2.6}, {Lane.SSD_WRITE: 5.5}
    assert contention.rates(reading) == {Lane.SSD_READ: 1}
    assert contention.rates(writing) == {Lane.SSD_WRITE: 1}
    slow_reads = Contention(read_gbps=1, write_gbps=5, mixed_gbps=4)
    assert slow_reads.rates({**reading, **writing}) == {Lane.SSD_READ: 1, Lane.SSD_WRITE: pytest.approx(3 / 5)}


def test_lanes_share_host_memory() -> None:
    contention = Contention(memory_gbps=30, compute_memory_gbps=20)
    rates = contention.rates({Lane.COMPUTE: 0, Lane.OPTIMIZER: 40, Lane.SSD_READ: 3})
    assert rates == {Lane.COMPUTE: pytest.approx(13.5 / 20), Lane.OPTIMIZER: pytest.approx(13.5 / 40), Lane.SSD_READ: 1}


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cores": 0}, "cores"),
        ({"io_cpu_s_per_gb": -1}, "io_cpu_s_per_gb"),
        ({"cores": 2, "compute_threads": 3}, "compute_threads"),
        ({"mixed_gbps": 3}, "mixed_gbps"),
        ({"memory_gbps": float("nan")}, "memory_gbps"),
        ({"served_at_once": 0}, "served_at_once"),
    ],
)
def test_impossible_contention_is_refused(settings: dict[str, float], named: str) -> None:
    with pytest.raises(OptionError) as refused:
        Contention(**settings)  # type: ignore[arg-type]
    assert refused.value.option == named


def test_impossible_schedules_and_costs_are_refused() -> None:
    program = Program()
    program.add(Lane.COMPUTE, 1, [1])
    program.add(Lane.UPLOAD, 1)
    with pytest.raises(ScheduleError, match="op 0 forward"):
        program.simulate()
    program.ops = [program.ops[1]]
    with pytest.raises(ScheduleError, match="op 1 upload weights"):
        program.simulate()
    program = Program()
    program.add(Lane.COMPUTE, -1)
    with pytest.raises(OptionError, match="op 0 forward"):
        program.simulate()


# ------------------------------------------------------------------------------------------------------- what always holds


CONTENDED = Contention(
    cores=2, compute_threads=2, optimizer_threads=1, io_cpu_s_per_gb=0.5, read_gbps=3, write_gbps=2, mixed_gbps=2.5,
    memory_gbps=10, compute_memory_gbps=6, served_at_once=3,
)  # fmt: skip


@st.composite
def programs(draw: st.DrawFn) -> Program:
    program = Program()
    for index in range(draw(st.integers(1, 25))):
        waits = draw(st.sets(st.integers(0, index - 1), max_size=3)) if index else set()
        seconds = draw(st.integers(0, 12)) / 4
        program.add(draw(st.sampled_from(list(Lane))), seconds, sorted(waits), gigabytes=draw(st.integers(0, 4)))
    return program


def critical_path_s(program: Program) -> float:
    """The longest chain of waits and of operations that a lane cannot overlap."""
    ends: list[float] = []
    lane_ends: dict[Lane, float] = {}
    for op, seconds in zip(program.ops, program.seconds, strict=True):
        start = max((ends[wait] for wait in op.waits), default=0.0)
        if op.lane not in OVERLAPPING_LANES:
            start = max(start, lane_ends.get(op.lane, 0.0))
        ends.append(start + seconds)
        lane_ends[op.lane] = ends[-1]
    return max(ends)


def lane_work_s(program: Program) -> Mapping[Lane, float]:
    return {lane: sum(program.seconds[op.index] for op in program.schedule.lane(lane)) for lane in Lane}


@given(programs(), st.sampled_from([Contention(), Contention(served_at_once=1), CONTENDED]))
def test_order_and_bounds_hold_whatever_the_program(program: Program, contention: Contention) -> None:
    timeline = program.simulate(contention)
    assert timeline == program.simulate(contention)
    spans, rounding_s = timeline.spans, 1e-6
    for op, span in zip(program.ops, spans, strict=True):
        assert all(spans[wait].end_s <= span.start_s for wait in op.waits)
        assert span.end_s - span.start_s >= program.seconds[op.index] - rounding_s
        assert 0 <= span.waited_s <= span.start_s
    for lane in Lane:
        for before, after in pairwise(span for span in spans if span.lane is lane):
            assert before.start_s <= after.start_s and before.end_s <= after.end_s
            assert lane in OVERLAPPING_LANES or before.end_s <= after.start_s
    work_s = lane_work_s(program)
    assert timeline.work_s == work_s
    assert timeline.step_s == max(span.end_s for span in spans)
    assert timeline.step_s >= max(*work_s.values(), critical_path_s(program)) - rounding_s
    assert timeline.speed_of_light <= 1 + rounding_s
    if contention.cores != CONTENDED.cores:
        assert timeline.step_s <= sum(program.seconds) + rounding_s


@given(programs())
def test_an_operation_starts_as_soon_as_it_may(program: Program) -> None:
    spans = program.simulate().spans
    lane_ready: dict[Lane, float] = {}
    for op, span in zip(program.ops, spans, strict=True):
        ready = lane_ready.get(op.lane, 0.0)
        assert span.start_s == max([ready, *(spans[wait].end_s for wait in op.waits)])
        assert span.waited_s == span.start_s - ready
        lane_ready[op.lane] = span.start_s if op.lane in OVERLAPPING_LANES else span.end_s


# ------------------------------------------------------------------------------------------------------------------ traces


def test_lane_use_counts_time_once_and_bytes_always() -> None:
    def span(start_s: float, end_s: float) -> Span:
        return Span(0, Lane.SSD_READ, "read", start_s, end_s, 0.0, 10)

    # The lane is idle in [0, 1] and [4, 6]; the last span to start is not the last to end.
    use = lane_use([span(6, 9), span(1, 3), span(2, 4), span(7, 8)])
    assert use == {Lane.SSD_READ: LaneUse(busy_s=6, waiting_s=3, bytes=40)}


def test_trace_has_a_process_a_timeline_and_no_crossing_slices(tmp_path: Path) -> None:
    program = Program()
    first = program.add(Lane.SSD_READ, 1 / 3, gigabytes=1)
    program.add(Lane.SSD_READ, 4 / 3, gigabytes=1)
    program.add(Lane.SSD_READ, 1 / 7, [program.add(Lane.COMPUTE, 1 / 3, [first])], gigabytes=1)
    for seventh in range(1, 7):
        program.add(Lane.COMPUTE, seventh / 7)
    spans = program.simulate().spans
    write_trace({"measured": spans, "simulated": spans}, tmp_path / "step.json")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]

    processes = {event["args"]["name"]: event["pid"] for event in events if event["name"] == "process_name"}
    assert set(processes) == {"measured", "simulated"}
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(name for (pid, _), name in tracks.items() if pid == processes["measured"]) == [
        "compute", "ssd_read", "ssd_read (2)"
    ]  # fmt: skip
    assert len({tid for _, tid in tracks} | set(processes.values())) == len(tracks) + len(processes)
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in slices} >= {"read weights unit 0", "forward unit 2"}
    assert len(slices) == 2 * len(spans)
    for track in tracks:
        on_track = sorted((e["ts"], e["ts"] + e["dur"]) for e in slices if (e["pid"], e["tid"]) == track)
        assert on_track and all(round(end - start, 4) <= 0 for (_, end), (start, _) in pairwise(on_track))
    waiting = next(event for event in slices if event["name"] == "forward unit 2")
    assert waiting["args"] == {"op": 2, "bytes": 0, "waited_us": waiting["ts"]}
    in_flight = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == processes["measured"]]
    assert in_flight == [1_000_000_000, 2_000_000_000, 1_000_000_000, 2_000_000_000, 1_000_000_000, 0]
