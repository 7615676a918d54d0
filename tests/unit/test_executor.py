"""The executor on schedules made by hand: what runs, in which order, and what becomes of errors on any of its threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lohan.device.cpu import CpuDevice
from lohan.errors import ClosedError, ScheduleError, StoreError, WorkerError
from lohan.run.executor import Executor, Run, Work
from lohan.run.memory import Memory
from lohan.run.ssd_map import Place, SsdMap
from lohan.schedule.ops import Access, Content, Kind, Lane, Op, Schedule, Slot, Tier, What
from lohan.ssd.memory_store import MemoryStore

SLOT_BYTES = 4096
NUM_HOST = 2
"""slots in RAM; behind them, as many on the SSD"""
WEIGHTS = Content(What.WEIGHTS, 0)


def at(slot: int) -> Access:
    return Access(slot, 0, SLOT_BYTES, WEIGHTS)


def op(index: int, lane: Lane, reads: list[int], writes: list[int], waits: tuple[int, ...] = ()) -> Op:
    kinds = {Lane.SSD_READ: Kind.READ_WEIGHTS, Lane.SSD_WRITE: Kind.WRITE_UPDATE, Lane.OPTIMIZER: Kind.UPDATE}
    kind = kinds.get(lane, Kind.FORWARD)
    return Op(index, kind, lane, index, 0, -1, tuple(map(at, reads)), tuple(map(at, writes)), waits, SLOT_BYTES)


ROUND = (
    op(0, Lane.SSD_READ, [NUM_HOST], [0]),
    op(1, Lane.COMPUTE, [0], [1], (0,)),
    op(2, Lane.OPTIMIZER, [1], [1], (1,)),
    op(3, Lane.SSD_WRITE, [1], [NUM_HOST + 1], (2,)),
)
"""read a slot, compute another one from it, update that, write it"""


def double(_: Op, reads: list[Tensor], writes: list[Tensor]) -> None:
    writes[0].copy_(reads[0] * 2)


class Machine:
    """An executor with memory for ROUND."""

    def __init__(self) -> None:
        self.device = CpuDevice()
        self.executor = Executor(self.device)
        self.store = MemoryStore(2 * SLOT_BYTES, threads=1)
        self.tensors = {slot: aligned() for slot in range(NUM_HOST)}

    def view(self, access: Access) -> Tensor:
        return self.tensors[access.slot]

    def start(self, ops: tuple[Op, ...] = ROUND, work: Work = double) -> Run:
        ssd = SsdMap({NUM_HOST + number: Place(self.store, number * SLOT_BYTES) for number in range(NUM_HOST)})
        tiers = [Tier.HOST] * NUM_HOST + [Tier.SSD] * NUM_HOST
        slots = tuple(Slot(index, f"slot {index}", tier, SLOT_BYTES) for index, tier in enumerate(tiers))
        return self.executor.start(Schedule("a round", slots, ops), cast(Memory, self), ssd, work)

    def compute(self, run: Run) -> None:
        with run.compute(Kind.FORWARD, 0, 1) as (_, reads, writes):
            writes[0].copy_(reads[0] + 1)

    def on_ssd(self, number: int) -> Tensor:
        found = aligned()
        self.store.submit_read([(number * SLOT_BYTES, found)]).wait()
        return found


def aligned() -> Tensor:
    raw = torch.zeros(2 * SLOT_BYTES, dtype=torch.uint8)
    start = -raw.data_ptr() % SLOT_BYTES
    return raw[start : start + SLOT_BYTES]


@pytest.fixture
def machine() -> Iterator[Machine]:
    before = set(threading.enumerate())
    opened = Machine()
    yield opened
    opened.executor.close()
    opened.store.close()
    opened.device.close()
    assert not set(threading.enumerate()) - before


def raising(error: BaseException) -> Callable[..., Any]:
    def action(*_: Any) -> None:
        raise error

    return action


def test_every_lane_does_its_part_in_the_order_of_the_waits(machine: Machine) -> None:
    for round_number in range(1, 4):
        machine.store.submit_write([(0, aligned().fill_(round_number))]).wait()
        run = machine.start()
        machine.compute(run)
        spans = run.finish()
        assert machine.on_ssd(1).eq(2 * (round_number + 1)).all()
        assert sorted(span.op for span in spans) == [0, 1, 2, 3]
        ends = {span.op: span.end_s for span in spans}
        assert all(ends[op.waits[0]] <= next(s.start_s for s in spans if s.op == op.index) for op in ROUND if op.waits)


def test_a_second_schedule_waits_for_the_first_to_be_finished(machine: Machine) -> None:
    run = machine.start()
    assert machine.executor.is_busy
    with pytest.raises(ScheduleError, match="a round cannot begin before a round is finished"):
        machine.start()
    machine.compute(run)
    run.finish()
    assert not machine.executor.is_busy


@pytest.mark.parametrize("wrong", [(Kind.BACKWARD, 0, 1), (Kind.FORWARD, 1, 1), (Kind.FORWARD, 0, 2)])
def test_a_compute_lane_that_departs_from_the_schedule(machine: Machine, wrong: tuple[Kind, int, int]) -> None:
    run = machine.start()
    expected = f"expected op 1 forward unit 1 site 0 on compute, got {wrong[0].value} of unit {wrong[2]} at site {wrong[1]}"
    with pytest.raises(ScheduleError, match=expected), run.compute(*wrong):
        pass
    with pytest.raises(ScheduleError, match="expected op 1"):
        run.finish()


def test_a_compute_lane_that_ends_too_early(machine: Machine) -> None:
    with pytest.raises(ScheduleError, match="expected op 1 .* got the end"):
        machine.start().finish()


def test_an_error_in_an_operation_reaches_the_caller_with_its_cause(machine: Machine) -> None:
    run = machine.start(work=raising(ZeroDivisionError("broken")))
    machine.compute(run)
    with pytest.raises(WorkerError, match="op 2 update unit 2 .* on optimizer: ZeroDivisionError: broken") as caught:
        run.finish()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_error_of_the_store_is_not_wrapped(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    error = StoreError("read", "drive", 0, SLOT_BYTES, 0, 5, "broken")
    monkeypatch.setattr(machine.store, "read_piece", raising(error))
    run = machine.start()
    with pytest.raises(StoreError) as caught:
        machine.compute(run)
    assert caught.value is error


def test_requests_behind_one_that_failed_complete_and_change_nothing(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several are in flight when the first one fails."""
    left, read = iter([1]), machine.store.read_piece

    def read_piece(*args: Any) -> None:
        if next(left, None) is not None:
            raise OSError(5, "broken")
        read(*args)

    monkeypatch.setattr(machine.store, "read_piece", read_piece)
    reads = tuple(op(index, Lane.SSD_READ, [NUM_HOST], [index % NUM_HOST]) for index in range(20))
    run = machine.start(reads)
    with pytest.raises(WorkerError, match=r"op 0 .*\[Errno 5\] broken"):
        run.finish()


