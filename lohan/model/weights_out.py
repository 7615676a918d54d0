"""A model's weights and files, written so that `from_pretrained` and other tools load them.

    plan     the tensors of the checkpoint, named and shaped as the source had them, grouped by what is converted together
    write    shard by shard: the header first, then each group is read, cast, converted and written to its place
    verify   each shard is read back from the drive, and every tensor compared with what was written
    publish  when all shards are on disk, the old weights' index goes, the new shards take their names, the index comes last

A folder is thus never a mixture of two models: if the machine stops in between, it has no index and does not load.
Host memory is bounded by one group of tensors.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lohan import native
from lohan.checksum import checksum
from lohan.errors import ModelError, StoreError
from lohan.model.folder import CONFIG_NAME, GENERATION_CONFIG_NAME, INDEX_NAME, WEIGHTS_NAME
from lohan.model.keys import group_for_export, to_source_format
from lohan.model.load import OpenedModel
from lohan.model.safetensors_file import TensorSpec, lay_out_file, sync_folder
from lohan.model.written_back import verify_tensors

CHUNK_ELEMENTS = 2**20
"""cast and written at a time"""
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of the model that are written together."""

    names: tuple[str, ...]
    dtype: torch.dtype
    files: tuple[TensorSpec, ...]
    """what becomes of them in the checkpoint"""
    as_it_is: bool
    """one tensor that needs no conversion; more than one file name means that the source wrote it as often"""

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.files)


def export(
    opened: OpenedModel,
    read_tensor: Callable[[str], Tensor],
    out_dir: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 10**9,
) -> dict[str, int]:
    """Write the model to a folder, each tensor in the source's dtype, or all in `dtype`; returns the checksums of all tensors.

    `read_tensor` gives a parameter by its name in the model, whole, as fp32 master or as stored; buffers come from the
    module. A master becomes bf16 by rounding half up, which is how lohan's bf16 weights come from it during training.
    """
    folder = Path(out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    shards = _into_shards(list(_parts(opened, dtype)), max_shard_bytes)
    partial = {name: folder / f"{name}.partial" for name in shards}
    checksums: dict[str, int] = {}
    try:
        for name, parts in shards.items():
            of_shard = _write_shard(opened, read_tensor, parts, partial[name])
            verify_tensors(partial[name], of_shard)
            checksums |= of_shard
    except BaseException:
        for path in partial.values():
            path.unlink(missing_ok=True)
        raise
    _publish(folder, shards, partial)
    for name, text in _side_files(opened, dtype).items():
        _write_whole(folder / name, text)
    sync_folder(folder)
    return checksums


def _parts(opened: OpenedModel, dtype: torch.dtype | None) -> Iterator[Part]:
    skipped = set(getattr(opened.model, "_keys_to_ignore_on_save", None) or ())
    for names in group_for_export(opened.model, [name for name in opened.stored if name not in skipped]):
        specs = [opened.stored[name] for name in names]
        out = specs[0].dtype if dtype is None or not specs[0].dtype.is_floating_point else dtype
        if len(names) == 1 and names[0] in opened.source_names:
            files = tuple(TensorSpec(name, out, specs[0].shape) for name in opened.source_names[names[0]])
            yield Part(names, out, files, as_it_is=True)
        else:
            empty = {name: torch.empty(spec.shape, dtype=out, device="meta") for name, spec in zip(names, specs, strict=True)}
            converted = to_source_format(opened.model, empty)
            files = tuple(TensorSpec(name, out, tuple(tensor.shape)) for name, tensor in converted.items())
            yield Part(names, out, files, as_it_is=False)


def _into_shards(parts: list[Part], max_shard_bytes: int) -> dict[str, list[Part]]:
    """Parts in order, in as many files as it takes; a part that is larger than the limit has a file of its own."""
    shards: list[list[Part]] = [[]]
    room = max_shard_bytes
    for part in parts:
        if shards[-1] and part.num_bytes > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(part)
        room -= part.num_bytes
    if len(shards) == 1:
        return {WEIGHTS_NAME: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, start=1)}


