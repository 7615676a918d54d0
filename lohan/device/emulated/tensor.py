"""Tensors of the emulated device: known in shape, but their data comes later.

An `EmulatedTensor` has sizes, strides and a dtype, so that model code and autograd work on it as on any other tensor; its
data will be in its `Cell` once the compute stream has got there. Tensors that share a storage share its `Owner`. When the last
of them goes on the host, the storage is freed: its bytes count no longer, and its memory turns to poison *in stream order*,
behind everything that was enqueued before, as with the caching allocator of a GPU.

The tensors claim to be on the CPU. So torch decomposes operations and chooses kernels exactly as it does there, and the bits
are those of the cpu device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor

from lohan.device.emulated.stream import poison
from lohan.errors import DeviceMemoryError

_CPU = torch.device("cpu")

Put = Callable[[Callable[[], object]], None]
"""enqueues work on the compute stream"""


class Layout:
    """Sizes, strides, offset and dtype. Equal ones are one object, so that they compare and hash by identity."""

    __slots__ = ("size", "stride", "offset", "dtype", "span_bytes")
    _known: dict[tuple[torch.Size, tuple[int, ...], int, torch.dtype], Layout] = {}

    def __init__(self, size: torch.Size, stride: tuple[int, ...], offset: int, dtype: torch.dtype) -> None:
        self.size, self.stride, self.offset, self.dtype = size, stride, offset, dtype
        last = sum((num - 1) * step for num, step in zip(size, stride, strict=True))
        self.span_bytes = (last + 1) * dtype.itemsize if size.numel() else 0
        """from the first element to the end of the last"""

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        key = (tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype)
        known = cls._known.get(key)
        return known if known is not None else cls._known.setdefault(key, cls(*key))


class Cell:
    """Where the data of a tensor will be."""

    __slots__ = ("value",)

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def free(self) -> None:
        """On the compute stream: nothing that was enqueued before needs the storage any more."""
        if self.value is not None:
            storage = self.value.untyped_storage()
            poison(storage.data_ptr(), storage.nbytes())
            self.value = None


class Arena:
    """The device's memory: slabs and workspace against one budget, counted in the order in which the host enqueues."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.live_bytes = 0
        self.peak_bytes = 0
        self.freed: deque[int] = deque()
        """bytes that were freed and not yet subtracted: a finalizer must not take a lock, and a deque needs none"""
        self._lock = Lock()

    def allocate(self, nbytes: int, name: str) -> None:
        with self._lock:
            self._settle()
            if self.live_bytes + nbytes > self.budget_bytes:
                raise DeviceMemoryError(
                    f"{name} needs {nbytes} bytes, and {self.live_bytes} of the device's {self.budget_bytes} are in use"
                )
            self.live_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def reset_peak(self) -> None:
        with self._lock:
            self._settle()
            self.peak_bytes = self.live_bytes

    def _settle(self) -> None:
        while self.freed:
            self.live_bytes -= self.freed.popleft()


class Owner:
    """One storage, for as long as any tensor of the host uses it."""

    __slots__ = ("cell", "nbytes", "is_slab", "_freed", "_put")

    def __init__(self, cell: Cell, nbytes: int, arena: Arena, put: Put, *, is_slab: bool) -> None:
        self.cell, self.nbytes, self.is_slab = cell, nbytes, is_slab
        self._freed, self._put = arena.freed, put

    def __del__(self) -> None:
        if not self.is_slab:
            self._freed.append(self.nbytes)
            self._put(self.cell.free)


class Dispatcher(Protocol):
    """What runs the operations on emulated tensors (`compute.Compute`)."""

    def outside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...

    def fetch(self, tensor: Tensor) -> Tensor: ...


class EmulatedTensor(Tensor):
    """A tensor of the emulated device."""

    cell: Cell
    owner: Owner
    layout_: Layout
    compute: Dispatcher

    @staticmethod
    def __new__(cls, layout: Layout, cell: Cell, owner: Owner, compute: Dispatcher) -> EmulatedTensor:
        tensor: EmulatedTensor = torch.Tensor._make_wrapper_subclass(
            cls, layout.size, strides=layout.stride, storage_offset=layout.offset, dtype=layout.dtype, device=_CPU
        )
        tensor.cell, tensor.owner, tensor.layout_, tensor.compute = cell, owner, layout, compute
        return tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """An operation outside `computing()`: inside, the mode of `compute` comes first."""
        flat = [item for arg in args for item in (arg if isinstance(arg, (list, tuple)) else (arg,))]
        first = next(item for item in (*flat, *(kwargs or {}).values()) if isinstance(item, EmulatedTensor))
        return first.compute.outside(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.compute.fetch(self).tolist()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"EmulatedTensor({tuple(self.shape)}, {self.dtype})"
