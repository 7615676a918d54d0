"""The race detector on hand-made sequences: right ones pass, and each wrong one is caught, whatever the real order was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from lohan.device.emulated.races import Clock, RaceDetector
from lohan.errors import RaceError
from lohan.schedule.ops import Access, Content, Kind, Lane, Op, Schedule, Slot, Tier, What

HOST, DEVICE, SSD, OWNED = range(4)
SLOTS = (
    Slot(HOST, "host", Tier.HOST, 100),
    Slot(DEVICE, "device", Tier.DEVICE, 100),
    Slot(SSD, "three units on the ssd", Tier.SSD, 300),
    Slot(OWNED, "unit 0", Tier.HOST, 100, owner=0),
)


def weights(unit: int, version: int = 0) -> Content:
    return Content(What.WEIGHTS, unit, version)


def at(slot: int, content: Content, start: int = 0, stop: int = 100) -> Access:
    return Access(slot, start, stop, content)


ON_SSD = tuple(at(SSD, weights(unit), 100 * unit, 100 * unit + 100) for unit in range(3))


class Run:
    """Begins and records operations by hand, in any order."""

    def __init__(self, ends_with: tuple[Access, ...] = ()) -> None:
        self.races = RaceDetector(Schedule("by hand", SLOTS, (), ON_SSD, ends_with))
        self.num_ops = 0

    def begin(self, lane: Lane, reads: Sequence[Access] = (), writes: Sequence[Access] = (), after: Sequence[Clock] = ()) -> Op:
        for clock in after:
            self.races.wait(lane, clock)
        op = Op(self.num_ops, Kind.FORWARD, lane, 0, 0, -1, tuple(reads), tuple(writes), (), 0)
        self.num_ops += 1
        self.races.begin(lane, op)
        return op

    def do(self, lane: Lane, reads: Sequence[Access] = (), writes: Sequence[Access] = (), after: Sequence[Clock] = ()) -> Clock:
        self.begin(lane, reads, writes, after)
        return self.races.record(lane)


@pytest.fixture
def run() -> Run:
    return Run()


def test_a_pipeline_that_waits_for_everything_passes(run: Run) -> None:
    used: list[Clock] = []
    sent: list[Clock] = []
    for unit in range(3):
        came = run.do(Lane.SSD_READ, [ON_SSD[unit]], [at(HOST, weights(unit))], sent)
        sent = [run.do(Lane.UPLOAD, [at(HOST, weights(unit))], [at(DEVICE, weights(unit))], [came, *used])]
        used = [run.do(Lane.COMPUTE, [at(DEVICE, weights(unit))], [], sent)]


def test_a_read_that_does_not_wait_for_the_write(run: Run) -> None:
    run.do(Lane.UPLOAD, [], [at(DEVICE, weights(1))])
    with pytest.raises(RaceError, match=r"op 1 .* on compute reads .*'device'.* no event orders it after op 0 .* on upload"):
        run.do(Lane.COMPUTE, [at(DEVICE, weights(1))])


def test_a_write_that_does_not_wait_for_the_reader(run: Run) -> None:
    came = run.do(Lane.UPLOAD, [], [at(DEVICE, weights(1))])
    run.do(Lane.COMPUTE, [at(DEVICE, weights(1))], [], [came])
    with pytest.raises(RaceError, match="writes .* which reads there"):
        run.do(Lane.UPLOAD, [], [at(DEVICE, weights(2))])


def test_two_writes_that_nothing_orders(run: Run) -> None:
    run.do(Lane.SSD_READ, [], [at(HOST, weights(1))])
    with pytest.raises(RaceError, match="writes .* which writes there"):
        run.do(Lane.DOWNLOAD, [], [at(HOST, weights(2))])


def test_reads_and_separate_bytes_need_no_order(run: Run) -> None:
    run.do(Lane.SSD_READ, [], [at(HOST, weights(1), 0, 50)])
    run.do(Lane.DOWNLOAD, [], [at(HOST, weights(2), 50, 100)])
    run.do(Lane.SSD_READ, [ON_SSD[0]])
    run.do(Lane.OPTIMIZER, [ON_SSD[0]])


def test_one_byte_of_overlap_is_enough(run: Run) -> None:
    run.do(Lane.SSD_READ, [], [at(HOST, weights(1), 0, 51)])
    with pytest.raises(RaceError, match="no event orders"):
        run.do(Lane.DOWNLOAD, [], [at(HOST, weights(2), 50, 100)])


def test_the_order_holds_through_a_third_lane(run: Run) -> None:
    read = run.do(Lane.SSD_READ, [], [at(HOST, weights(1))])
    relayed = run.do(Lane.OPTIMIZER, [], [], [read])
    run.do(Lane.COMPUTE, [at(HOST, weights(1))], [], [relayed])


def test_an_event_orders_what_was_before_it_only(run: Run) -> None:
    early = run.do(Lane.COMPUTE, [], [at(DEVICE, weights(1), 0, 50)])
    run.do(Lane.COMPUTE, [], [at(DEVICE, weights(1), 50, 100)])
    run.do(Lane.DOWNLOAD, [at(DEVICE, weights(1), 0, 50)], [], [early])
    with pytest.raises(RaceError, match="after op 1"):
        run.do(Lane.DOWNLOAD, [at(DEVICE, weights(1), 50, 100)])


def test_operations_of_one_lane_follow_each_other(run: Run) -> None:
    run.do(Lane.COMPUTE, [], [at(DEVICE, weights(1))])
    run.do(Lane.COMPUTE, [at(DEVICE, weights(1))], [at(DEVICE, weights(1, 1))])
    run.do(Lane.COMPUTE, [at(DEVICE, weights(1, 1))])


def test_operations_of_an_overlapping_lane_do_not(run: Run) -> None:
    run.do(Lane.SSD_READ, [], [at(HOST, weights(1))])
    with pytest.raises(RaceError, match="no event orders"):
        run.do(Lane.SSD_READ, [], [at(HOST, weights(2))])


def test_an_overlapping_lane_can_wait_for_itself_and_completes_in_order(run: Run) -> None:
    run.begin(Lane.SSD_READ, [], [at(HOST, weights(1), 0, 50)])
    run.begin(Lane.SSD_READ, [], [at(HOST, weights(1), 50, 100)])
    run.races.record(Lane.SSD_READ)
    second = run.races.record(Lane.SSD_READ)
    run.do(Lane.SSD_READ, [], [at(HOST, weights(2))], [second])


def test_the_first_of_two_in_flight_says_nothing_about_the_second(run: Run) -> None:
    run.begin(Lane.SSD_READ, [], [at(HOST, weights(1), 0, 50)])
    run.begin(Lane.SSD_READ, [], [at(HOST, weights(1), 50, 100)])
    first = run.races.record(Lane.SSD_READ)
    run.do(Lane.UPLOAD, [at(HOST, weights(1), 0, 50)], [], [first])
    with pytest.raises(RaceError, match="after op 1"):
        run.do(Lane.UPLOAD, [at(HOST, weights(1), 50, 100)])


@pytest.mark.parametrize("found", [weights(2), weights(1, 1), Content(What.GRADIENT, 1), Content(What.WEIGHTS, 1, 0, 3)])
def test_a_read_finds_something_else(run: Run, found: Content) -> None:
    came = run.do(Lane.UPLOAD, [], [at(DEVICE, weights(1))])
    came = run.do(Lane.UPLOAD, [], [at(DEVICE, found, 40, 60)], [came])
    with pytest.raises(RaceError, match=r"expects .* in bytes 40\.\.60 .* left by op 1"):
        run.do(Lane.COMPUTE, [at(DEVICE, weights(1))], [], [came])


def test_a_read_of_what_nobody_wrote(run: Run) -> None:
    with pytest.raises(RaceError, match="nothing that this schedule wrote"):
        run.do(Lane.COMPUTE, [at(DEVICE, weights(1))])


@pytest.mark.parametrize("expected", [weights(1), weights(0, 1), Content(What.STATE, 0)])
def test_a_read_finds_what_the_schedule_begins_with_and_nothing_else(run: Run, expected: Content) -> None:
    run.do(Lane.SSD_READ, [ON_SSD[0]])
    with pytest.raises(RaceError, match=r"expects .* in bytes 0\.\.100 .* and finds .*owner=0, version=0"):
        run.do(Lane.SSD_READ, [at(SSD, expected)])


def test_the_next_schedule_finds_what_this_one_has_to_leave() -> None:
    run = Run((at(SSD, weights(0, 1)),))
    run.do(Lane.SSD_WRITE, [], [at(SSD, weights(0, 1), 0, 50)])
    with pytest.raises(RaceError, match=r"after it expects .*version=1.* in bytes 50\.\.100 .* finds .*version=0"):
        run.races.check_end()
    run.do(Lane.SSD_WRITE, [], [at(SSD, weights(0, 1), 50, 100)])
    run.races.check_end()


def test_what_belongs_to_one_owner_is_written_with_its_own(run: Run) -> None:
    with pytest.raises(RaceError, match=r"op 0 .* writes .*owner=1.* to slot 'unit 0', which is not its place"):
        run.do(Lane.SSD_READ, [], [at(OWNED, weights(1))])
    run.do(Lane.SSD_WRITE, [], [at(OWNED, weights(0))])


@pytest.mark.parametrize("arrives", [at(HOST, weights(1)), at(HOST, weights(0, 1)), at(HOST, weights(0), 0, 99)])
def test_what_is_moved_arrives_as_what_it_was(run: Run, arrives: Access) -> None:
    with pytest.raises(RaceError, match=r"op 0 .* something else"):
        run.do(Lane.SSD_READ, [ON_SSD[0]], [arrives])


def test_scratch_is_ordered_but_its_content_does_not_matter(run: Run) -> None:
    scratch = Content(What.SCRATCH, 0)
    done = run.do(Lane.COMPUTE, [at(DEVICE, scratch)], [at(DEVICE, scratch)])
    run.do(Lane.UPLOAD, [], [at(DEVICE, weights(1))], [done])
    with pytest.raises(RaceError, match="no event orders"):
        run.do(Lane.COMPUTE, [], [at(DEVICE, scratch)])


def test_an_operation_may_rewrite_what_it_reads(run: Run) -> None:
    came = run.do(Lane.SSD_READ, [], [at(HOST, weights(1))])
    run.do(Lane.OPTIMIZER, [at(HOST, weights(1))], [at(HOST, weights(1, 1))], [came])


def test_an_operation_begins_while_another_was_not_recorded(run: Run) -> None:
    run.begin(Lane.COMPUTE)
    with pytest.raises(RaceError, match="begins before op 0"):
        run.begin(Lane.COMPUTE)


def test_an_operation_on_the_wrong_lane(run: Run) -> None:
    op = Op(0, Kind.FORWARD, Lane.COMPUTE, 0, 0, -1, (), (), (), 0)
    with pytest.raises(RaceError, match="begins on upload"):
        run.races.begin(Lane.UPLOAD, op)


@pytest.mark.parametrize("access", [at(HOST, weights(0), 50, 101), at(HOST, weights(0), 5, 5), at(9, weights(0))])
def test_an_access_outside_the_slots(run: Run, access: Access) -> None:
    with pytest.raises(RaceError, match="not within a slot"):
        run.do(Lane.SSD_READ, [], [access])


def test_a_slot_takes_nothing_of_another_owner() -> None:
    races = RaceDetector(Schedule("by hand", (Slot(0, "weights of unit 1", Tier.HOST, 100, owner=1),), ()))
    op = Op(0, Kind.UPDATE, Lane.OPTIMIZER, 2, -1, -1, (), (at(0, weights(2)),), (), 0)
    with pytest.raises(RaceError, match="'weights of unit 1', which is not its place"):
        races.begin(Lane.OPTIMIZER, op)


@pytest.mark.parametrize("target", [at(HOST, weights(1)), at(HOST, weights(0, 1)), at(HOST, weights(0), 0, 50)])
def test_a_move_makes_something_else_of_what_it_moves(run: Run, target: Access) -> None:
    with pytest.raises(RaceError, match="makes of .* something else"):
        run.do(Lane.SSD_READ, [ON_SSD[0]], [target])


def test_touching_what_was_declared(run: Run) -> None:
    run.begin(Lane.COMPUTE, [], [at(DEVICE, weights(1), 0, 30), at(DEVICE, weights(2), 30, 60)])
    run.races.touch(Lane.COMPUTE, DEVICE, 10, 60, write=True, by="aten.copy_")
    run.races.touch(Lane.COMPUTE, DEVICE, 0, 60, write=False, by="aten.mm")


def test_touching_more_than_was_declared(run: Run) -> None:
    came = run.do(Lane.UPLOAD, [], [at(DEVICE, weights(1))])
    run.begin(Lane.COMPUTE, [at(DEVICE, weights(1), 0, 60)], [at(DEVICE, weights(1), 60, 70)], [came])
    run.races.touch(Lane.COMPUTE, DEVICE, 50, 70, write=False, by="aten.mm")
    with pytest.raises(RaceError, match=r"aten.mm reads bytes 50\.\.71 of slot 'device', which op 1"):
        run.races.touch(Lane.COMPUTE, DEVICE, 50, 71, write=False, by="aten.mm")
    with pytest.raises(RaceError, match="aten.add_ writes"):
        run.races.touch(Lane.COMPUTE, DEVICE, 0, 10, write=True, by="aten.add_")
    run.races.record(Lane.COMPUTE)
    with pytest.raises(RaceError, match="while no operation runs on compute"):
        run.races.touch(Lane.COMPUTE, DEVICE, 0, 10, write=False, by="aten.mm")