def _write_shard(opened: OpenedModel, read_tensor: Callable[[str], Tensor], parts: list[Part], path: Path) -> dict[str, int]:
    """One file, durable on return; the checksum of each of its tensors."""
    header, offsets, num_bytes = lay_out_file(spec for part in parts for spec in part.files)
    checksums: dict[str, int] = {}
    with path.open("wb", buffering=0) as file:
        descriptor = file.fileno()
        _write_at(path, descriptor, 0, memoryview(header))
        os.posix_fallocate(descriptor, 0, num_bytes)
        for part in parts:
            for spec, tensor in _values(opened, read_tensor, part):
                at, checksums[spec.name] = offsets[spec.name], 0
                for chunk in torch.split(tensor.reshape(-1), CHUNK_ELEMENTS):
                    data = memoryview(cast(chunk, part.dtype).view(torch.uint8).numpy().data)
                    _write_at(path, descriptor, at, data)
                    checksums[spec.name] = checksum(data, checksums[spec.name])
                    at += len(data)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    return checksums


def _values(opened: OpenedModel, read_tensor: Callable[[str], Tensor], part: Part) -> Iterator[tuple[TensorSpec, Tensor]]:
    if part.as_it_is:
        tensor = _value(opened, read_tensor, part.names[0])
        yield from ((spec, tensor) for spec in part.files)
        return
    cast_first = {name: cast(_value(opened, read_tensor, name), part.dtype) for name in part.names}
    converted = to_source_format(opened.model, cast_first)
    yield from ((spec, converted.pop(spec.name)) for spec in part.files)


def _value(opened: OpenedModel, read_tensor: Callable[[str], Tensor], name: str) -> Tensor:
    spec = opened.stored[name]
    if name in opened.buffers:
        tensor, stored = opened.model.get_buffer(name), opened.buffers[name]
        if torch.equal(stored.to(tensor.dtype), tensor):
            tensor = stored  # unchanged: what the source had, before it took the model's dtype
    else:
        tensor = read_tensor(name).detach()
    if tuple(tensor.shape) != spec.shape:
        raise ModelError(f"{name} is to be saved with shape {list(spec.shape)}, got {list(tensor.shape)}")
    return tensor


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in `dtype`: fp32 becomes bf16 by rounding half up, other casts are torch's."""
    if tensor.dtype != torch.float32 or dtype != torch.bfloat16:
        return tensor.to(dtype)
    master = tensor.contiguous().view(-1)
    weight = torch.empty(master.shape, dtype=torch.bfloat16)
    rest = torch.empty(min(CHUNK_ELEMENTS, master.numel()), dtype=torch.int16)
    for start in range(0, master.numel(), CHUNK_ELEMENTS):
        values, rounded = master[start : start + CHUNK_ELEMENTS], weight[start : start + CHUNK_ELEMENTS]
        native.split(values, rounded, rest[: len(values)])
        if np.isnan(values.numpy()).any():  # rounding may carry a NaN's bits away into another number
            rounded[values.isnan()] = torch.nan
    return weight.view(tensor.shape)


def _write_at(path: Path, descriptor: int, offset: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        try:
            done += os.pwrite(descriptor, data[done:], offset + done)
        except OSError as error:
            why = error.strerror or "unknown"
            raise StoreError("write", str(path), offset + done, len(data) - done, 0, error.errno, why) from error


def _publish(folder: Path, shards: dict[str, list[Part]], partial: dict[str, Path]) -> None:
    for name in (INDEX_NAME, WEIGHTS_NAME):
        (folder / name).unlink(missing_ok=True)
    sync_folder(folder)
    for name, path in partial.items():
        path.replace(folder / name)
    for path in folder.iterdir():
        if SHARD_NAME.fullmatch(path.name) and path.name not in shards:
            path.unlink()
    sync_folder(folder)
    if len(shards) > 1:
        files = {spec.name: name for name, parts in shards.items() for part in parts for spec in part.files}
        total = sum(part.num_bytes for parts in shards.values() for part in parts)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))}
        _write_whole(folder / INDEX_NAME, json.dumps(index, indent=2).encode() + b"\n")


def _write_whole(path: Path, text: bytes) -> None:
    """A small file, old or new but never half."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _side_files(opened: OpenedModel, dtype: torch.dtype | None) -> dict[str, bytes]:
    """The source's own configuration and tokenizer; for a model that came without files, its configuration as it is now."""
    files = dict(opened.side_files)
    model = opened.model
    if not files and isinstance(model, PreTrainedModel):
        config = deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = opened.source_dtype
        files[CONFIG_NAME] = config.to_json_string().encode()
        if model.can_generate() and model.generation_config is not None:
            files[GENERATION_CONFIG_NAME] = model.generation_config.to_json_string().encode()
    if CONFIG_NAME in files and dtype is not None:
        fields: dict[str, Any] = json.loads(files[CONFIG_NAME])
        fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = str(dtype).removeprefix("torch.")
        files[CONFIG_NAME] = json.dumps(fields, indent=2).encode() + b"\n"
    return files
