"""Edges that visit several units: an embedding in pieces, a head in pieces, and the head with the loss inside.

The loss never sees all logits. Forward, tile by tile of the vocabulary: the running maximum, the sum of exponentials and the
target's logit of every token, in fp32. Backward, tiles in reverse: the tile's logits again, softmax minus one-hot, and from
there autograd to the tile's rows and to the hidden states, whose gradient is summed in fp32 over the tiles. Tiles are counted
from the first row of a piece; pieces follow from the model's shape alone, so no placement changes a bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from lohan.run.boundaries import BoundaryWriter, Kept
from lohan.run.logits import Transform
from lohan.run.sites import SiteSpec, Steps, backward_visit, differentiate, forward_visit, places
from lohan.run.weights import GradientSink, bound


class EmbeddingCall:
    """An embedding in pieces: each gives the rows that it holds."""

    def __init__(self, step: Steps, site: SiteSpec, ids: list[Tensor]) -> None:
        self.step, self.site, self.ids = step, site, ids

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        outputs: list[Tensor | None] = [None] * len(self.ids)
        for unit in self.site.shape.units:
            with forward_visit(self.step, self.site, unit) as (memory, _):
                for index, ids in enumerate(self.ids):
                    inside, rows = self._rows(unit, ids, memory.weights[0])
                    before = outputs[index]
                    outputs[index] = rows if before is None else torch.where(inside, rows, before)
        return tuple(output for output in outputs if output is not None)

    def _rows(self, unit: int, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Which tokens this piece holds, and a row for every token: the right one for these."""
        tensor = self.step.map.units[unit].shape.tensors[0]
        local = ids - tensor.first_row
        inside = (local >= 0) & (local < tensor.shape[0])
        with bound(places(self.site, unit, [weight])), _padding(self.site.module, tensor.first_row, tensor.shape[0]):
            return inside.unsqueeze(-1), self.site.forward(local.clamp(0, tensor.shape[0] - 1))

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        for unit in reversed(self.site.shape.units):
            with backward_visit(self.step, self.site, unit) as (memory, sink):
                for ids, gradient in zip(self.ids, gradients, strict=True):
                    if sink is None or gradient is None:
                        continue
                    leaf = sink.leaf(0, memory.weights[0])
                    with torch.enable_grad():
                        inside, rows = self._rows(unit, ids, leaf)
                        differentiate([rows], [torch.where(inside, gradient, 0)], [leaf])
        return []


@contextmanager
def _padding(module: torch.nn.Module, first_row: int, num_rows: int) -> Iterator[None]:
    """The row without a gradient, counted within the piece."""
    whole = getattr(module, "padding_idx", None)
    if whole is None:
        yield
        return
    local = whole - first_row
    module.padding_idx = local if 0 <= local < num_rows else None  # type: ignore[assignment]
    try:
        yield
    finally:
        module.padding_idx = whole


@dataclass(frozen=True, slots=True)
class _Rows:
    """A piece of the head: its rows of weight and bias."""

    first: int
    tensors: dict[str, tuple[int, Tensor]]
    """by attribute: position in the unit, view"""

    @property
    def num(self) -> int:
        return self.tensors["weight"][1].shape[0]

    def linear(self, hidden: Tensor, leaves: dict[str, Tensor]) -> Tensor:
        return functional.linear(hidden, leaves["weight"], leaves.get("bias"))


def _head_rows(step: Steps, site: SiteSpec, unit: int, weights: Sequence[Tensor]) -> _Rows:
    found = {binding.attribute: (index, weights[index]) for index, binding in site.bindings[unit]}
    return _Rows(step.map.units[unit].shape.tensors[0].first_row, found)


class _HeadCall:
    """What both ways of running a head have in common: hidden states in, kept as the boundary; pieces of weights."""

    def __init__(self, step: Steps, site: SiteSpec) -> None:
        self.step, self.site = step, site
        self.kept: list[Kept] = []

    def pieces(self, hidden: Sequence[Tensor]) -> Iterator[_Rows]:
        """Forward through the pieces; the first keeps the hidden states."""
        for number, unit in enumerate(self.site.shape.units):
            with forward_visit(self.step, self.site, unit) as (memory, slot):
                if not number:
                    keeper = BoundaryWriter(slot, self.site.shape.name)
                    self.kept = [keeper.keep(h) for h in hidden]
                yield _head_rows(self.step, self.site, unit, memory.weights)

    def add(self, sums: list[Tensor | None], index: int, gradient: Tensor | None) -> None:
        """Add to a slice's gradient of the hidden states, in fp32."""
        before = sums[index]
        if gradient is not None:
            sums[index] = gradient.float() if before is None else before.add_(gradient)


