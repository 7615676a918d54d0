"""On a GPU too, every placement gives the bits of plain memory, once the kernels themselves are deterministic."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity.cover import pairwise
from tests.parity.harness import ARCHITECTURES, in_memory
from tests.parity.test_placements import ORDER, TIERS, check_placed, name_of

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS looks at it once
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
COVER = pairwise({**ORDER, **TIERS, "device": ("cuda",)})


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("settings", COVER, ids=name_of)
def test_any_two_settings_give_the_bits_of_memory(settings: Mapping[str, Any], tmp_path: Path) -> None:
    check_placed(settings, tmp_path)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_gpu_comes_close_to_the_cpu(architecture: str) -> None:
    """Twenty fp32 steps of two kinds of arithmetic; architectures with dropout draw other numbers and are left out."""
    if architecture == "gpt2":
        pytest.skip("dropout draws from another generator on a GPU")
    on_gpu, on_cpu = (in_memory(architecture, "fp32", clips=True, device=device) for device in ("cuda", "cpu"))
    assert on_gpu.losses == pytest.approx(on_cpu.losses, rel=1e-3)
    assert on_gpu.norms == pytest.approx(on_cpu.norms, rel=1e-2)
