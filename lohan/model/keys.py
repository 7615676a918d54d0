"""Which tensors of a checkpoint become which tensors of the model, and back, by Transformers' own rules.

Inwards: every name of the checkpoint is renamed, and names that a converter takes together (the experts of a layer, a fused
projection) form a `Group` with the tensors of the model that come out of it. Outwards: the tensors of the model that a
reversed converter takes together form a list of names, to be handed to `to_source_format` at once. Nothing is read here:
conversions are tried on the meta device, so that names and shapes are known, and refused, before the first byte moves.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    apply_converters,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from lohan.errors import ModelError
from lohan.model.safetensors_file import Entry

MAX_NAMES_IN_ERROR = 12


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor of the checkpoint inside a group."""

    entry: Entry
    renamed: str
    pattern: str
    """of the converter, by which it took the tensor"""


@dataclass(frozen=True, slots=True)
class Group:
    """Tensors of the checkpoint that become tensors of the model together."""

    sources: tuple[Source, ...]
    targets: tuple[str, ...]
    converter: WeightConverter | None
    """None: one tensor, as it is"""
    dtypes: tuple[torch.dtype, ...] = ()
    """of the targets"""

    def convert(self, model: nn.Module, tensors: Iterable[Tensor]) -> dict[str, Tensor]:
        """The tensors of the model by name, from those of `sources` in order."""
        if self.converter is None:
            return dict(zip(self.targets, tensors, strict=True))
        converter = deepcopy(self.converter)
        for source, tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(source.renamed, source.entry.name, source.pattern, tensor)  # type: ignore[arg-type]
        converted = converter.convert(self.sources[0].renamed, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def match_keys(model: PreTrainedModel, entries: Mapping[str, Entry]) -> list[Group]:
    """Group the checkpoint's tensors by what they become; ModelError on missing, unexpected or misshapen tensors.

    Leaves the transforms that were used in the model, where Transformers looks for them when names go back.
    """
    expected: dict[str, Tensor] = model.state_dict()
    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}

    collected: dict[str, list[tuple[Source, WeightConverter | None]]] = defaultdict(list)
    unexpected: list[str] = []
    for name in sorted(entries, key=dot_natural_key):
        renamed, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, expected)
        if renamed not in expected and name in expected:
            renamed, pattern = rename_source_key(name, [], [], model.base_model_prefix, expected)
        if renamed in expected:
            source = Source(entries[name], renamed, pattern if pattern is not None else name)
            collected[renamed].append((source, by_pattern[pattern] if pattern is not None else None))
        elif not _ignored(model, renamed, "unexpected"):
            unexpected.append(name)
    used: Any = [transform for transform in transforms if transform.was_used()]
    model._weight_conversions = used

    groups = [_group(model, expected, members) for members in collected.values()]
    _check_complete(model, expected, groups, unexpected)
    return groups


def _group(model: nn.Module, expected: Mapping[str, Tensor], members: list[tuple[Source, WeightConverter | None]]) -> Group:
    sources = tuple(source for source, _ in members)
    converter = members[0][1]
    names = ", ".join(source.entry.name for source in sources)
    if converter is None:
        if len(sources) > 1:
            raise ModelError(f"{names} all become {sources[0].renamed}")
        group = Group(sources, (sources[0].renamed,), None)
    else:
        group = Group(sources, (), converter)
    try:
        converted = group.convert(model, (torch.empty(s.entry.shape, dtype=s.entry.dtype, device="meta") for s in sources))
    except (RuntimeError, ValueError, IndexError) as error:
        raise ModelError(f"{names} cannot be converted into {sources[0].renamed}: {error}") from error
    for name, tensor in converted.items():
        if name not in expected:
            raise ModelError(f"{names} become {name}, which is not in the model")
        if tensor.shape != expected[name].shape:
            raise ModelError(f"{names}: shape {list(tensor.shape)}, but {name} in the model has {list(expected[name].shape)}")
    return Group(sources, tuple(converted), converter, tuple(tensor.dtype for tensor in converted.values()))


def _check_complete(model: PreTrainedModel, expected: Iterable[str], groups: Iterable[Group], unexpected: list[str]) -> None:
    canonical = canonical_names(model)
    filled = {canonical.get(target, target) for group in groups for target in group.targets}
    empty = [name for name in expected if canonical.get(name, name) not in filled]
    missing = [name for name in empty if name in canonical or not _ignored(model, name, "missing")]
    problems = [f"{what}: {_listed(names)}" for what, names in (("missing", missing), ("unexpected", unexpected)) if names]
    if problems:
        raise ModelError(f"the checkpoint does not fit {type(model).__name__}; " + "; ".join(problems))


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES_IN_ERROR
    return ", ".join(names[:MAX_NAMES_IN_ERROR]) + (f" and {more} more" if more > 0 else "")


def _ignored(model: PreTrainedModel, name: str, what: str) -> bool:
    """Whether Transformers passes over such a name without a word (buffers that older versions wrote to the file)."""
    patterns = set(getattr(model, f"_keys_to_ignore_on_load_{what}") or ())
    if what == "unexpected":
        patterns |= {r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$"}
    return any(re.search(pattern, name) for pattern in patterns)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """For every name of every parameter the name that lohan uses: the first one, where parameters are tied."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}


def group_for_export(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The names in the model, in order, each list to be handed to `to_source_format` at once."""
    reversed_ = [transform.reverse_transform() for transform in _used_transforms(model)[::-1]]
    converters = [transform for transform in reversed_ if isinstance(transform, WeightConverter)]
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[apply_converters(name, converters)[0]].append(name)
    yield from map(tuple, groups.values())


def to_source_format(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint by name, from all the model's tensors that belong to them."""
    if not isinstance(model, PreTrainedModel):
        return tensors
    converted: dict[str, Tensor] = revert_weight_conversion(model, tensors)
    return converted


def _used_transforms(model: nn.Module) -> list[WeightTransform]:
    """As `revert_weight_conversion` chooses them."""
    if not isinstance(model, PreTrainedModel):
        return []
    used: list[WeightTransform] | None = getattr(model, "_weight_conversions", None)
    if used is None:
        used = [t for t in get_model_conversion_mapping(model, add_legacy=False) if not isinstance(t, PrefixChange)]
    return used
