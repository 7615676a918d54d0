"""The units of a model, found in its module tree.

    blocks  the children of the outermost lists of modules (a decoder's layers; an encoder's too, where there is one)
    edges   every other module that has parameters: embeddings, norms, projections, the head
    pieces  an embedding or head larger than the largest block, split by rows

A *unit* is what moves. A *site* is a module of the model's forward that needs one unit or several: a split embedding visits its
pieces, and a head that is tied to the embedding visits the same pieces again. Nothing here looks at values, so that a
model on the meta device will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, cast

from torch import nn

from lohan.errors import ModelError
from lohan.model.keys import canonical_names
from lohan.model.shape import TensorShape, UnitKind, UnitShape, align, lay_out

PIECE_ROWS = 128
"""a piece holds a multiple of so many rows"""


@dataclass(frozen=True, slots=True)
class Binding:
    """A place that must hold a unit's tensor while a site runs: `module._parameters[attribute]`."""

    site: int
    module: nn.Module
    attribute: str
    tensor: TensorShape
    """rows from `first_row` on, where the unit is a piece"""


@dataclass(frozen=True, slots=True)
class Unit:
    """What moves: its layout, and the places its tensors go to, of all sites that need it."""

    index: int
    shape: UnitShape
    bindings: tuple[Binding, ...]


@dataclass(frozen=True, slots=True)
class Site:
    """A module that runs as one step of the model's forward."""

    index: int
    name: str
    kind: UnitKind
    module: nn.Module
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ModelMap:
    """All units and sites in the order in which the model registers its modules."""

    units: tuple[Unit, ...]
    sites: tuple[Site, ...]
    aliases: dict[str, str]
    """for every other name of a tied parameter: the name that lohan uses"""

    def pieces(self) -> dict[str, list[tuple[int, TensorShape]]]:
        """For every parameter: the units that hold it, and its place there, by rows."""
        found: dict[str, list[tuple[int, TensorShape]]] = {}
        for unit in self.units:
            for tensor in unit.shape.tensors:
                found.setdefault(tensor.name, []).append((unit.index, tensor))
        return found

    def bindings(self, site: Site) -> Iterator[tuple[int, Binding]]:
        """The units that `site` needs and where their tensors go in its module."""
        for index in site.units:
            for binding in self.units[index].bindings:
                if binding.site == site.index:
                    yield index, binding


def discover(model: nn.Module, *, piece_elements: int | None = None) -> ModelMap:
    """Find the units; `piece_elements` bounds the pieces of a split edge (default: the largest block's elements)."""
    places = list(_places(model))
    names = canonical_names(model)
    builder = _Builder(names)
    largest = max((builder.elements(module) for _, module, kind in places if kind is UnitKind.MODULE), default=None)
    for name, module, kind in places:
        builder.add_site(name, module, kind, piece_elements or largest)
    aliases = {name: first for name, first in names.items() if name != first}
    return ModelMap(*builder.finish(), aliases)


def _places(model: nn.Module) -> Iterator[tuple[str, nn.Module, UnitKind]]:
    """The outermost modules that run as a whole and have parameters, in order of registration."""
    lookups, head = _lookups(model), _head(model)
    seen: set[nn.Module] = set()

    def walk(name: str, module: nn.Module, in_list: bool) -> Iterator[tuple[str, nn.Module, UnitKind]]:
        if module in seen or next(module.parameters(), None) is None:
            return
        seen.add(module)
        if module in lookups or module is head:
            yield name, module, UnitKind.EMBEDDING if module in lookups else UnitKind.HEAD
        elif in_list and not isinstance(module, nn.ModuleList | nn.ModuleDict):
            yield name, module, UnitKind.MODULE
        elif own := _own_parameters(module):
            if any(m in lookups or m is head or _has_blocks(m) for m in module.modules() if m is not module):
                raise ModelError(
                    f"{', '.join(f'{name}.{n}' if name else n for n in own)}: {type(module).__name__} has parameters itself "
                    "beside modules that lohan moves one by one. Put them into a module of their own that has a forward"
                )
            yield name, module, UnitKind.MODULE
        else:
            for child_name, child in module.named_children():
                yield from walk(f"{name}.{child_name}" if name else child_name, child, _has_blocks(module))

    yield from walk("", model, False)


def _own_parameters(module: nn.Module) -> list[str]:
    """Parameters that a module uses itself, so that it must run as a whole; those that a child has too are the child's."""
    lists = [name for name, child in module.named_children() if isinstance(child, nn.ParameterList | nn.ParameterDict)]
    below = {id(parameter) for child in module.children() for parameter in child.parameters()}
    return lists + [
        name for name, parameter in module._parameters.items() if parameter is not None and id(parameter) not in below
    ]


def _has_blocks(module: nn.Module) -> bool:
    """A list's children run one by one; those of a Sequential too, but they are blocks only where they repeat."""
    if next(module.parameters(), None) is None:
        return False
    children = {type(child) for child in module.children()}
    return isinstance(module, nn.ModuleList) or (isinstance(module, nn.Sequential) and len(children) == 1)


