"""Stock torch as a second oracle, in fp32: the unmodified model, `torch.optim.AdamW`, `clip_grad_norm_`.

Sums are in another order there, so this is no comparison of bits. Adam turns the noise of a gradient that is all but zero (the
bias of a key projection has none at all in exact arithmetic) into whole steps: at lr=1e-3 the largest such difference after
20 steps is 1.3e-4 of the largest weight (Phi), at the default of 2e-5 it is below the tolerance.
"""

from __future__ import annotations

import pytest
import torch

from lohan import SGD, AdamW
from tests.parity.harness import (
    ARCHITECTURES,
    assert_close,
    groups_of,
    limit_of,
    masters_of,
    open_engine,
    steps,
    stock,
    tiny_model,
    train,
)

LR = 2e-5


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
