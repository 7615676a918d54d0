"""The shape of a model: what its units hold, in elements, without torch.

A *unit* is the grain of movement: a repeated block of the model, an edge module (embedding, norm, head), or a piece of an
edge that is larger than a block, split by rows. Its tensors lie one behind the other in two flat buffers:

    trainable  [ tensor | tensor | ... | padding ]    bf16 or fp32; gradients and optimizer state have the same layout
    frozen     [ tensor | tensor | ... | padding ]    weights only: no gradient, no master, no state

Tensors start at multiples of TENSOR_ALIGN elements, buffers end at multiples of BUFFER_ALIGN elements, so that every plane
of every unit can be moved with O_DIRECT. Padding is never read by a kernel.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

TENSOR_ALIGN = 128
"""elements; 256 bytes of bf16"""
BUFFER_ALIGN = 4096
"""elements; a multiple of a disk block for every element size"""
MAX_GRAIN = 2**18
GRAINS_PER_UNIT = 32
"""of the largest one, about: few enough that checking them costs nothing, and small enough for small buffers"""


def grain_of(largest: int) -> int:
    """What planes are checked, and therefore moved, in multiples of: elements, for a model whose largest unit has `largest`."""
    grain = BUFFER_ALIGN
    while grain < MAX_GRAIN and 2 * grain * GRAINS_PER_UNIT <= largest:
        grain *= 2
    return grain


def align(num: int, to: int) -> int:
    """`num` rounded up to a multiple of `to`."""
    return -(-num // to) * to


class UnitKind(Enum):
    """How a unit computes."""

    MODULE = "module"
    """one module, run as it is"""
    EMBEDDING = "embedding"
    """rows of an embedding table"""
    HEAD = "head"
    """rows of the output projection"""


@dataclass(frozen=True, slots=True)
class TensorShape:
    """A parameter, or a range of rows of one, inside a unit."""

    name: str
    """the parameter's name in the model, as in `named_parameters()` (tied parameters: the first of their names)"""
    shape: tuple[int, ...]
    """of what this unit holds; for a piece, its rows only"""
    trainable: bool
    decay: bool
    """whether weight decay applies (norms and biases: no)"""
    offset: int
    """first element in the unit's trainable or frozen buffer"""
    first_row: int = 0
    """for a piece: the row of the whole parameter at which it starts"""

    @property
    def num_elements(self) -> int:
        num = 1
        for size in self.shape:
            num *= size
        return num

    @property
    def end(self) -> int:
        return self.offset + self.num_elements

    @property
    def first_element(self) -> int:
        """the first one of the whole parameter that this unit holds"""
        return self.first_row * (self.num_elements // self.shape[0]) if self.first_row else 0


@dataclass(frozen=True, slots=True)
class UnitShape:
    """What one unit holds."""

    name: str
    """the module's name, with `[i]` behind it for piece i of a split edge"""
    kind: UnitKind
    tensors: tuple[TensorShape, ...]

    @property
    def trainable_elements(self) -> int:
        """of the trainable buffer, padding included"""
        return align(max((t.end for t in self.tensors if t.trainable), default=0), BUFFER_ALIGN)

    @property
    def frozen_elements(self) -> int:
        """of the frozen buffer, padding included"""
        return align(max((t.end for t in self.tensors if not t.trainable), default=0), BUFFER_ALIGN)

    @property
    def elements(self) -> int:
        """of both buffers: what moves when the unit's weights move"""
        return self.trainable_elements + self.frozen_elements

    @property
    def num_parameters(self) -> int:
        return sum(t.num_elements for t in self.tensors)

    @property
    def num_trainable(self) -> int:
        return sum(t.num_elements for t in self.tensors if t.trainable)


def lay_out(name: str, kind: UnitKind, tensors: Sequence[tuple[str, tuple[int, ...], bool, bool, int]]) -> UnitShape:
    """Place `(name, shape, trainable, decay, first_row)` tensors in a unit: decayed first, so that few kernel calls do."""
    ends = {True: 0, False: 0}
    placed: list[TensorShape] = []
    for tensor_name, shape, trainable, decay, first_row in sorted(tensors, key=lambda t: (not t[2], not t[3])):
        tensor = TensorShape(tensor_name, tuple(shape), trainable, decay, ends[trainable], first_row)
        ends[trainable] = align(tensor.end, TENSOR_ALIGN)
        placed.append(tensor)
    return UnitShape(name, kind, tuple(placed))


def fingerprint_of(shape: ModelShape) -> str:
    """Short and equal only for models whose units and tensors have the same names, shapes and places."""
    digest = hashlib.blake2b(repr(shape.units).encode(), digest_size=8).hexdigest()
    return f"{shape.num_parameters} parameters in {len(shape.units)} units, layout {digest}"


@dataclass(frozen=True, slots=True)
class SiteShape:
    """A place in the model's forward where weights are needed: a module, or an edge that visits its pieces in order."""

    name: str
    kind: UnitKind
    units: tuple[int, ...]
    needs_backward: bool = True
    """whether gradients flow through it: it holds, or comes after, something trainable"""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as planning sees it: units, and sites in the order in which the forward pass enters them."""

    units: tuple[UnitShape, ...]
    sites: tuple[SiteShape, ...]

    @property
    def num_parameters(self) -> int:
        return sum(unit.num_parameters for unit in self.units)

    @property
    def num_trainable(self) -> int:
        return sum(unit.num_trainable for unit in self.units)

    @property
    def grain_elements(self) -> int:
        """See `grain_of`."""
        return grain_of(max((max(unit.trainable_elements, unit.frozen_elements) for unit in self.units), default=0))

    @property
    def tied(self) -> frozenset[int]:
        """Units that more than one site visits: tied weights."""
        visits = [unit for site in self.sites for unit in site.units]
        return frozenset(unit for unit in visits if visits.count(unit) > 1)
