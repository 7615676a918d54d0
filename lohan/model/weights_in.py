"""A model's weights, tensor by tensor, in the model's order and in the dtype in which they are stored.

Reading a checkpoint has three steps that overlap:

    plan    for each group of tensors: which bytes of which file go where in a span of memory
    read    threads fill spans of a ring, ahead of the consumer, with large requests past the page cache
    convert tensors are views of their span where the model stores them as the file does; a layer's experts are read straight
            to their rows of the fused tensor; anything else goes through Transformers' converter

Host memory is the ring: the largest span plus READ_AHEAD_BYTES. A tensor is valid until the next one is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Protocol

from torch import Tensor, nn
from transformers.core_model_loading import Concatenate, MergeModulelist

from lohan.host.threads import Crew, Job
from lohan.model.file_reader import BLOCK_BYTES, FileReader, pages
from lohan.model.keys import Group
from lohan.model.safetensors_file import Entry
from lohan.model.shape import align

READ_AHEAD_BYTES = 48 * 2**20
"""beyond the span that the consumer holds"""
NUM_READERS = 3
"""one alone reads 2.3 GB/s from a drive that gives 4.2"""


class TensorSource(Protocol):
    """Where a model's weights come from."""

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and value; a value is valid until the next one is asked for.

        In the model's order, but for tensors that one conversion makes: they come together, where the first of them belongs.
        """
        ...


class ModuleTensors:
    """The weights of a model that is in memory already; each is let go when the consumer replaces it in the module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name in [name for name, _ in self.module.named_parameters()]:
            yield name, self.module.get_parameter(name).detach()


@dataclass(frozen=True, slots=True)
class Span:
    """A group's bytes in memory, one place per tensor of the checkpoint."""

    group: Group
    places: tuple[tuple[Entry, int], ...]
    """each entry and the offset of its bytes in the span"""
    num_bytes: int
    fused: tuple[int, ...] | None
    """the shape of the one tensor that the span is as a whole, where the places put a layer's experts together"""


class FileTensors:
    """The weights of a checkpoint's files."""

    def __init__(self, model: nn.Module, groups: Iterable[Group], names: dict[str, str]) -> None:
        """`groups` in the order in which they are wanted; `names` maps the targets to the names to give out."""
        self.model, self.names = model, names
        self.spans = [_plan(group) for group in groups]
        self.ring_bytes = max((span.num_bytes for span in self.spans), default=0) + READ_AHEAD_BYTES

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        readers = [FileReader() for _ in range(NUM_READERS)]
        ring = _Ring(self.ring_bytes)
        threads: list[Crew] = []
        waiting = deque(self.spans)
        ahead: deque[tuple[Span, int, Job[None]]] = deque()
        try:
            threads += (Crew("lohan import", 1) for _ in readers)
            turns = cycle(zip(threads, readers, strict=True))
            while waiting or ahead:
                while waiting and (start := ring.take(waiting[0].num_bytes)) is not None:
                    span, (thread, reader) = waiting.popleft(), next(turns)
                    ahead.append((span, start, thread.submit(partial(_fill, reader, span, ring.memory[start:]))))
                span, start, filled = ahead.popleft()
                filled.wait()
                for target, tensor in self._tensors(span, ring.memory[start : start + span.num_bytes]).items():
                    yield self.names.get(target, target), tensor
                ring.give_back()
        finally:
            for thread in threads:
                thread.close()
            for reader in readers:
                reader.close()

    def _tensors(self, span: Span, memory: Tensor) -> dict[str, Tensor]:
        if span.fused is not None:
            return {span.group.targets[0]: memory.view(span.places[0][0].dtype).view(span.fused)}
        parts = (memory[at : at + entry.num_bytes].view(entry.dtype).view(entry.shape) for entry, at in span.places)
        return span.group.convert(self.model, parts)


def _plan(group: Group) -> Span:
    if (fused := _fused_experts(group)) is not None:
        return fused
    places, at = [], 0
    for source in group.sources:
        lead = source.entry.offset % BLOCK_BYTES
        if lead % source.entry.dtype.itemsize == 0:
            at += lead  # in step with the file, so that whole blocks are read to their places
        places.append((source.entry, at))
        at = align(at + source.entry.num_bytes, BLOCK_BYTES)
    return Span(group, tuple(places), at, None)


def _fused_experts(group: Group) -> Span | None:
    """The places that do what stacking a layer's experts, and concatenating their projections, would do by copying.

    With gate and up projections of `rows` each, expert e is rows 2·e·rows to 2·(e+1)·rows of the fused tensor: gate, then up.
    """
    if group.converter is None or [type(op) for op in group.converter.operations] not in (
        [MergeModulelist],
        [MergeModulelist, Concatenate],
    ):
        return None
    if [vars(operation)["dim"] for operation in group.converter.operations] != [0, 1][: len(group.converter.operations)]:
        return None
    stacks = [[s.entry for s in group.sources if s.pattern == pattern] for pattern in group.converter.source_patterns]
    kinds = {(entry.dtype, entry.shape[1:]) for stack in stacks for entry in stack}
    if len({len(stack) for stack in stacks}) > 1 or len(kinds) > 1 or any(len({e.shape for e in s}) != 1 for s in stacks):
        return None
    experts = list(zip(*stacks, strict=True))
    places, at = [], 0
    for expert in experts:
        for entry in expert:
            places.append((entry, at))
            at += entry.num_bytes
    rows = sum(entry.shape[0] for entry in experts[0])
    return Span(group, tuple(places), at, (len(experts), rows, *experts[0][0].shape[1:]))


class _Ring:
    """Memory from which contiguous spans are taken in order and given back in the same order."""

    def __init__(self, num_bytes: int) -> None:
        self.size = align(num_bytes, BLOCK_BYTES)
        self.memory = pages(self.size)
        self.taken: deque[tuple[int, int]] = deque()

    def take(self, num_bytes: int) -> int | None:
        """The start of a free span, or None until more is given back."""
        size = align(max(num_bytes, 1), BLOCK_BYTES)
        start = 0
        if self.taken:
            first, newest = self.taken[0][0], self.taken[-1]
            start = newest[1]
            if start > first and start + size > self.size:
                start = 0
            limit = self.size if start > first else first
            if start + size > limit:
                return None
        self.taken.append((start, start + size))
        return start

    def give_back(self) -> None:
        """Free the span that was taken first."""
        self.taken.popleft()


def _fill(reader: FileReader, span: Span, memory: Tensor) -> None:
    for entry, at in span.places:
        reader.read(entry, memory[at : at + entry.num_bytes])
