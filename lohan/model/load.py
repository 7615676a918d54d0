"""Opening a model: a folder, a hub name, a configuration or a module becomes a module and the source of its weights.

From files:
    1. resolve   a hub name becomes a folder of the hub's cache; the weight files are found and their headers checked
    2. refuse    what cannot be trained or is not safe to read (folder.py, safetensors_file.py)
    3. build     the module as Transformers builds it, its parameters on the meta device, its buffers real
    4. match     every tensor of the files to the module; then persistent buffers are read, and parameters wait in `tensors`

A module that holds its weights already is its own source.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from lohan.errors import ModelError
from lohan.model.file_reader import check_equal, read_tensor
from lohan.model.folder import CONFIG_NAME, check_layers, read_config, read_entries, read_side_files, resolve, sensible
from lohan.model.keys import Group, canonical_names, match_keys
from lohan.model.safetensors_file import Entry, TensorSpec
from lohan.model.weights_in import FileTensors, ModuleTensors, TensorSource, whole_tensors


@dataclass
class OpenedModel:
    """A model, where its weights come from, and what is needed to write it as it was."""

    model: nn.Module
    """from files: parameters on the meta device, buffers real"""
    tensors: TensorSource
    config: PreTrainedConfig | None
    source_dtype: torch.dtype
    """of most of the weights"""
    stored: dict[str, TensorSpec]
    """parameters and persistent buffers by name, in the model's order, in the dtype in which they are stored"""
    source_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """names in the checkpoint of tensors that are stored as the model holds them; two where tied weights were written twice"""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    """persistent buffers as they were stored, before they took the model's dtype"""
    side_files: dict[str, bytes] = field(default_factory=dict)
    """configuration and tokenizer files"""
    keep_fp32: frozenset[str] = frozenset()
    """parameters that Transformers holds in fp32 whatever the dtype asked for"""

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, as it is stored, while the next one is read."""
        return whole_tensors(self.tensors, {name: self.stored[name].shape for name in self.tensors.dtypes})

    @property
    def tokenizer_files(self) -> dict[str, bytes]:
        return {name: text for name, text in self.side_files.items() if name not in ("config.json", "generation_config.json")}


def open_model(source: str | Path | PreTrainedConfig | nn.Module, *, dtype: torch.dtype | None = None) -> OpenedModel:
    """Open a folder, a hub name, a configuration (random weights, in memory) or a module that holds its weights.

    `dtype` is the one to compute in, the source's by default; it decides the dtype of parameters and buffers as in
    `from_pretrained`, and leaves what `tensors` yields as it is stored. A module is taken as it is.
    """
    if isinstance(source, PreTrainedConfig):
        return _from_module(_from_config(source, dtype or torch.float32))
    if isinstance(source, nn.Module):
        return _from_module(source)
    return _from_files(resolve(source), dtype)


def _from_module(module: nn.Module) -> OpenedModel:
    empty = [name for name, p in module.named_parameters() if p.is_meta]
    if empty:
        raise ModelError(f"{len(empty)} parameters, {empty[0]} first, have no weights in memory; pass the folder that has them")
    names = canonical_names(module)
    state = {name: tensor for name, tensor in module.state_dict().items() if names.get(name, name) == name}
    stored = {name: TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    config = module.config if isinstance(module, PreTrainedModel) else None
    opened = OpenedModel(module, ModuleTensors(module), config, _main_dtype(stored.values()), stored)
    opened.buffers = {name: tensor.clone() for name, tensor in state.items() if name not in names}
    return opened


def _from_files(folder: Path, dtype: torch.dtype | None) -> OpenedModel:
    config, entries = read_config(folder), read_entries(folder)
    check_layers(folder / CONFIG_NAME, config.to_dict(), len(entries))
    source_dtype = _main_dtype(entries.values())
    with sensible(folder / CONFIG_NAME):
        model = build_on_meta(config, dtype or source_dtype)
    names, expected = canonical_names(model), model.state_dict()
    fp32 = _fp32_pattern(model, dtype or source_dtype)
    opened = OpenedModel(model, ModuleTensors(model), config, source_dtype, {}, side_files=read_side_files(folder))
    opened.keep_fp32 = frozenset(name for name in names.values() if fp32.search(name))

    order = {name: index for index, name in enumerate(expected)}
    groups = sorted(match_keys(model, entries), key=lambda group: min(order[names.get(t, t)] for t in group.targets))
    wanted: dict[str, Group] = {}
    for group in groups:
        entry = group.sources[0].entry
        targets = [names.get(target, target) for target in group.targets]
        for target in targets:
            opened.stored[target] = TensorSpec(target, entry.dtype, tuple(expected[target].shape))
        if group.converter is None:
            opened.source_names[targets[0]] = (*opened.source_names.get(targets[0], ()), entry.name)
        if targets[0] not in names:
            _set_buffers(opened, group.convert(model, [read_tensor(s.entry) for s in group.sources]), fp32)
        elif targets[0] in wanted:
            check_equal(wanted[targets[0]].sources[0].entry, entry)
        else:
            _check_floating(group)
            wanted[targets[0]] = group
    opened.tensors = FileTensors(model, wanted.values(), names)
    return opened


def _main_dtype(tensors: Iterable[Entry | TensorSpec]) -> torch.dtype:
    """The floating-point dtype of most of the bytes."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            sizes[tensor.dtype] += tensor.num_bytes
    if not sizes:
        raise ModelError("the model holds no floating-point tensor")
    return sizes.most_common(1)[0][0]


def _check_floating(group: Group) -> None:
    for entry in (source.entry for source in group.sources):
        if not entry.dtype.is_floating_point:
            raise ModelError(f"{entry.path}: {entry.name} is stored as {entry.dtype}; quantised weights cannot be trained")


def build_on_meta(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a configuration with its parameters on the meta device and its buffers real."""
    with no_init_weights(), _parameters_on_meta():
        model = _from_config(config, dtype)
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    # Of buffers only: `from_pretrained` computes some once more, in fp32, where the constructor did so in `dtype`.
    model.initialize_weights()  # type: ignore[no-untyped-call]
    model.tie_weights()
    return model


def _from_config(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    model.eval()  # type: ignore[no-untyped-call]
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Let every parameter that a module is given become a meta tensor.

    Not `torch.device("meta")`, under which buffers that a constructor computes would be lost. A parameter exists for a
    moment, uninitialised: memory that nobody wrote to costs nothing.
    """
    register = nn.Module.register_parameter
    twins = WeakTensorKeyDictionary()

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in twins:
                twins[param] = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            param = twins[param]
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _set_buffers(opened: OpenedModel, values: dict[str, Tensor], fp32: re.Pattern[str]) -> None:
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        module = opened.model.get_submodule(owner)
        module._buffers[attribute] = value.to(torch.float32 if fp32.search(name) else module.get_buffer(attribute).dtype)
        opened.buffers[name] = value


def _fp32_pattern(model: PreTrainedModel, dtype: torch.dtype) -> re.Pattern[str]:
    """What `from_pretrained` keeps in fp32 although the model as a whole is not."""
    plan = model._get_dtype_plan(dtype)
    return re.compile("|".join(f"({name.replace('*', '.*')})" for name in plan) or r"(?!)")
