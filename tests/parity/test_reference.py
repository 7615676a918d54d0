"""The engine in memory, bit for bit against a plain reference that knows only the documented rules, and against stock torch."""

from __future__ import annotations

import pytest
import torch

from lohan.optim.adamw import AdamW
from lohan.optim.base import Optimizer
from tests.parity.harness import (
    ARCHITECTURES,
    OPTIMIZER,
    TILE,
    Outcome,
    in_memory,
    limit_of,
    steps,
    tiny_model,
)
from tests.parity.reference import Reference

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def plainly(
    architecture: str, dtype: str, optimizer: Optimizer, limit: float | None, num_steps: int, slice_rows: int = 0
) -> Outcome:
    reference = Reference(
        tiny_model(architecture),
        optimizer,
        dtype=DTYPES[dtype],
        max_grad_norm=limit,
        loss_tile=TILE,
        slice_rows=slice_rows,
        seed=3,
    )
    results = [reference.step(one) for one in steps(num_steps)]
    norms = [norm for _, norm in results]
    clipped = [limit is not None and norm > limit for norm in norms]
    return Outcome([loss for loss, _ in results], norms, clipped, reference.masters)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_memory_is_the_documented_arithmetic(architecture: str, dtype: str) -> None:
    expected = plainly(
        architecture, dtype, AdamW(OPTIMIZER.lr, weight_decay=0.1, kernel="reference"), limit_of(architecture), 20
    )
    assert any(expected.clipped) and not all(expected.clipped)
    in_memory(architecture, dtype, clips=True).assert_same(expected)
