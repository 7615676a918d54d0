"""Weights that take no memory, for a pass through the model before any weight is read: the model's code runs on them as it is.

All are windows of two small random buffers, in fp32 on the CPU, so that a model of any size takes next to none. Buffers are
copies, as a module may change its own (running statistics) or have them on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from lohan.model.units import ModelMap
from lohan.run.weights import bound


@contextmanager
def standing_in(model: nn.Module, model_map: ModelMap, fetch: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """All parameters of the model are stand-ins, all buffers copies; `fetch` brings a buffer to the host."""
    weights = stand_ins(model_map)
    seen: set[tuple[int, str]] = set()
    pairs = []
    for unit in model_map.units:
        for binding in unit.bindings:
            if (key := (id(binding.module), binding.attribute)) not in seen:
                seen.add(key)
                pairs.append((binding, weights[binding.tensor.name]))
    with bound(pairs), buffers_replaced(model, lambda buffer: _as_fp32(fetch(buffer).clone())):
        yield


def stand_ins(model_map: ModelMap) -> dict[str, Tensor]:
    """A weight for every parameter of the units: overlapping windows of a buffer, of one around 1 for vectors."""
    tensors = {t.name: t for unit in model_map.units for t in unit.shape.tensors}
    whole = {name: tuple(_whole_shape(model_map, name)) for name in tensors}
    strides = {name: _window_strides(shape) for name, shape in whole.items()}
    longest = max(1 + sum((n - 1) * s for n, s in zip(whole[name], strides[name], strict=True)) for name in tensors)
    noise = torch.randn(longest, generator=torch.Generator().manual_seed(0)) * 0.05
    around_1 = noise + 1.0
    views = {}
    for name, shape in whole.items():
        buffer = noise if len(shape) > 1 else around_1
        views[name] = buffer.as_strided(shape, strides[name]).requires_grad_(tensors[name].trainable)
    return views


def _window_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Neighbours overlap in all but one element. A stack of matrices overlaps matrix by matrix: kernels that take a stack
    (grouped experts) want rows that do not."""
    return (1,) * len(shape) if len(shape) < 3 else (*(1 for _ in shape[:-2]), shape[-1], 1)


def _whole_shape(model_map: ModelMap, name: str) -> Sequence[int]:
    pieces = [t for unit in model_map.units for t in unit.shape.tensors if t.name == name]
    shape = pieces[0].shape
    return (sum(p.shape[0] for p in pieces), *shape[1:]) if shape else shape


@contextmanager
def buffers_replaced(module: nn.Module, replace: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Other tensors stand for the module's buffers, so that what happens to them leaves no trace."""
    before = [(part._buffers, name, b) for part in module.modules() for name, b in part._buffers.items() if b is not None]
    try:
        for buffers, name, buffer in before:
            buffers[name] = replace(buffer)
        yield
    finally:
        for buffers, name, buffer in before:
            buffers[name] = buffer


def _as_fp32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.is_floating_point() else tensor
