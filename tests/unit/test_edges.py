"""Edges in pieces and the loss in tiles against plain torch: weights in slots, but no schedule."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lohan.model.shape import UnitKind
from lohan.model.units import ModelMap, discover
from lohan.run.edges import EmbeddingCall, HeadLogitsCall, HeadLossCall
from lohan.run.sites import SiteSpec
from lohan.schedule.ops import Kind, Lane, Op

VOCABULARY, WIDTH, ROWS = 300, 32, 128


class Edges(nn.Module):
    """An embedding and a head, in pieces of 128 rows."""

    def __init__(self, bias: bool, padding: int | None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, padding)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=bias)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Step:
    """All units in memory at once; a compute operation finds its slots at once."""

    def __init__(self, model: Edges, dtype: torch.dtype, num_slices: int) -> None:
        self.map: ModelMap = discover(model, piece_elements=ROWS * (WIDTH + 1))
        self.run: Any = self
        self.dtype, self.num_slices = dtype, num_slices
        self.present: dict[int, set[int]] = {}
        self.weights, self.gradients = {}, {}
        self.boundary = torch.zeros(1 << 16, dtype=torch.uint8)
        named = dict(model.named_parameters())
        for unit in self.map.units:
            weights = torch.zeros(unit.shape.trainable_elements, dtype=dtype)
            for tensor in unit.shape.tensors:
                rows = named[tensor.name].detach()[tensor.first_row : tensor.first_row + tensor.shape[0]]
                weights[tensor.offset : tensor.end] = rows.flatten().to(dtype)
            self.weights[unit.index] = weights
            self.gradients[unit.index] = torch.full_like(weights, torch.nan)

    @contextmanager
    def compute(self, kind: Kind, site: int, unit: int) -> Iterator[tuple[Op, list[Tensor], list[Tensor]]]:
        op = Op(0, kind, Lane.COMPUTE, unit, site, -1, (), (), (), 0)
        weights = self.weights[unit].view(torch.uint8)
        if kind is Kind.FORWARD:
            yield op, [weights], [self.boundary]
        else:
            sums = [torch.full((weights.numel() * 2,), 255, dtype=torch.uint8)] if self.num_slices > 1 else []
            yield op, [weights, self.boundary], [self.gradients[unit].view(torch.uint8), *sums]

    def seed(self, slice_index: int, place: int) -> None: ...

    def site(self, kind: UnitKind) -> SiteSpec:
        site = next(site for site in self.map.sites if site.kind is kind)
        bindings = {
            unit: [([id(t) for t in self.map.units[unit].shape.tensors].index(id(b.tensor)), b) for u, b in pairs if u == unit]
            for pairs in [list(self.map.bindings(site))]
            for unit in site.units
        }
        shape: Any = site  # of a SiteShape, a call looks at name, kind and units only
        return SiteSpec(0, shape, site.module, site.module.forward, bindings, [True])

    def gradient(self, name: str) -> Tensor:
        """A parameter's gradient, from the pieces that have one."""
        parts = []
        for unit in self.map.units:
            for index, tensor in enumerate(unit.shape.tensors):
                if tensor.name == name:
                    assert index in self.present[unit.index]
                    parts.append(self.gradients[unit.index][tensor.offset : tensor.end].view(tensor.shape))
        assert len(parts) == 3
        return torch.cat(parts)