class HeadLogitsCall(_HeadCall):
    """A head in pieces that returns all logits, as the model's own."""

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        parts: list[list[Tensor]] = [[] for _ in inputs]
        for rows in self.pieces(inputs):
            for part, hidden in zip(parts, inputs, strict=True):
                part.append(rows.linear(hidden, {name: view for name, (_, view) in rows.tensors.items()}))
        return tuple(torch.cat(part, dim=-1) for part in parts)

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        sums: list[Tensor | None] = [None] * len(gradients)
        for unit in reversed(self.site.shape.units):
            with backward_visit(self.step, self.site, unit) as (memory, sink):
                rows = _head_rows(self.step, self.site, unit, memory.weights)
                for index, gradient in enumerate(gradients):
                    if gradient is None:
                        continue
                    hidden = self.kept[index].find(memory.others[0])
                    leaves = {n: sink.leaf(i, v) if sink is not None else v for n, (i, v) in rows.tensors.items()}
                    with torch.enable_grad():
                        logits = rows.linear(hidden, leaves)
                        part = gradient[..., rows.first : rows.first + rows.num]
                        differentiate([logits], [part], [hidden, *(v for v in leaves.values() if v.requires_grad)])
                    self.add(sums, index, hidden.grad)
        return [s if s is None else s.to(self.step.dtype) for s in sums]


@dataclass(slots=True)
class _Softmax:
    """Of every token of a slice, in fp32: the largest logit so far, the sum of exponentials below it, the target's logit."""

    largest: Tensor
    total: Tensor
    target: Tensor

    @staticmethod
    def begin(targets: Tensor) -> _Softmax:
        zero = torch.zeros(targets.shape, dtype=torch.float32, device=targets.device)
        return _Softmax(torch.full_like(zero, float("-inf")), zero, torch.zeros_like(zero))

    def add(self, logits: Tensor, targets: Tensor, first: int) -> None:
        """Take in the tile of logits [tokens, rows] that begins at row `first` of the vocabulary."""
        largest = torch.maximum(self.largest, logits.amax(-1))
        self.total = self.total * torch.exp(self.largest - largest) + torch.exp(logits - largest.unsqueeze(-1)).sum(-1)
        self.largest = largest
        inside, local = _locate(targets, first, logits.shape[-1])
        self.target = torch.where(inside, logits.gather(-1, local.unsqueeze(-1)).squeeze(-1), self.target)

    def log_total(self) -> Tensor:
        return self.largest + torch.log(self.total)


def _locate(targets: Tensor, first: int, num: int) -> tuple[Tensor, Tensor]:
    """Which targets lie in rows [first, first + num), and where; any row for the others."""
    local = targets - first
    return (local >= 0) & (local < num), local.clamp(0, num - 1)


class HeadLossCall(_HeadCall):
    """A head with cross-entropy inside: hidden states [tokens, hidden] of tokens with a target -> their summed, scaled loss."""

    def __init__(
        self, step: Steps, site: SiteSpec, targets: list[Tensor], *, scale: float, tile: int, transform: Transform
    ) -> None:
        super().__init__(step, site)
        self.targets, self.scale, self.tile, self.transform = targets, scale, tile, transform
        self.log_totals: list[Tensor] = []

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        softmaxes = [_Softmax.begin(targets) for targets in self.targets]
        for rows in self.pieces(inputs):
            views = {name: view for name, (_, view) in rows.tensors.items()}
            for softmax, hidden, targets in zip(softmaxes, inputs, self.targets, strict=True):
                for tile in self._tiles(rows.num):
                    softmax.add(self._logits(rows, hidden, views, tile), targets, rows.first + tile.start)
        self.log_totals = [softmax.log_total() for softmax in softmaxes]
        losses = zip(self.log_totals, softmaxes, strict=True)
        return tuple((log_total - softmax.target).sum() * self.scale for log_total, softmax in losses)

    def _tiles(self, num_rows: int) -> list[slice]:
        return [slice(first, min(first + self.tile, num_rows)) for first in range(0, num_rows, self.tile)]

    def _logits(self, rows: _Rows, hidden: Tensor, leaves: dict[str, Tensor], tile: slice) -> Tensor:
        return self.transform(rows.linear(hidden, {name: view[tile] for name, view in leaves.items()})).float()

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        sums: list[Tensor | None] = [None] * len(gradients)
        for unit in reversed(self.site.shape.units):
            with backward_visit(self.step, self.site, unit) as (memory, sink):
                rows = _head_rows(self.step, self.site, unit, memory.weights)
                for index, gradient in enumerate(gradients):
                    if gradient is None:
                        continue
                    for tile in reversed(self._tiles(rows.num)):
                        hidden = self.kept[index].find(memory.others[0])
                        self._tile_backward(rows, hidden, tile, index, gradient, sink)
                        self.add(sums, index, hidden.grad)
        return [s if s is None else s.to(self.step.dtype) for s in sums]

    def _tile_backward(
        self, rows: _Rows, hidden: Tensor, tile: slice, index: int, gradient: Tensor, sink: GradientSink | None
    ) -> None:
        leaves = {name: view[tile].detach().requires_grad_(sink is not None) for name, (_, view) in rows.tensors.items()}
        with torch.enable_grad():
            logits = self.transform(rows.linear(hidden, leaves)).float()
        slope = torch.exp(logits.detach() - self.log_totals[index].unsqueeze(-1))
        inside, local = _locate(self.targets[index], rows.first + tile.start, logits.shape[-1])
        slope.scatter_add_(-1, local.unsqueeze(-1), -inside.float().unsqueeze(-1))
        slope.mul_(gradient * self.scale)
        differentiate([logits], [slope], [hidden, *(v for v in leaves.values() if v.requires_grad)])
        for name, leaf in leaves.items():
            if sink is not None and leaf.grad is not None:
                sink.add(rows.tensors[name][0], leaf.grad, tile)
