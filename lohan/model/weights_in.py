"""A model's weights, in the dtype in which they are stored: any range of any parameter, by as many threads as want some.

What a parameter is made of is settled before the first byte moves:

    stored      bytes of the files, one range behind the other: a tensor as it lies there, or a layer's experts, which are
                stacked and concatenated by being read to their places
    converted   what Transformers' converter makes of whole tensors of the files. It is made when the first range of it is
                asked for, and kept until all of it has been given out once

A reader belongs to one thread. It holds a request's memory and open files; what is converted is shared by all.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from functools import partial
from itertools import accumulate, zip_longest
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist

from lohan.host.threads import Crew
from lohan.model.file_reader import FileReader
from lohan.model.keys import Group
from lohan.model.safetensors_file import Entry


class TensorReader(Protocol):
    """A way to the weights for one thread."""

    def read(self, name: str, first: int, into: Tensor) -> None:
        """Fill `into`, flat and of the parameter's stored dtype, with its elements from `first` on."""

    def close(self) -> None: ...


class TensorSource(Protocol):
    """Where a model's weights come from."""

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        """Of every parameter that there is, as it is stored."""

    def open_reader(self) -> TensorReader: ...


class ModuleTensors:
    """The weights of a model that is in memory already."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        return {name: parameter.dtype for name, parameter in self.module.named_parameters()}

    def open_reader(self) -> TensorReader:
        return self

    def read(self, name: str, first: int, into: Tensor) -> None:
        whole = self.module.get_parameter(name).detach()
        row = max(whole[0].numel(), 1) if whole.ndim and len(whole) else 1
        rows = whole[first // row : -(-(first + into.numel()) // row)] if whole.ndim else whole
        into.copy_(rows.reshape(-1)[first % row :][: into.numel()])

    def close(self) -> None:
        """Nothing was opened."""


class FileTensors:
    """The weights of a checkpoint's files."""

    def __init__(self, model: nn.Module, groups: Iterable[Group], names: dict[str, str]) -> None:
        """`names` maps the groups' targets to the names to give out."""
        self.homes: dict[str, Stored | Converted] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for group in groups:
            entries = _entries_in_order(group)
            home = Converted(model, group, names) if entries is None else Stored(entries)
            for target, dtype in zip(group.targets, group.dtypes, strict=True):
                name = names.get(target, target)
                self.homes[name], self.dtypes[name] = home, dtype

    def open_reader(self) -> TensorReader:
        return _HomeReader(self.homes)


class _HomeReader:
    """Reads from files, whatever a parameter is made of."""

    def __init__(self, homes: Mapping[str, Stored | Converted]) -> None:
        self._homes, self._files = homes, FileReader()

    def read(self, name: str, first: int, into: Tensor) -> None:
        self._homes[name].read(self._files, name, first, into)

    def close(self) -> None:
        self._files.close()


class Stored:
    """A parameter that is bytes of the files."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        self.entries = entries
        self._starts = list(accumulate((entry.num_bytes for entry in entries), initial=0))

    def read(self, files: FileReader, name: str, first: int, into: Tensor) -> None:
        out, done = into.view(torch.uint8), 0
        while done < len(out):
            at = first * into.element_size() + done
            number = bisect_right(self._starts, at) - 1
            stop = min(done + self._starts[number + 1] - at, len(out))
            files.read(self.entries[number], out[done:stop], at - self._starts[number])
            done = stop


class Converted:
    """Parameters that a converter makes together."""

    def __init__(self, model: nn.Module, group: Group, names: Mapping[str, str]) -> None:
        self._model, self._group, self._names = model, group, names
        self._lock = Lock()
        self.made: dict[str, Tensor] = {}
        """flat, while there is more of them to give out"""
        self._left: dict[str, int] = {}
        """elements of each that nobody has asked for yet"""

    def read(self, files: FileReader, name: str, first: int, into: Tensor) -> None:
        with self._lock:
            if name not in self.made:
                self._make(files)
            into.copy_(self.made[name][first : first + into.numel()])
            self._left[name] -= into.numel()
            if self._left[name] <= 0:
                del self.made[name]

    def _make(self, files: FileReader) -> None:
        sources = (files.read_tensor(source.entry) for source in self._group.sources)
        for target, tensor in self._group.convert(self._model, sources).items():
            name = self._names.get(target, target)
            self.made[name], self._left[name] = tensor.reshape(-1), tensor.numel()


def whole_tensors(source: TensorSource, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
    """Every parameter, whole, while the next one is read."""

    def read(name: str) -> Tensor:
        flat = torch.empty(math.prod(shapes[name]), dtype=source.dtypes[name])
        reader.read(name, 0, flat)
        return flat.view(shapes[name])

    with closing(source.open_reader()) as reader, closing(Crew("lohan read", 1)) as thread:
        names = list(source.dtypes)
        ahead = [thread.submit(partial(read, name)) for name in names[:1]]
        for name, following in zip_longest(names, names[1:]):
            tensor = ahead.pop().wait()
            if following is not None:
                ahead.append(thread.submit(partial(read, following)))
            yield name, tensor


def _entries_in_order(group: Group) -> tuple[Entry, ...] | None:
    """The tensors of the files that a group's one target is, laid one behind the other; None where it is not as simple.

    A layer's experts are: with gate and up projections of `rows` each, expert e is rows 2·e·rows to 2·(e+1)·rows of the fused
    tensor, gate, then up. That is what stacking the experts, and concatenating their projections, would do by copying.
    """
    if group.converter is None:
        return tuple(source.entry for source in group.sources)
    if [type(op) for op in group.converter.operations] not in ([MergeModulelist], [MergeModulelist, Concatenate]):
        return None
    if [vars(operation)["dim"] for operation in group.converter.operations] != [0, 1][: len(group.converter.operations)]:
        return None
    stacks = [[s.entry for s in group.sources if s.pattern == pattern] for pattern in group.converter.source_patterns]
    kinds = {(entry.dtype, entry.shape[1:]) for stack in stacks for entry in stack}
    if len({len(stack) for stack in stacks}) > 1 or len(kinds) > 1 or any(len({e.shape for e in s}) != 1 for s in stacks):
        return None
    return tuple(entry for expert in zip(*stacks, strict=True) for entry in expert)