def weights_of(model: Edges, dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: p.detach().to(dtype).requires_grad_() for name, p in model.named_parameters()}


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("padding", [None, 5, 200])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_embedding_in_pieces(dtype: torch.dtype, padding: int | None, num_slices: int) -> None:
    torch.manual_seed(0)
    model = Edges(False, padding)
    ids = [torch.randint(0, VOCABULARY, (2, 40)).index_fill(1, torch.tensor([3]), padding or 0) for _ in range(num_slices)]
    slopes = [torch.randn(2, 40, WIDTH, dtype=dtype) for _ in ids]
    step = Step(model, dtype, num_slices)
    call = EmbeddingCall(step, step.site(UnitKind.EMBEDDING), ids)
    outputs = call.forward([])
    weight = weights_of(model, dtype)["embed.weight"]
    total = torch.zeros(weight.shape)
    for one, slope, output in zip(ids, slopes, outputs, strict=True):
        expected = functional.embedding(one, weight, padding)
        assert torch.equal(output, expected.detach())
        (gradient,) = torch.autograd.grad(expected, weight, slope)
        total += gradient
    assert call.backward(slopes) == []
    assert torch.equal(step.gradient("embed.weight"), total.to(dtype))
    assert model.embed.padding_idx == padding


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_a_head_in_pieces(num_slices: int, bias: bool) -> None:
    """The logits are those of the whole head; its hidden states' gradient is another sum, in fp32."""
    torch.manual_seed(0)
    model = Edges(bias, None)
    hidden = [torch.randn(3, 4, WIDTH, requires_grad=True) for _ in range(num_slices)]
    slopes = [torch.randn(3, 4, VOCABULARY) for _ in hidden]
    step = Step(model, torch.float32, num_slices)
    call = HeadLogitsCall(step, step.site(UnitKind.HEAD))
    weights = weights_of(model, torch.float32)
    expected = [functional.linear(h, weights["head.weight"], weights.get("head.bias")) for h in hidden]
    outputs = call.forward([h.detach() for h in hidden])
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted.detach())
    torch.autograd.backward(expected, slopes)
    for gradient, one in zip(call.backward(slopes), hidden, strict=True):
        torch.testing.assert_close(gradient, one.grad)
    for name in ["head.weight", *(["head.bias"] if bias else [])]:
        torch.testing.assert_close(step.gradient(name), weights[name].grad)


def capped(logits: Tensor) -> Tensor:
    return torch.tanh(logits / 2) * 2


@pytest.mark.parametrize("tile", [32, 128, 4096])
@pytest.mark.parametrize("transform", [lambda logits: logits, capped], ids=["plain", "soft-cap"])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_the_loss_in_tiles(num_slices: int, transform: Any, tile: int) -> None:
    torch.manual_seed(0)
    model = Edges(True, None)
    model.head.weight.data.mul_(5)
    hidden = [torch.randn(9 + i, WIDTH, requires_grad=True) for i in range(num_slices)]
    targets = [torch.randint(0, VOCABULARY, (len(h),)) for h in hidden]
    step = Step(model, torch.float32, num_slices)
    call = HeadLossCall(step, step.site(UnitKind.HEAD), targets, scale=0.05, tile=tile, transform=transform)
    weights = weights_of(model, torch.float32)
    losses = call.forward([h.detach() for h in hidden])
    for loss, one, target in zip(losses, hidden, targets, strict=True):
        logits = transform(functional.linear(one, weights["head.weight"], weights["head.bias"]))
        expected = functional.cross_entropy(logits, target, reduction="sum") * 0.05
        torch.testing.assert_close(loss, expected.detach())
        (expected * 3).backward()
    gradients = call.backward([torch.tensor(3.0)] * num_slices)
    for gradient, one in zip(gradients, hidden, strict=True):
        torch.testing.assert_close(gradient, one.grad)
    for name in ("head.weight", "head.bias"):
        torch.testing.assert_close(step.gradient(name), weights[name].grad)


def test_extreme_logits_overflow_nowhere() -> None:
    """The running maximum keeps every exponential at 1 or below, whichever tile holds the largest."""
    for large in (5, 290):
        model = Edges(False, None)
        with torch.no_grad():
            model.head.weight.zero_()[large] = 1e4
        step = Step(model, torch.float32, 1)
        call = HeadLossCall(
            step, step.site(UnitKind.HEAD), [torch.tensor([large, 7])], scale=1.0, tile=32, transform=lambda logits: logits
        )
        (loss,) = call.forward([torch.ones(2, WIDTH)])
        assert float(loss) == pytest.approx(WIDTH * 1e4)
        (gradient,) = call.backward([torch.tensor(1.0)])
        assert gradient is not None and gradient.isfinite().all()
