"""One suite over all devices: what the executor relies on. Each test runs on all of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lohan.device import open_device
from lohan.device.protocol import Device
from lohan.errors import ClosedError, DeviceMemoryError, OptionError
from lohan.schedule.ops import Kind, Lane, Op
from tests.conformance.devices import ACCELERATORS, DEVICES, MEMORY_BYTES, opened

COPIED_BYTES = 2**16


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from opened(request.param)


@pytest.fixture(params=ACCELERATORS)
def accelerator(request: pytest.FixtureRequest) -> Iterator[Device]:
    yield from opened(request.param)


def operation(lane: Lane) -> Op:
    return Op(0, Kind.FORWARD, lane, 0, 0, -1, (), (), (), 0)


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_a_slab_is_aligned_bytes_that_can_be_cut_and_cast(device: Device) -> None:
    slab = device.allocate(4096, "weights")
    assert (slab.dtype, slab.shape, slab.is_contiguous()) == (torch.uint8, (4096,), True)
    view = slab[256:512].view(torch.bfloat16).view(8, 16)
    with device.computing():
        view.copy_(device.put(torch.arange(128).view(8, 16)))
        view.add_(1)
        total = view.float().sum() + slab[256:260].view(torch.bfloat16).sum()
    assert device.fetch(total).item() == sum(range(1, 129)) + 3


def test_put_is_a_snapshot_and_fetch_is_counted(device: Device) -> None:
    host = torch.arange(6.0).view(2, 3)
    batch = tree_map(lambda t: device.put(t) if isinstance(t, Tensor) else t, {"x": host, "n": 3})
    with device.computing():
        doubled = batch["x"].t() * 2
    host = device.fetch(doubled)
    assert type(host) is Tensor and host.device.type == "cpu"
    assert torch.equal(host, torch.arange(6.0).view(2, 3).t() * 2)
    assert device.num_fetches == 1  # type: ignore[attr-defined]


def test_an_event_is_complete_after_its_record_only(device: Device) -> None:
    event = device.event(Lane.OPTIMIZER)
    assert not event.is_complete
    device.begin(Lane.OPTIMIZER, operation(Lane.OPTIMIZER))
    device.record(Lane.OPTIMIZER, event)
    device.wait(Lane.SSD_WRITE, event)
    assert event.is_complete


def test_a_compute_event_is_complete_once_synchronized(device: Device) -> None:
    event = device.event(Lane.COMPUTE)
    device.begin(Lane.COMPUTE, operation(Lane.COMPUTE))
    with device.computing():
        torch.ones(64, 64, device=device.torch_device) @ torch.ones(64, 64, device=device.torch_device)
    device.record(Lane.COMPUTE, event)
    device.synchronize(event)
    assert event.is_complete


def test_a_lane_waits_until_the_event_is_recorded(device: Device) -> None:
    order: list[str] = []
    event = device.event(Lane.SSD_READ)

    def read() -> None:
        time.sleep(0.05)
        order.append("read")
        device.record(Lane.SSD_READ, event)

    thread = in_thread(read)
    device.wait(Lane.COMPUTE, event)
    order.append("compute")
    thread.join()
    assert order == ["read", "compute"]


@pytest.mark.parametrize("wait", ["wait", "synchronize", "backward"])
def test_abort_wakes_whoever_blocks_and_all_who_come_later(device: Device, wait: str) -> None:
    event = device.event(Lane.OPTIMIZER)
    blocks = {
        "wait": lambda: device.wait(Lane.COMPUTE, event),
        "synchronize": lambda: device.synchronize(event),
        "backward": lambda: device.run_backward(lambda: device.wait(Lane.COMPUTE, event)),
    }
    raised: list[BaseException] = []

    def block() -> None:
        try:
            blocks[wait]()
        except BaseException as error:
            raised.append(error)

    thread = in_thread(block)
    failure = RuntimeError("the optimizer failed")
    device.abort(failure)
    thread.join(10)
    assert raised == [failure]
    with pytest.raises(RuntimeError, match="the optimizer failed"):
        device.begin(Lane.COMPUTE, operation(Lane.COMPUTE))


def test_a_closed_device_says_so(device: Device) -> None:
    device.close()
    with pytest.raises(ClosedError):
        device.put(torch.ones(1))


def test_random_operations_follow_the_seed_and_not_the_host(device: Device) -> None:
    def draw() -> Tensor:
        device.seed(3)
        with device.computing():
            dropped = torch.dropout(torch.ones(50, device=device.torch_device), 0.5, True)
            return torch.cat([dropped, torch.rand(9, device=device.torch_device)])

    first = device.fetch(draw())
    if not device.is_host:
        torch.manual_seed(99)
        undisturbed = torch.rand(9)
        torch.manual_seed(99)
    second = device.fetch(draw())
    assert device.is_host or torch.equal(torch.rand(9), undisturbed)
    with device.computing():
        third = device.fetch(torch.rand(59, device=device.torch_device))
    assert torch.equal(first, second) and not torch.equal(second, third)
    if device.torch_device.type == "cpu":
        torch.manual_seed(3)
        expected = torch.cat([torch.dropout(torch.ones(50), 0.5, True), torch.rand(9)])
        assert torch.equal(first, expected)


def test_an_exception_in_backward_is_raised_by_run_backward(device: Device) -> None:
    def backward() -> None:
        raise ValueError("a hook failed")

    with pytest.raises(ValueError, match="a hook failed"):
        device.run_backward(backward)


def test_bytes_go_up_and_down_in_the_order_of_their_events(accelerator: Device) -> None:
    host, back = (
        torch.randint(0, 255, (2, COPIED_BYTES), dtype=torch.uint8).clone(),
        torch.zeros(COPIED_BYTES, dtype=torch.uint8),
    )
    accelerator.register(host)
    accelerator.register(back)
    slab = accelerator.allocate(COPIED_BYTES, "slot")
    up, used, down = (accelerator.event(lane) for lane in (Lane.UPLOAD, Lane.COMPUTE, Lane.DOWNLOAD))
    accelerator.begin(Lane.UPLOAD, operation(Lane.UPLOAD))
    accelerator.copy(Lane.UPLOAD, slab, host[0])
    accelerator.copy(Lane.UPLOAD, slab, host[1])
    accelerator.record(Lane.UPLOAD, up)
    accelerator.wait(Lane.COMPUTE, up)
    accelerator.begin(Lane.COMPUTE, operation(Lane.COMPUTE))
    with accelerator.computing():
        slab.bitwise_xor_(7)
    accelerator.record(Lane.COMPUTE, used)
    accelerator.wait(Lane.DOWNLOAD, used)
    accelerator.begin(Lane.DOWNLOAD, operation(Lane.DOWNLOAD))
    accelerator.copy(Lane.DOWNLOAD, back, slab)
    accelerator.record(Lane.DOWNLOAD, down)
    accelerator.synchronize(down)
    assert torch.equal(back, host[1] ^ 7)


def test_slabs_and_workspace_share_one_hard_budget(accelerator: Device) -> None:
    quarter_bytes = (MEMORY_BYTES - accelerator.overhead_bytes) // 4
    accelerator.allocate(2 * quarter_bytes, "half")
    accelerator.reset_peak()
    with accelerator.computing():
        for _ in range(4):
            quarter = torch.ones(quarter_bytes, dtype=torch.uint8, device=accelerator.torch_device)
            del quarter
        quarter = torch.ones(quarter_bytes, dtype=torch.uint8, device=accelerator.torch_device)
    assert 3 * quarter_bytes <= accelerator.peak_bytes <= MEMORY_BYTES
    with pytest.raises(DeviceMemoryError):
        accelerator.allocate(2 * quarter_bytes, "too much")
    with pytest.raises(DeviceMemoryError), accelerator.computing():
        torch.cat([quarter, quarter])
    assert accelerator.fetch(quarter[:2]).tolist() == [1, 1]


def test_host_tensors_do_not_mix_with_device_tensors(accelerator: Device) -> None:
    with accelerator.computing():
        placed = accelerator.put(torch.ones(3))
        assert accelerator.fetch(placed * torch.tensor(2.0)).tolist() == [2, 2, 2]
    host = torch.ones(3)
    with pytest.raises(RuntimeError, match="host|device"), accelerator.computing():
        placed + host


@pytest.mark.parametrize(
    ("name", "memory_bytes", "option"),
    [("cpu", 2**30, "device_memory"), ("emulated", None, "device_memory"), ("gpu", None, "device"), ("cuda:x", None, "device")],
)
def test_a_device_that_cannot_be_opened_names_the_option(name: str, memory_bytes: int | None, option: str) -> None:
    with pytest.raises(OptionError) as caught:
        open_device(name, memory_bytes)
    assert caught.value.option == option
