"""What a step's own operations need beside the slots (the *workspace*), found out before the run.

The compute lane of a schedule runs once on tensors that have shapes but no data: the model's forward and backward (for an
evaluation its forward), site after site, as in the real step, on slots that are not there. What its operations would hold at
most is counted. A model whose shapes depend on values (experts that are picked, masks that are looked at) cannot be
rehearsed: nothing is known then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily

from lohan.device.events import Event
from lohan.device.live import LiveBytes
from lohan.device.products import products
from lohan.run.alone import only
from lohan.run.batches import HostSlice
from lohan.run.executor import Executor
from lohan.run.memory import Memory, Workspace
from lohan.run.passes import LossFn, ModelRunner
from lohan.run.ssd_map import SsdMap
from lohan.schedule.ops import Access, Lane, Op, Schedule


class RehearsalDevice:
    """Computes shapes, and counts the bytes that their tensors would take."""

    name = "rehearsal"
    is_host = True
    memory_bytes: int | None = None
    torch_device = torch.device("cpu")
    optimizer_threads = 1
    overhead_bytes = 0

    def __init__(self, computes_on_host: bool) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.live = LiveBytes()
        self._products = products if computes_on_host else nullcontext

    def allocate(self, nbytes: int, name: str) -> Tensor:
        with self._mode:
            return torch.empty(nbytes, dtype=torch.uint8)

    @contextmanager
    def computing(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self._mode)
            stack.enter_context(self.live)
            stack.enter_context(self._products())
            yield

    def run_backward(self, backward: Callable[[], None]) -> None:
        with self.computing():
            backward()

    def put(self, host: Tensor) -> Tensor:
        with self.computing():
            return torch.empty(host.shape, dtype=host.dtype)

    def like(self, tensor: Tensor) -> Tensor:
        """Of the same shape: for what may lie on another device."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def fetch(self, tensor: Tensor) -> Tensor:
        with unset_fake_temporarily():
            return torch.zeros(tensor.shape, dtype=tensor.dtype)

    def event(self, lane: Lane) -> Event:
        return Event(lane)

    def record(self, lane: Lane, event: Event) -> None:
        event.recorded.set()
        event.complete.set()

    def wait(self, lane: Lane, event: Event) -> None:
        raise AssertionError("a compute lane on its own has nothing to wait for")

    def synchronize(self, event: Event) -> None:
        assert event.is_complete, "what was enqueued is done at once"

    def register(self, host: Tensor) -> None: ...

    def unregister(self, host: Tensor) -> None: ...

    def bind(self, schedule: Schedule, memory: Mapping[int, Tensor]) -> None: ...

    def begin(self, lane: Lane, op: Op) -> None: ...

    def copy(self, lane: Lane, destination: Tensor, source: Tensor) -> None: ...

    def seed(self, seed: int) -> None: ...

    def abort(self, error: BaseException) -> None: ...

    def expect_workspace(self, nbytes: int) -> None: ...

    def reset_peak(self) -> None: ...

    @property
    def peak_bytes(self) -> int:
        return self.live.peak_bytes

    def close(self) -> None: ...

    def describe(self) -> Mapping[str, Any]:
        return {"device": self.name}


class _NoMemory(Memory):
    """Slots without bytes."""

    def __init__(self, device: RehearsalDevice, schedule: Schedule) -> None:
        super().__init__(device, 0)
        self.tensors = {slot.index: device.allocate(slot.nbytes, slot.name) for slot in schedule.slots}

    def view(self, access: Access) -> Tensor:
        return self.tensors[access.slot][access.start : access.stop]


def rehearse(
    runner: ModelRunner, whole: Schedule, *, slices: Sequence[HostSlice], loss_fn: LossFn | None, evaluates: bool
) -> Workspace:
    """Run the compute lane of a schedule without data. `runner` is the real one; it steps aside meanwhile."""
    device = RehearsalDevice(runner.device.torch_device.type == "cpu")
    executor = Executor(device)
    schedule = only(whole, {Lane.COMPUTE})
    buffers = [(module, dict(module._buffers)) for module in runner.model.modules() if module._buffers]
    memory = _NoMemory(device, schedule)
    try:
        with runner.aside(), device.computing():
            for module, held in buffers:
                module._buffers.update({n: None if b is None else device.like(b) for n, b in held.items()})
            double = ModelRunner(runner.model, runner.map, runner.recording, runner.numerics, device)
            run = executor.start(schedule, memory, SsdMap({}), _no_work)
            if evaluates:
                double.forward(run, slices, loss_fn)
            else:
                double.forward_backward(run, slices, loss_fn, 0, {})
            double.close()
    except Exception as error:  # the step itself will say what is wrong, if it is more than that there is no data
        return Workspace(0, f"not known beforehand: a rehearsal without data met {type(error).__name__}: {error}")
    finally:
        for module, held in buffers:
            module._buffers.update(held)
        executor.close()
    return Workspace(device.peak_bytes, "counted in a rehearsal without data")


def _no_work(op: Op, reads: list[Tensor], writes: list[Tensor]) -> None:
    raise AssertionError("a rehearsal has no optimizer lane")
