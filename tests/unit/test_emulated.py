"""The emulated device is as treacherous as a real one: poison, run-ahead, a hard budget, stalls."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding

from lohan.device.emulated import EmulatedDevice
from lohan.errors import OptionError, RaceError, StallError, WorkerError
from lohan.schedule.ops import Kind, Lane, Op
from tests.unit.emulated import drain, hold, host_memory

POISON = 255


@pytest.fixture
def device() -> Iterator[EmulatedDevice]:
    opened = EmulatedDevice(2**20)
    yield opened
    opened.close()


def test_slabs_and_uninitialised_workspace_are_poison(device: EmulatedDevice) -> None:
    assert set(device.fetch(device.allocate(1000, "slab")).tolist()) == {POISON}
    with device.computing():
        fresh = torch.empty(9, dtype=torch.bfloat16)
    assert device.fetch(fresh).isnan().all()


def test_freed_workspace_becomes_poison_behind_its_last_use(device: EmulatedDevice) -> None:
    tensor = device.put(torch.ones(64))
    drain(device)
    memory = tensor.cell.value  # type: ignore[attr-defined]
    view = tensor[8:16]
    del tensor
    with device.computing():
        doubled = view * 2
        assert memory.eq(1).all(), "a view keeps it"
        gate = hold(device, Lane.COMPUTE)
        doubled = view * 2
        del view
        assert memory.eq(1).all(), "it is still to be read"
        gate.set()
    assert device.fetch(doubled).eq(2).all()
    drain(device)
    assert memory.isnan().all()


def test_workspace_counts_in_the_order_of_the_host_however_far_behind_the_stream_is(device: EmulatedDevice) -> None:
    tensor = device.put(torch.ones(1000))
    with device.computing():
        tensor = tensor + 1
        tensor.neg_()
        gate = hold(device, Lane.COMPUTE)
        device.reset_peak()
        for _ in range(10):
            tensor = (tensor + 1).neg_()
    assert device.peak_bytes == 2 * 4000
    gate.set()


def test_a_copy_poisons_its_destination_and_reads_its_source_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    device = EmulatedDevice(2**20, link_gbps=1.0)
    host, slab = host_memory(device, 1), device.allocate(4096, "slab")
    with device.computing():
        slab.zero_()
    drain(device)
    seen: list[int] = []

    def meanwhile(seconds: float) -> None:
        assert seconds == 4096 / 1e9
        seen.extend(slab.cell.value.unique().tolist())  # type: ignore[attr-defined]
        host.fill_(2)

    monkeypatch.setattr(device._notice, "sleep", meanwhile)
    event = device.event(Lane.UPLOAD)
    device.copy(Lane.UPLOAD, slab, host)
    device.record(Lane.UPLOAD, event)
    device.synchronize(event)
    assert seen == [POISON]
    assert device.fetch(slab).eq(2).all()
    device.close()


def test_the_host_runs_ahead_of_compute_and_copies(device: EmulatedDevice) -> None:
    host, slab = host_memory(device, 3), device.allocate(4096, "slab")
    with device.computing():
        slab.add_(1)  # the host learns the shape of the result
    gate = hold(device, Lane.UPLOAD)
    copied, added = device.event(Lane.UPLOAD), device.event(Lane.COMPUTE)
    device.copy(Lane.UPLOAD, slab, host)
    device.record(Lane.UPLOAD, copied)
    device.wait(Lane.COMPUTE, copied)
    with device.computing():
        slab.add_(1)
    device.record(Lane.COMPUTE, added)
    assert not copied.is_complete and not added.is_complete
    gate.set()
    device.synchronize(added)
    assert device.fetch(slab).eq(4).all()


def test_backward_runs_on_a_thread_of_its_own(device: EmulatedDevice) -> None:
    threads: list[int] = []
    device.run_backward(lambda: threads.append(threading.get_ident()))
    assert threads and threads[0] != threading.get_ident()


def test_the_host_waits_only_where_it_has_to_see_data(device: EmulatedDevice) -> None:
    for values, nonzero in ([0.0, 2.0, 0.0, 3.0], [[1], [3]]), ([1.0, 0.0, 0.0, 0.0], [[0]]):
        tensor = device.put(torch.tensor(values))
        before = device.num_syncs
        with device.computing():
            mask = tensor > 0
            assert mask.nonzero().tolist() == nonzero
            assert device.fetch(tensor[mask]).tolist() == [v for v in values if v]
            assert tensor.sum().item() == sum(values)
        assert device.num_syncs == before + 3


def test_numbers_that_are_equal_but_of_another_type_give_other_dtypes(device: EmulatedDevice) -> None:
    ones = device.put(torch.ones(2, dtype=torch.int64))
    with device.computing():
        results = [ones + 1, ones + 1.0, ones + True]
    assert [r.dtype for r in results] == [torch.int64, torch.float32, torch.int64]
    assert all(device.fetch(r).dtype == r.dtype for r in results)


def test_views_results_in_place_and_lists_are_those_of_torch(device: EmulatedDevice) -> None:
    def compute(x: Tensor) -> list[Tensor]:
        left, right = x.split([3, 5], dim=1)
        right.mul_(2)
        rows = x.unbind(0)
        rows[1].add_(rows[0])
        stacked = torch.stack([rows[2], torch.cat([left[3], right[3]])])
        stacked[:, ::2] = -1
        values, indices = stacked.t().topk(2, dim=1)
        x.index_add_(0, x.new_tensor([0, 0], dtype=torch.int64), stacked)
        x.transpose(0, 1)[torch.arange(2), torch.arange(2)] = 7
        return [x, stacked.t(), values, indices, torch.var_mean(x, 1)[0], x.expand(2, 4, 8).reshape(-1)]

    host = torch.arange(32.0).view(4, 8)
    expected = compute(host.clone())
    for _ in range(2):
        with device.computing():
            results = compute(device.put(host))
        for result, wanted in zip(results, expected, strict=True):
            assert torch.equal(device.fetch(result), wanted)
            assert (result.shape, result.stride(), result.dtype) == (wanted.shape, wanted.stride(), wanted.dtype)


def test_work_outside_computing_is_refused_but_views_are_not(device: EmulatedDevice) -> None:
    slab = device.allocate(256, "slab")
    view = slab[128:].view(torch.bfloat16).detach().requires_grad_()
    with pytest.raises(RaceError, match=r"aten.mul.Tensor .* outside computing"):
        view * 2


def test_an_operation_that_fails_on_the_device_is_raised_by_later_calls(device: EmulatedDevice) -> None:
    table = device.put(torch.ones(4, 2))
    good, bad = device.put(torch.tensor([3])), device.put(torch.tensor([4]))
    with device.computing():
        embedding(good, table)
        embedding(bad, table)
    for _ in range(2):
        with pytest.raises(WorkerError, match="aten.embedding.default failed on the device: index out of range"):
            drain(device)


def test_a_copy_that_never_ends_is_a_stall_for_everybody() -> None:
    device = EmulatedDevice(2**20, stall_s=0.2, stuck_copy=1)
    host, slab = host_memory(device, 1), device.allocate(4096, "slab")
    first, second = device.event(Lane.UPLOAD), device.event(Lane.UPLOAD)
    device.copy(Lane.UPLOAD, slab, host)
    device.record(Lane.UPLOAD, first)
    device.synchronize(first)
    device.copy(Lane.UPLOAD, slab, host)
    device.record(Lane.UPLOAD, second)
    device.wait(Lane.COMPUTE, second)
    with pytest.raises(StallError, match="copy 1 on upload made no progress for 0.2 s"):
        drain(device)
    with pytest.raises(StallError):
        device.put(host)
    device.close()


def test_delays_change_no_bits() -> None:
    results = []
    for settings in {}, {"jitter_s": 0.002, "compute_slowdown": 3.0, "seed": 1}:
        device = EmulatedDevice(2**20, **settings)  # type: ignore[arg-type]
        for lane in Lane.COMPUTE, Lane.OPTIMIZER:
            device.begin(lane, Op(0, Kind.FORWARD, lane, 0, 0, -1, (), (), (), 0))
        with device.computing():
            results.append(device.fetch(device.put(torch.arange(9.0)).sin().cumsum(0)))
        device.close()
    assert torch.equal(*results)
    with pytest.raises(OptionError, match="compute_slowdown=0.5"):
        EmulatedDevice(2**20, compute_slowdown=0.5)
