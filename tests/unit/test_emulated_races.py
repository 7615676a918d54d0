"""The emulated device against executors that do it wrong: no access that was not declared, none that was not waited for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

from lohan.device.emulated import EmulatedDevice
from lohan.errors import RaceError
from lohan.schedule.ops import Access, Content, Kind, Lane, Op, Schedule, Slot, Tier, What
from tests.unit.emulated import drain, hold, host_memory


def weights(unit: int) -> Content:
    return Content(What.WEIGHTS, unit)


def op(lane: Lane, reads: Sequence[Access] = (), writes: Sequence[Access] = ()) -> Op:
    return Op(0, Kind.FORWARD, lane, 0, 0, -1, tuple(reads), tuple(writes), (), 0)


UPLOADED = op(Lane.UPLOAD, [Access(0, 0, 4096, weights(1))], [Access(1, 0, 4096, weights(1))])
USED = op(Lane.COMPUTE, [Access(1, 0, 4096, weights(1))], [Access(2, 0, 4096, Content(What.GRADIENT, 1))])


class Bound:
    """A device with a schedule: a host slot that keeps a unit's weights, and two device slots in one slab."""

    def __init__(self, device: EmulatedDevice) -> None:
        self.device = device
        self.host = host_memory(device, 1)
        slab = device.allocate(3 * 4096, "slab")
        self.weights, self.gradients, self.free = (slab[i : i + 4096] for i in range(0, 3 * 4096, 4096))
        slots = (
            Slot(0, "kept", Tier.HOST, 4096),
            Slot(1, "weights", Tier.DEVICE, 4096),
            Slot(2, "gradients", Tier.DEVICE, 4096),
        )
        self.schedule = Schedule("one unit", slots, (UPLOADED, USED), UPLOADED.reads)
        self.memory = {0: self.host, 1: self.weights, 2: self.gradients}
        device.bind(self.schedule, self.memory)

    def upload(self) -> None:
        event = self.device.event(Lane.UPLOAD)
        self.device.begin(Lane.UPLOAD, UPLOADED)
        self.device.copy(Lane.UPLOAD, self.weights, self.host)
        self.device.record(Lane.UPLOAD, event)
        self.device.wait(Lane.COMPUTE, event)


@pytest.fixture
def bound() -> Iterator[Bound]:
    device = EmulatedDevice(2**20)
    yield Bound(device)
    device.close()


def test_what_is_declared_and_waited_for_passes(bound: Bound) -> None:
    for _ in range(2):
        bound.upload()
        bound.device.begin(Lane.COMPUTE, USED)
        with bound.device.computing():
            bound.gradients.copy_(bound.weights + 1)
            bound.free.zero_()
        bound.device.record(Lane.COMPUTE, bound.device.event(Lane.COMPUTE))
        drain(bound.device)
        bound.device.bind(bound.schedule, bound.memory)


def test_a_wait_that_is_left_out(bound: Bound) -> None:
    bound.device.begin(Lane.UPLOAD, UPLOADED)
    bound.device.copy(Lane.UPLOAD, bound.weights, bound.host)
    bound.device.record(Lane.UPLOAD, bound.device.event(Lane.UPLOAD))
    with pytest.raises(RaceError, match="no event orders it"):
        bound.device.begin(Lane.COMPUTE, USED)


def test_compute_writes_a_slot_that_it_may_only_read(bound: Bound) -> None:
    bound.upload()
    bound.device.begin(Lane.COMPUTE, USED)
    with pytest.raises(RaceError, match=r"aten.add_.Tensor writes bytes 16\.\.24 of slot 'weights'"), bound.device.computing():
        bound.weights[16:24].add_(1)


def test_a_view_is_used_after_its_slot_was_released(bound: Bound) -> None:
    bound.upload()
    bound.device.begin(Lane.COMPUTE, USED)
    with bound.device.computing():
        kept = bound.weights[:8].view(torch.bfloat16).detach()
        kept + 1
        bound.device.record(Lane.COMPUTE, bound.device.event(Lane.COMPUTE))
        with pytest.raises(RaceError, match="while no operation runs on compute"):
            kept + 1
    with pytest.raises(RaceError, match="fetch reads"):
        bound.device.fetch(kept)


def test_a_copy_of_other_bytes_than_declared(bound: Bound) -> None:
    bound.device.begin(Lane.UPLOAD, UPLOADED)
    with pytest.raises(RaceError, match="a copy writes bytes .* of slot 'gradients'"):
        bound.device.copy(Lane.UPLOAD, bound.gradients, bound.host)


def test_copies_touch_slabs_and_registered_memory_only(bound: Bound) -> None:
    bound.device.begin(Lane.UPLOAD, UPLOADED)
    with pytest.raises(RaceError, match="not workspace"):
        bound.device.copy(Lane.UPLOAD, bound.device.put(bound.host), bound.host)
    with pytest.raises(ValueError, match="not registered"):
        bound.device.copy(Lane.UPLOAD, bound.weights, bound.host.clone())
    with pytest.raises(ValueError, match="same number of bytes"):
        bound.device.copy(Lane.UPLOAD, bound.weights, bound.host[:64])


def test_a_schedule_is_bound_before_the_last_one_is_over(bound: Bound) -> None:
    gate = hold(bound.device, Lane.UPLOAD)
    bound.device.begin(Lane.UPLOAD, UPLOADED)
    with pytest.raises(RaceError, match="while op 0 .* was not recorded"):
        bound.device.bind(bound.schedule, bound.memory)
    bound.device.record(Lane.UPLOAD, bound.device.event(Lane.UPLOAD))
    with pytest.raises(RaceError, match="while upload still works"):
        bound.device.bind(bound.schedule, bound.memory)
    gate.set()


def test_an_event_of_an_earlier_schedule_orders_nothing(bound: Bound) -> None:
    event = bound.device.event(Lane.UPLOAD)
    bound.device.begin(Lane.UPLOAD, UPLOADED)
    bound.device.record(Lane.UPLOAD, event)
    bound.device.synchronize(event)
    bound.device.bind(bound.schedule, bound.memory)
    bound.device.begin(Lane.UPLOAD, UPLOADED)
    bound.device.record(Lane.UPLOAD, bound.device.event(Lane.UPLOAD))
    bound.device.wait(Lane.COMPUTE, event)
    with pytest.raises(RaceError, match="no event orders it"):
        bound.device.begin(Lane.COMPUTE, USED)
