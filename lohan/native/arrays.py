"""Torch tensors as kernels see them. A kernel would write past the end of a wrong one without a word, so each is looked at."""

from __future__ import annotations

import torch
from torch import Tensor

from lohan.errors import NativeError


def address_of(name: str, tensor: Tensor, dtype: torch.dtype, num: int) -> int:
    """The tensor's address, once it is known to hold what a kernel expects."""
    is_flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.device.type == "cpu"
    if not is_flat or tensor.dtype != dtype or tensor.numel() != num:
        raise NativeError(
            f"{name}: a kernel wants {num} contiguous {dtype} on the CPU, got {tensor.dtype} of shape "
            f"{tuple(tensor.shape)}, stride {tensor.stride()}, on {tensor.device}"
        )
    return tensor.data_ptr()
