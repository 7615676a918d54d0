"""The compute lane of the emulated device: every torch operation of the host becomes work for one stream.

An operation, on the host (`dispatch`): its arguments are lowered to cells; what it touches of the slabs is reported to the race
detector; its result is made in shape, and counted against the memory budget; then it is enqueued, and the host goes on. On the
stream (`_kernel`): the cells have their data by then, as the stream keeps its order; the same operation runs on it.

Whatever needs the data on the host (`item()`, `nonzero()`, a mask as an index) waits until the stream has got there, as on a
GPU: `num_syncs`. What a CUDA device refuses is refused: host tensors among device tensors, work outside `computing()`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_unflatten

from lohan.device.emulated.operations import Call, Operation, Outcome
from lohan.device.emulated.stream import Stream, Task, poison
from lohan.device.emulated.tensor import Arena, Cell, EmulatedTensor, Layout, Owner
from lohan.device.events import Notice, block
from lohan.device.products import products
from lohan.errors import LohanError, RaceError, WorkerError

Touch = Callable[[int, int, bool, str], None]
"""(address, bytes, whether it writes, who): what an operation does to a slab"""

_MAX_OUTCOMES = 100_000
_outcomes: dict[Any, Outcome] = {}
"""what calls return, by `Call.key`; of the process, since it depends on no device"""
_default_generator = threading.Lock()
"""held while a compute stream lends its random state to torch's default generator"""


