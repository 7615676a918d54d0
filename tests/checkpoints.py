"""Folders with tiny models, as Transformers writes them, and what is in them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from lohan.model.load import OpenedModel
from tests.tiny import causal_model


def saved(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16, **fields: Any) -> PreTrainedModel:
    """A tiny model, written by Transformers in several shards."""
    model = causal_model(name, dtype, **fields)
    model.save_pretrained(folder, max_shard_size="40KB")
    (folder / "tokenizer.json").write_text("{}")
    return model


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """What all weight files of a folder hold, as the safetensors library reads it."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def taken(opened: OpenedModel) -> dict[str, Tensor]:
    """Every tensor of the source."""
    return dict(opened.values())


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Whether names, dtypes, shapes and every bit are the same."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    kinds = {n: (t.dtype, t.shape) for n, t in one.items()} == {n: (t.dtype, t.shape) for n, t in other.items()}
    return kinds and all(torch.equal(bits(one[name]), bits(other[name])) for name in one)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a folder that Transformers wrote, and write them into one file."""
    tensors = tensors_of(folder)
    change(tensors)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
