"""What the emulated device knows about torch operations: their schemas, and what their results look like.

The result of an operation has to be known on the host, in shape, before the stream has computed it. It depends on nothing but
the operation and the layouts and numbers of its arguments (`Call.key`), but torch's own inference on meta tensors gives
other strides than the CPU's kernels now and then. So the first time that a key is met the host waits for the device and
looks at the real result: its `Outcome` is kept, and every later call with that key returns at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import TreeSpec, tree_flatten

from lohan.device.emulated.tensor import Cell, EmulatedTensor, Layout

_EMPTY = frozenset({"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"})
_INDEXING = frozenset({"index", "_unsafe_index"})
_SCALARS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


class Operation:
    """The facts of one aten overload."""

    _known: dict[Any, Operation] = {}

    def __init__(self, func: Any) -> None:
        schema, name = func._schema, func._schema.name.partition("::")[2]
        self.is_view: bool = func.is_view
        self.is_empty = name in _EMPTY
        """its result is uninitialised memory"""
        self.is_lift = name in ("lift", "lift_fresh")
        self.is_copy = name == "copy_"
        self.is_indexing = name in _INDEXING
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_dynamic = not self.is_indexing and bool(
            {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output} & set(func.tags)
        )
        """its result's shape, or what the host gets to see, depends on data"""
        self.changes_layout = torch.Tag.inplace_view in func.tags
        writes = [a for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.written = frozenset(i for i, a in enumerate(schema.arguments) if a in writes)
        self.written_names = frozenset(a.name for a in writes)

    @classmethod
    def of(cls, func: Any) -> Operation:
        known = cls._known.get(func)
        return known if known is not None else cls._known.setdefault(func, cls(func))


class Call:
    """One call of an operation, with its device tensors replaced by their cells."""

    __slots__ = ("func", "operation", "args", "kwargs", "tensors", "host_tensors", "key")

    def __init__(self, func: Any, operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.operation = func, operation
        self.tensors: list[EmulatedTensor] = []
        """in the order of the arguments; given up when the call is enqueued, since the queue keeps only cells alive"""
        self.host_tensors: list[Tensor] = []
        key: list[Any] = [func, torch.get_default_dtype()]
        self.args = [self._lower(arg, key) for arg in args]
        self.kwargs: dict[str, Any] = {}
        for name, value in kwargs.items():
            key.append(name)
            self.kwargs[name] = self._lower(value, key)
        self.key = tuple(key)

    def _lower(self, value: Any, key: list[Any]) -> Any:
        kind = value.__class__
        if kind is EmulatedTensor:
            self.tensors.append(value)
            key.append(value.layout_)
            return value.cell
        if kind in _SCALARS:
            key += (kind, value)  # the type too: 1, 1.0 and True are equal, and promote to different dtypes
            return value
        if isinstance(value, (list, tuple)):
            key.append(len(value))
            return [self._lower(item, key) for item in value]
        if isinstance(value, Tensor):
            self.host_tensors.append(value)
            key += (value.dtype, value.shape)
            return value.clone() if value.dim() == 0 else value  # a scalar is read when it is enqueued
        key.append(value)
        return value

    @property
    def is_dynamic(self) -> bool:
        """Whether the shape of the result depends on data: the operation's nature, or indexing with a mask."""
        masks = self.operation.is_indexing and any(t.dtype in (torch.bool, torch.uint8) for t in self.tensors[1:])
        return self.operation.is_dynamic or masks

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[int]:
        """The identities of the arguments that the call writes; `args` and `kwargs` are those that it was made from."""
        values = [arg for i, arg in enumerate(args) if i in self.operation.written]
        values += [value for name, value in kwargs.items() if name in self.operation.written_names]
        return {id(item) for value in values for item in (value if isinstance(value, (list, tuple)) else (value,))}

    def run(self) -> Any:
        """Run it on real data: for the compute stream, or for views of data that is there already."""
        return self.func(*[_real(arg) for arg in self.args], **{name: _real(value) for name, value in self.kwargs.items()})


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor of a result."""

    layout: Layout
    nbytes: int
    """of its storage, if the operation made it"""
    argument: int
    """the tensor argument whose storage it shares, or -1"""
    is_argument: bool
    """it is that argument, not a view of it"""
    sibling: int
    """the earlier output whose storage it shares, or -1"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call returns."""

    spec: TreeSpec
    outputs: tuple[Output | None, ...]
    """None where the operation returns something else than a tensor"""
    is_single: bool
    is_constant: bool
    """nothing else than tensors and None: it is the same for every call with this key"""

    @classmethod
    def look(cls, call: Call, result: Any) -> Outcome:
        """The outcome of `call`, from the real result that it had."""
        real = [tensor.cell.value for tensor in call.tensors]
        leaves, spec = tree_flatten(result)
        storages = [value.untyped_storage()._cdata for value in real]
        outputs: list[Output | None] = []
        made: list[int] = []
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                made.append(0)
                outputs.append(None)
                continue
            made.append(leaf.untyped_storage()._cdata)
            same = next((i for i, value in enumerate(real) if value is leaf), -1)
            argument = same if same >= 0 else storages.index(made[-1]) if made[-1] in storages else -1
            sibling = made.index(made[-1]) if argument < 0 and made.index(made[-1]) < len(made) - 1 else -1
            nbytes = leaf.untyped_storage().nbytes() if argument < 0 and sibling < 0 else 0
            outputs.append(Output(Layout.of(leaf), nbytes, argument, same >= 0, sibling))
        is_constant = not call.is_dynamic and all(leaf is None or isinstance(leaf, Tensor) for leaf in leaves)
        return cls(spec, tuple(outputs), isinstance(result, Tensor), is_constant)


def _real(value: Any) -> Any:
    kind = value.__class__
    if kind is Cell:
        return value.value
    if kind is list:
        return [_real(item) for item in value]
    return value