def _lookups(model: nn.Module) -> set[nn.Module]:
    """Embeddings whose rows may be gathered on the host: called with row numbers, whatever they do to the rows afterwards.

    A subclass with a forward of its own counts only where it is known to be an input embedding: OPT's learned positions,
    for one, compute the row numbers within.
    """
    known = {_input_embedding(m) for m in model.modules() if hasattr(m, "get_input_embeddings")}
    found: set[nn.Module] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and (type(module).forward is nn.Embedding.forward or module in known):
            if module.max_norm is not None or module.sparse:
                raise ModelError(f"{name}: an embedding with max_norm or sparse gradients is not supported")
            found.add(module)
    return found


def _input_embedding(module: nn.Module) -> nn.Module | None:
    """Transformers raises where a model has no input embeddings."""
    try:
        return cast(nn.Module, cast(Any, module).get_input_embeddings())
    except NotImplementedError:
        return None


def _head(model: nn.Module) -> nn.Module | None:
    """The output projection of a Transformers model, if it is a plain one."""
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    return head if isinstance(head, nn.Linear) and type(head).forward is nn.Linear.forward else None


@dataclass
class _Owned:
    """A unit under construction."""

    shape: UnitShape
    bindings: list[Binding] = field(default_factory=list)


class _Builder:
    """Lays out units site by site; a parameter that an earlier site laid out is bound again, not moved twice."""

    def __init__(self, names: dict[str, str]) -> None:
        self.names = names
        self.units: list[_Owned] = []
        self.sites: list[Site] = []
        self.homes: dict[str, list[int]] = {}

    def elements(self, module: nn.Module) -> int:
        return lay_out("", UnitKind.MODULE, [_describe(n, m, a) for n, m, a in _parameters("", module)]).elements

    def add_site(self, name: str, module: nn.Module, kind: UnitKind, piece_elements: int | None) -> None:
        parameters = [(self.names[full], owner, attribute) for full, owner, attribute in _parameters(name, module)]
        for first, _, attribute in parameters:
            if first in self.homes and UnitKind.MODULE in (kind, self.units[self.homes[first][0]].shape.kind):
                raise ModelError(f"{name} shares its {attribute} with {first}; lohan ties embeddings and heads only")
        fresh = {first: (owner, attribute) for first, owner, attribute in reversed(parameters) if first not in self.homes}
        tensors = [_describe(first, *fresh[first]) for first in reversed(fresh)]
        if tensors:
            for shape in _split(name, kind, tensors, piece_elements):
                for tensor in shape.tensors:
                    self.homes.setdefault(tensor.name, []).append(len(self.units))
                self.units.append(_Owned(shape))
        site = len(self.sites)
        for first, owner, attribute in parameters:
            for index in self.homes[first]:
                unit = self.units[index]
                unit.bindings += [Binding(site, owner, attribute, t) for t in unit.shape.tensors if t.name == first]
        used = tuple(sorted({index for first, _, _ in parameters for index in self.homes[first]}))
        self.sites.append(Site(site, name, kind, module, used))

    def finish(self) -> tuple[tuple[Unit, ...], tuple[Site, ...]]:
        units = tuple(Unit(index, unit.shape, tuple(unit.bindings)) for index, unit in enumerate(self.units))
        return units, tuple(self.sites)


def _parameters(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Every place of a parameter below `module`: its full name, the module that has it, and the attribute."""
    for path, owner in module.named_modules(prefix=prefix):
        for attribute, parameter in owner._parameters.items():
            if parameter is not None:
                yield f"{path}.{attribute}" if path else attribute, owner, attribute


def _describe(name: str, owner: nn.Module, attribute: str) -> tuple[str, tuple[int, ...], bool, bool, int]:
    """What `lay_out` wants to know; norms, biases and other vectors are not decayed."""
    parameter = owner._parameters[attribute]
    assert parameter is not None
    decay = parameter.ndim > 1 and not attribute.endswith("bias") and "norm" not in type(owner).__name__.lower()
    return name, tuple(parameter.shape), parameter.requires_grad, decay, 0


def _split(
    name: str, kind: UnitKind, tensors: list[tuple[str, tuple[int, ...], bool, bool, int]], piece_elements: int | None
) -> Iterator[UnitShape]:
    """The unit as a whole, or its pieces by rows, of about equal size, where it is an edge of more than `piece_elements`."""
    whole = lay_out(name, kind, tensors)
    rows = {shape[0] for _, shape, *_ in tensors if shape}
    if kind is UnitKind.MODULE or piece_elements is None or whole.elements <= piece_elements or len(rows) != 1:
        yield whole
        return
    num_rows = rows.pop()
    row_elements = whole.num_parameters // num_rows
    most_rows = max(piece_elements // row_elements // PIECE_ROWS, 1) * PIECE_ROWS
    num_pieces = -(-num_rows // most_rows)
    piece_rows = align(-(-num_rows // num_pieces), PIECE_ROWS)
    for index, first in enumerate(range(0, num_rows, piece_rows)):
        size = min(piece_rows, num_rows - first)
        rows_of_each = [(n, (size, *shape[1:]), trainable, decay, first) for n, shape, trainable, decay, _ in tensors]
        yield lay_out(f"{name}[{index}]", kind, rows_of_each)