class Compute:
    """Runs torch operations on a stream."""

    def __init__(self, arena: Arena, notice: Notice, check: Callable[[], None], touch: Touch, slowdown: float) -> None:
        self.stream = Stream("compute", notice)
        self.num_fetches = 0
        self.num_syncs = 0
        """operations that made the host wait; not the first ones of their kind, which always do"""
        self._arena, self._notice, self._check, self._touch, self._slowdown = arena, notice, check, touch, slowdown
        self._owed_s = 0.0
        self._random_state = torch.default_generator.get_state()
        self._num_threads = 0
        self.stream.put(partial(torch.set_grad_enabled, False))
        self.stream.put(products().__enter__)  # for as long as the stream lives

    def mode(self) -> TorchDispatchMode:
        """The dispatch mode that `computing()` enters."""
        num_threads = torch.get_num_threads()
        if num_threads != self._num_threads:  # the setting belongs to the thread, and bits may depend on it
            self._num_threads = num_threads
            self.stream.put(partial(torch.set_num_threads, num_threads))
        return _ComputeMode(self)

    def adopt(self, slab: Tensor) -> Tensor:
        """Real memory as a slab of the device."""
        cell = Cell(slab)
        owner = Owner(cell, slab.numel(), self._arena, self.stream.put, is_slab=True)
        return EmulatedTensor(Layout.of(slab), cell, owner, self)

    def put(self, host: Tensor) -> Tensor:
        if isinstance(host, EmulatedTensor):  # within computing(), factories give device tensors
            return host
        value = host.detach().clone()
        cell = Cell()
        tensor = EmulatedTensor(Layout.of(value), cell, self._own(cell, value.untyped_storage().nbytes(), "put"), self)
        self.stream.put(partial(setattr, cell, "value", value))
        return tensor

    def fetch(self, tensor: Tensor) -> Tensor:
        assert isinstance(tensor, EmulatedTensor), "only a device tensor is fetched"
        self.num_fetches += 1
        if tensor.owner.is_slab:
            self._touch(tensor.cell.value.data_ptr(), tensor.layout_.span_bytes, False, "fetch")
        cell = tensor.cell
        value: Tensor = self._wait(lambda: cell.value.clone())
        return value

    def seed(self, seed: int) -> None:
        self.stream.put(partial(setattr, self, "_random_state", torch.Generator().manual_seed(seed).get_state()))

    def outside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Outside `computing()` no stream orders what is done to data. Views touch none."""
        if not Operation.of(func).is_view:
            raise RaceError(f"{func} on device tensors outside computing(): nothing orders it")
        return self.dispatch(func, args, kwargs)

    def dispatch(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Enqueue one operation; the result is known in shape."""
        if self._notice.error is not None:
            raise self._notice.error
        operation = Operation.of(func)
        call = Call(func, operation, args, kwargs)
        if call.host_tensors and not call.tensors:
            return self.put(args[0]) if operation.is_lift else func(*args, **kwargs)
        if any(tensor.dim() for tensor in call.host_tensors):
            return self._mix(call, args, kwargs)
        if kwargs.get("device") == torch.device("meta"):
            return func(*args, **kwargs)
        if operation.changes_layout:
            raise NotImplementedError(f"{func} changes the layout of a tensor in place: not on the emulated device")
        if not operation.is_view:
            self._report(call, args, kwargs)
        outcome = None if operation.is_dynamic else _outcomes.get(call.key)
        if outcome is None:
            return self._look(call)
        result, cells = self._wrap(call, outcome, [None] * len(outcome.outputs))
        is_there = operation.is_view and all(tensor.cell.value is not None for tensor in call.tensors)
        call.tensors = []
        if is_there:  # a view of data that is there moves nothing: slots have addresses on the host, too
            self._kernel(call, cells)
        else:
            self.stream.put(partial(self._kernel, call, cells))
        return result

    def _mix(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Host tensors among device tensors: an error, except for a copy from one to the other."""
        if not call.operation.is_copy:
            shapes = [tuple(tensor.shape) for tensor in call.host_tensors if tensor.dim()]
            raise RuntimeError(f"{call.func} got device tensors and tensors of the host, of shapes {shapes}: put() them first")
        destination, source = args[:2]
        if isinstance(destination, EmulatedTensor):
            return self.dispatch(call.func, (destination, self.put(source)), kwargs)
        return destination.copy_(self.fetch(source))

    def _report(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the race detector what the call does to slabs."""
        slabs = [tensor for tensor in call.tensors if tensor.owner.is_slab and tensor.layout_.span_bytes]
        if slabs:
            written = call.written(args, kwargs)
            for tensor in slabs:
                self._touch(tensor.cell.value.data_ptr(), tensor.layout_.span_bytes, id(tensor) in written, str(call.func))

    def _look(self, call: Call) -> Any:
        """Run a call whose outcome is not known: wait for the device, and look."""
        real = self._wait(partial(self._execute, call))
        outcome = Outcome.look(call, real)
        if outcome.is_constant:
            if len(_outcomes) >= _MAX_OUTCOMES:
                _outcomes.clear()
            _outcomes[call.key] = outcome
        else:
            self.num_syncs += 1
        leaves = tree_leaves(real)
        result, cells = self._wrap(call, outcome, leaves)
        _fill(cells, leaves)
        return result

    def _wrap(self, call: Call, outcome: Outcome, others: list[Any]) -> tuple[Any, list[Cell | None]]:
        """Tensors for what the call returns, and the cells to fill. `others`: what stands where no tensor is returned."""
        wrapped: list[Any] = []
        cells: list[Cell | None] = []
        for output, other in zip(outcome.outputs, others, strict=True):
            if output is None or output.is_argument:
                wrapped.append(other if output is None else call.tensors[output.argument])
                cells.append(None)
                continue
            cell = Cell()
            if output.argument >= 0:
                owner = call.tensors[output.argument].owner
            elif output.sibling >= 0:
                owner = wrapped[output.sibling].owner
            else:
                owner = self._own(cell, output.nbytes, call.func)
            wrapped.append(EmulatedTensor(output.layout, cell, owner, self))
            cells.append(cell)
        return (wrapped[0] if outcome.is_single else tree_unflatten(wrapped, outcome.spec)), cells

    def _own(self, cell: Cell, nbytes: int, name: object) -> Owner:
        self._arena.allocate(nbytes, str(name))
        return Owner(cell, nbytes, self._arena, self.stream.put, is_slab=False)

    def _wait(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the stream, behind all that is enqueued, and wait for it."""
        task = Task(function, self._notice)
        self.stream.put(task)
        block(task.done, self._check)
        if task.error is not None:
            raise task.error
        return task.result

    def _kernel(self, call: Call, cells: list[Cell | None]) -> None:
        try:
            result = self._execute(call)
        except LohanError:
            raise
        except Exception as error:
            raise WorkerError(f"{call.func} failed on the device: {error}") from error
        _fill(cells, tree_leaves(result) if len(cells) > 1 else [result])

    def _execute(self, call: Call) -> Any:
        start_s = time.perf_counter()
        result = self._draw(call) if call.operation.is_random else call.run()
        if call.operation.is_empty:
            poison(result.untyped_storage().data_ptr(), result.untyped_storage().nbytes())
        if self._slowdown > 1:
            self._owed_s += (time.perf_counter() - start_s) * (self._slowdown - 1)
            if self._owed_s > 1e-3:  # a shorter sleep would last longer than it says
                self._notice.sleep(self._owed_s)
                self._owed_s = 0.0
        return result

    def _draw(self, call: Call) -> Any:
        """Run a random operation: it draws from the device's state, and what the host draws meanwhile is not disturbed."""
        with _default_generator:
            hosts = torch.default_generator.get_state()
            torch.default_generator.set_state(self._random_state)
            try:
                return call.run()
            finally:
                self._random_state = torch.default_generator.get_state()
                torch.default_generator.set_state(hosts)


class _ComputeMode(TorchDispatchMode):
    """Sends this thread's torch operations to the compute stream."""

    def __init__(self, compute: Compute) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compute = compute

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, at the first operation, only to be told to stay away."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._compute.dispatch(func, args, kwargs or {})


def _fill(cells: list[Cell | None], values: list[Any]) -> None:
    for cell, value in zip(cells, values, strict=True):
        if cell is not None:
            cell.value = value
