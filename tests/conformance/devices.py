"""The devices that the conformance suite runs on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lohan.device import open_device
from lohan.device.protocol import Device

MEMORY_BYTES = 256 * 2**20
"""of which cuBLAS takes 32 MiB for itself"""
ACCELERATORS = ["emulated", pytest.param("cuda", marks=pytest.mark.cuda)]
"""devices with memory of their own"""
DEVICES = ["cpu", *ACCELERATORS]


def opened(name: str) -> Iterator[Device]:
    """The body of a fixture: the device called `name`, or a skipped test."""
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = open_device(name, None if name == "cpu" else MEMORY_BYTES)
    yield device
    device.close()
