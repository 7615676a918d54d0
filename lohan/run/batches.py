"""From micro-batches to slices: what each piece of a batch is, how many targets it has, and where they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lohan.device.protocol import Device
from lohan.errors import OptionError

IGNORED = -100
"""the label of a token without a target"""


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one micro-batch, on the device."""

    inputs: Mapping[str, Any]
    weight: float
    """its share of the step's loss, where the model or the caller computes the mean"""
    rows: Tensor | None = None
    """positions, in [rows * length], of the tokens that have a target"""
    targets: Tensor | None = None


@dataclass(frozen=True, slots=True)
class HostSlice:
    """Rows of one micro-batch, on the host."""

    inputs: Mapping[str, Any]
    num_targets: int
    """labels that count; rows, where there are no labels"""
    rows: Tensor | None = None
    """of a causal language model: positions of the tokens that have a target"""
    targets: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """what the model's arithmetic grows with"""
        rows, length = self.shape
        return rows * length

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and length, by `input_ids`, or by the first tensor of the batch."""
        lead = self.inputs.get("input_ids")
        if not isinstance(lead, Tensor):
            lead = next(t for t in self.inputs.values() if isinstance(t, Tensor) and t.ndim)
        return lead.shape[0], lead.shape[1] if lead.ndim > 1 else 1


def cut(batches: Sequence[Mapping[str, Any]] | Mapping[str, Any], slice_rows: int, *, is_causal: bool) -> list[HostSlice]:
    """All slices of a step, in order. In a causal language model's batch a label is the target of the token before it."""
    if isinstance(batches, Mapping):
        batches = [batches]
    if not batches:
        raise OptionError("batches", batches, "a step needs at least one micro-batch", "Pass a list of dicts of tensors")
    slices = []
    for batch in batches:
        rows = {t.shape[0] for t in batch.values() if isinstance(t, Tensor) and t.ndim}
        if len(rows) != 1:
            shapes = {name: tuple(t.shape) for name, t in batch.items() if isinstance(t, Tensor)}
            raise OptionError(
                "batches", shapes, "tensors of one micro-batch differ in rows", "Give all the same first dimension"
            )
        num = rows.pop()
        for first in range(0, num, slice_rows or num):
            part = {name: _rows(value, first, first + (slice_rows or num)) for name, value in batch.items()}
            slices.append(_slice(part, is_causal))
    return slices


def _rows(value: Any, first: int, stop: int) -> Any:
    return value[first:stop] if isinstance(value, Tensor) and value.ndim else value


def _slice(part: Mapping[str, Any], is_causal: bool) -> HostSlice:
    """Where the targets are, and the batch without what says nothing (a mask that masks nothing)."""
    inputs = {name: value for name, value in part.items() if not (name == "attention_mask" and bool(value.all()))}
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return HostSlice(inputs, next(t.shape[0] for t in inputs.values() if isinstance(t, Tensor) and t.ndim))
    if not is_causal:
        return HostSlice(inputs, int((labels != IGNORED).sum()))
    shifted = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
    rows = torch.nonzero(shifted != IGNORED).flatten()
    return HostSlice(inputs, rows.numel(), rows, shifted[rows])


def on_device(slices: Sequence[HostSlice], device: Device, *, in_tiles: bool) -> list[Slice]:
    """The slices as the model takes them, each with its share of the loss."""
    total = sum(one.num_targets for one in slices)
    result = []
    for one in slices:
        tiled = in_tiles and one.rows is not None
        inputs = {
            name: device.put(value) if isinstance(value, Tensor) else value
            for name, value in one.inputs.items()
            if not (tiled and name == "labels")
        }
        rows = device.put(one.rows) if tiled and one.rows is not None else None
        targets = device.put(one.targets) if tiled and one.targets is not None else None
        result.append(Slice(inputs, one.num_targets / total if total else math.nan, rows, targets))
    return result
