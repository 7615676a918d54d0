"""Matrix products of bf16 tensors on processors without bf16 arithmetic.

There torch's kernels emulate it: 50 GFLOP/s on a core pair that does 230 in fp32. So the factors are widened, which loses
nothing, multiplied and summed in fp32, as bf16 arithmetic would, and the result is rounded once: 205 GFLOP/s.

`products()` is entered wherever the host computes. Which of the two ways a machine takes is a matter of its processor and
changes bits, as another processor's kernels do anyway; all placements, devices of the host and plans take the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_ATEN: Any = torch.ops.aten
PRODUCTS = frozenset({_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default})
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""what x86 and ARM processors call the arithmetic in /proc/cpuinfo"""
_forced: bool | None = None


class WideProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Computes this thread's bf16 products in fp32."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No: torch would import its compiler, for seconds, at the first operation, only to be told to stay away."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in PRODUCTS and args[-1].dtype is torch.bfloat16:
            return func(*(_widened(arg) for arg in args), **(kwargs or {})).bfloat16()
        return func(*args, **(kwargs or {}))


def products() -> AbstractContextManager[object]:
    """How bf16 products are computed on this machine's processor."""
    return WideProducts() if widens() else nullcontext()  # type: ignore[no-untyped-call]


def widens() -> bool:
    """Whether bf16 products are computed in fp32 here."""
    return not _has_bf16(Path("/proc/cpuinfo")) if _forced is None else _forced


@contextmanager
def forced(wide: bool) -> Iterator[None]:
    """Take one of the two ways whatever the processor, on every thread: for tests."""
    global _forced
    before, _forced = _forced, wide
    try:
        yield
    finally:
        _forced = before


@cache
def _has_bf16(cpuinfo: Path) -> bool:
    lines = cpuinfo.read_text().splitlines()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), "")
    return not BF16_FLAGS.isdisjoint(flags.split())


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype is torch.bfloat16 else value
