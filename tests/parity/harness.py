"""What the parity tests share: models, data, one run of the engine, and a comparison without tolerance."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lohan import AdamW, Engine
from lohan.model.units import discover
from lohan.report import StepReport
from lohan.run.passes import LossFn
from lohan.ssd.memory_store import MemoryStore
from tests.tiny import causal_model

NUM_STEPS = 20
VOCABULARY = 1000
"""larger than a block of most of the tiny models, so that embedding and head come in pieces"""
TILE = 128
ARCHITECTURES = ("llama", "llama-tied", "qwen3", "gpt2", "mistral", "gemma", "gemma3", "mixtral", "phi")
LIMITS = {"qwen3": 2.42, "gemma": 1.75, "gemma3": 4.0, "phi": 2.3}
"""norms at which some of the steps are clipped and others are not; 2.05 for the others"""
OPTIMIZER = AdamW(lr=1e-3, weight_decay=0.1)

TOLERANCE = 1e-5
"""relative, of stock torch in fp32"""
Batch = dict[str, Tensor]


def tiny_model(architecture: str, **fields: Any) -> PreTrainedModel:
    return causal_model(architecture, vocab_size=VOCABULARY, **fields)


def limit_of(architecture: str) -> float:
    return LIMITS.get(architecture, 2.05)


def batch(rows: int, length: int, seed: int, vocabulary: int = VOCABULARY) -> Batch:
    """Random tokens, a fifth of them without a target."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, vocabulary, (rows, length), generator=generator)
    ignored = torch.rand(rows, length, generator=generator) < 0.2
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


@cache
def steps(num: int = NUM_STEPS) -> list[list[Batch]]:
    """Two micro-batches of unequal length a step."""
    return [[batch(2, 11, 2 * step), batch(1, 7, 2 * step + 1)] for step in range(num)]


@dataclass(frozen=True)
class Outcome:
    """What a run leaves behind."""

    losses: list[float]
    norms: list[float]
    clipped: list[bool]
    masters: dict[str, Tensor]

    def assert_same(self, other: Outcome) -> None:
        """Bit for bit."""
        assert self.losses == other.losses
        assert self.norms == other.norms
        assert self.clipped == other.clipped
        different = [name for name, master in self.masters.items() if not torch.equal(master, other.masters[name])]
        assert not different
        assert self.masters.keys() == other.masters.keys()


def stock(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    limit: float,
    data: Sequence[Sequence[Batch]],
    loss_fn: LossFn = lambda model, batch: model(**batch).loss,
    count: Callable[[Batch], int] = lambda batch: int((batch["labels"][:, 1:] >= 0).sum()),
) -> Outcome:
    """The loop that everybody writes, with the loss divided by the targets of the whole step."""
    losses, norms = [], []
    for one in data:
        optimizer.zero_grad()
        counts = [count(batch) for batch in one]
        parts = [loss_fn(model, batch) * count / sum(counts) for batch, count in zip(one, counts, strict=True)]
        for part in parts:
            part.backward()
        losses.append(float(sum(part.detach() for part in parts)))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return Outcome(losses, norms, [norm > limit for norm in norms], masters_of(model))


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters with and without decay, for an optimizer of torch."""
    decays = {t.name: t.decay for unit in discover(model).units for t in unit.shape.tensors}
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if decays[name]]},
        {"params": [p for name, p in named if not decays[name]], "weight_decay": 0.0},
    ]


def assert_close(outcome: Outcome, expected: Outcome, began: Mapping[str, Tensor]) -> None:
    """The weight vector within TOLERANCE of itself, and by far closer than the way that it went."""
    assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert outcome.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    ends = outcome.masters, expected.masters, began
    ours, theirs, before = (torch.cat([masters[name].flatten().double() for name in began]) for masters in ends)
    difference = ours - theirs
    assert difference.norm() <= TOLERANCE * theirs.norm()
    assert difference.abs().max() <= TOLERANCE * theirs.abs().max()
    assert difference.norm() <= 1e-3 * (theirs - before).norm()


def memory_store(nbytes: int, name: str, vanishes: bool) -> MemoryStore:
    return MemoryStore(nbytes, threads=1)


def open_engine(model: Any, **options: Any) -> Engine:
    """An engine with the settings of these tests, unless told otherwise."""
    settings: dict[str, Any] = {
        "host_memory": "1GiB",
        "device": "cpu",
        "optimizer": OPTIMIZER,
        "loss_tile": TILE,
        "make_store": memory_store,
        "seed": 3,
    }
    return Engine(model, **{**settings, **options})


def train(engine: Engine, data: Sequence[Sequence[Mapping[str, Any]]], **options: Any) -> Outcome:
    """All steps, and what came out."""
    reports: list[StepReport] = [engine.step(one, **options) for one in data]
    return outcome_of(engine, reports)


def outcome_of(engine: Engine, reports: Sequence[StepReport]) -> Outcome:
    masters = {name: engine.read_parameter(name).float() for name in engine.map.pieces()}
    return Outcome([r.loss for r in reports], [r.grad_norm for r in reports], [r.clipped for r in reports], masters)


@cache
def in_memory(architecture: str, dtype: str, clips: bool, device: str = "cpu") -> Outcome:
    """What every placement has to reproduce on a device of the same arithmetic."""
    settings: dict[str, Any] = {"dtype": dtype, "placement": "memory", "device": device}
    limit = limit_of(architecture) if clips else None
    with open_engine(tiny_model(architecture), max_grad_norm=limit, **settings) as engine:
        return train(engine, steps())