def test_an_error_is_told_once_and_then_the_executor_has_stopped(machine: Machine) -> None:
    """It happens on a lane after the caller was last there: its next call gets it, the one after hears that it is over."""
    run = machine.start(work=raising(ZeroDivisionError("broken")))
    machine.compute(run)
    machine.executor._workers[Lane.OPTIMIZER].runs.put(None)
    machine.executor._workers[Lane.OPTIMIZER].join()
    with pytest.raises(WorkerError, match="broken"):
        machine.executor.admit()
    for _ in range(2):
        with pytest.raises(ClosedError, match="stopped at an error: WorkerError.*broken"):
            machine.executor.admit()


def test_the_first_error_counts(machine: Machine) -> None:
    machine.executor.fail(ValueError("first"))
    machine.executor.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        machine.start()


def test_an_interrupt_while_the_caller_computes_stops_all_lanes(machine: Machine) -> None:
    run = machine.start()
    with pytest.raises(KeyboardInterrupt), run.compute(Kind.FORWARD, 0, 1):
        raise KeyboardInterrupt
    assert isinstance(machine.executor.error, KeyboardInterrupt)


def test_closing_in_the_middle_of_a_schedule_wakes_the_lanes_that_wait(machine: Machine) -> None:
    """The optimizer waits for a compute operation that never comes."""
    run = machine.start()
    machine.executor.close()
    with pytest.raises(ClosedError, match="closed in the middle of a step"):
        machine.compute(run)


def test_closing_while_a_lane_is_at_work_waits_for_it(machine: Machine) -> None:
    at_work, may_end, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(*_: Any) -> None:
        at_work.set()
        may_end.wait()
        ended.set()

    machine.compute(machine.start(work=slow))
    at_work.wait()
    threading.Timer(0.05, may_end.set).start()
    machine.executor.close()
    assert ended.is_set()
