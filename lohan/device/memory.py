"""Aligned pieces of ordinary memory: what slabs are made of where a device has no allocator of its own."""

from __future__ import annotations

import torch
from torch import Tensor

SLAB_ALIGN_BYTES = 256


def aligned_bytes(nbytes: int) -> Tensor:
    """`nbytes` of uninitialised host memory (uint8) that starts at a multiple of SLAB_ALIGN_BYTES."""
    raw = torch.empty(nbytes + SLAB_ALIGN_BYTES, dtype=torch.uint8)
    start = -raw.data_ptr() % SLAB_ALIGN_BYTES
    return raw[start : start + nbytes]
