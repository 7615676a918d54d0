"""Stock torch as a second oracle, in fp32: the unmodified model, `torch.optim.AdamW`, `clip_grad_norm_`.

Sums are in another order there, so this is no comparison of bits. Adam turns the noise of a gradient that is all but zero (the
bias of a key projection has none at all in exact arithmetic) into whole steps: at lr=1e-3 the largest such difference after
20 steps is 1.3e-4 of the largest weight (Phi), at the default of 2e-5 it is below the tolerance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lohan import SGD, AdamW
from lohan.model.units import discover
from tests.parity.harness import ARCHITECTURES, Outcome, limit_of, open_engine, steps, tiny_model, train

TOLERANCE = 1e-5
LR = 2e-5


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters with and without decay."""
    decays = {t.name: t.decay for unit in discover(model).units for t in unit.shape.tensors}
    named = list(model.named_parameters())
    return [
        {"params": [p for name, p in named if decays[name]]},
        {"params": [p for name, p in named if not decays[name]], "weight_decay": 0.0},
    ]


def stock(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, limit: float, data: Sequence[Sequence[Mapping[str, Tensor]]]
) -> Outcome:
    """The loop that everybody writes, with the loss divided by the targets of the whole step."""
    losses, norms = [], []
    for one in data:
        optimizer.zero_grad()
        counts = [int((batch["labels"][:, 1:] >= 0).sum()) for batch in one]
        parts = [model(**batch).loss * count / sum(counts) for batch, count in zip(one, counts, strict=True)]
        for part in parts:
            part.backward()
        losses.append(float(sum(part.detach() for part in parts)))
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit)))
        optimizer.step()
    return Outcome(losses, norms, [norm > limit for norm in norms], {n: p.detach() for n, p in model.named_parameters()})


def assert_close(outcome: Outcome, expected: Outcome, began: Mapping[str, Tensor]) -> None:
    """The weight vector within TOLERANCE of itself, and by far closer than the way that it went."""
    assert outcome.losses == pytest.approx(expected.losses, rel=TOLERANCE)
    assert outcome.norms == pytest.approx(expected.norms, rel=TOLERANCE)
    ours, theirs, before = (
        torch.cat([masters[name].flatten().double() for name in began])
        for masters in (outcome.masters, expected.masters, began)
    )
    difference = ours - theirs
    assert difference.norm() <= TOLERANCE * theirs.norm()
    assert difference.abs().max() <= TOLERANCE * theirs.abs().max()
    assert difference.norm() <= 1e-3 * (theirs - before).norm()


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_as_stock_torch_trains(architecture: str) -> None:
    """Without dropout, for which stock torch draws other random numbers."""
    limit = limit_of(architecture)
    quiet = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0} if architecture == "gpt2" else {}
    model = tiny_model(architecture, **quiet).train()
    began = masters_of(model)
    expected = stock(model, torch.optim.AdamW(groups_of(model), lr=LR, weight_decay=0.01), limit, steps())
    assert any(expected.clipped) and not all(expected.clipped)
    settings = {"dtype": "fp32", "placement": "memory", "max_grad_norm": limit, "optimizer": AdamW(lr=LR, weight_decay=0.01)}
    with open_engine(tiny_model(architecture, **quiet), **settings) as engine:
        assert_close(train(engine, steps()), expected, began)


def test_sgd_as_stock_torch() -> None:
    model = tiny_model("llama").train()
    began = masters_of(model)
    optimizer = torch.optim.SGD(groups_of(model), lr=0.05, momentum=0.9, weight_decay=0.01)
    expected = stock(model, optimizer, limit_of("llama"), steps())
    settings = {"optimizer": SGD(lr=0.05, momentum=0.9, weight_decay=0.01), "max_grad_norm": limit_of("llama")}
    with open_engine(tiny_model("llama"), dtype="fp32", **settings) as engine:
        assert_close(train(engine, steps()), expected, began)
