"""A site's turn, forward and backward: one node of the outer autograd graph for all slices.

Forward: keep what came in (the *boundary*: the tensors that want a gradient), run the module slice by slice without building a
graph. Backward: find the boundary again, run the module again with a graph, and let autograd work through that graph while the
weights are there; each weight gradient goes to its slot as soon as it exists.

The outer graph holds only these nodes and the glue between them. Every node takes one more input, the *anchor*, a scalar that
wants a gradient, so that a site with trainable weights is part of the graph whatever its inputs are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lohan.model.shape import SiteShape
from lohan.model.units import Binding, ModelMap
from lohan.run.boundaries import BoundaryWriter, Kept
from lohan.run.captures import Collected, collecting
from lohan.run.executor import Run
from lohan.run.lockstep import Arrival
from lohan.run.stand_ins import buffers_replaced
from lohan.run.weights import GradientSink, UnitMemory, bound, unpack
from lohan.schedule.ops import Kind


@dataclass(frozen=True, slots=True)
class SiteSpec:
    """A site as it runs: where it stands in the schedule, its units, and where their weights go."""

    position: int
    """its number in the schedule: the order in which the forward enters sites"""
    shape: SiteShape
    module: torch.nn.Module
    forward: Callable[..., Any]
    """the module's own"""
    bindings: dict[int, list[tuple[int, Binding]]]
    """of each unit: which of its tensors goes where"""
    outputs: list[bool]
    """for each tensor that the module returns, whether it wants a gradient"""


class Steps(Protocol):
    """What a site needs of the step that runs it."""

    run: Run
    num_slices: int
    map: ModelMap
    dtype: torch.dtype
    present: dict[int, set[int]]
    """of each unit, the tensors that have a gradient"""

    def seed(self, slice_index: int, place: int) -> None:
        """Random numbers from here on are those of this slice at this place."""


@contextmanager
def forward_visit(step: Steps, site: SiteSpec, unit: int) -> Iterator[tuple[UnitMemory, Tensor | None]]:
    """The unit's weights, and the boundary slot if this operation fills it."""
    with step.run.compute(Kind.FORWARD, site.position, unit) as (_, reads, writes):
        yield unpack(step.map.units[unit].shape, step.dtype, reads), writes[0] if writes else None


@contextmanager
def backward_visit(step: Steps, site: SiteSpec, unit: int) -> Iterator[tuple[UnitMemory, GradientSink | None]]:
    """The unit's weights, then its boundary in `others`; and where gradients go, if it has any."""
    shape = step.map.units[unit].shape
    with step.run.compute(Kind.BACKWARD, site.position, unit) as (_, reads, writes):
        memory = unpack(shape, step.dtype, reads)
        sink = None
        if writes:
            sums = writes[1] if len(writes) > 1 else None
            sink = GradientSink(shape, step.dtype, writes[0], sums, step.num_slices, step.present.get(unit, set()))
        yield memory, sink
        if sink is not None:
            step.present[unit] = sink.finish()


def places(site: SiteSpec, unit: int, tensors: Sequence[Tensor]) -> list[tuple[Binding, Tensor]]:
    """Each of the unit's tensors with the place it takes at this site."""
    return [(binding, tensors[index]) for index, binding in site.bindings[unit]]


class SiteCall(Protocol):
    """One site in one step, forward and backward, all slices."""

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Flat inputs of all slices that want a gradient -> flat outputs of all slices that do."""
        ...

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of the outputs -> gradients of the inputs."""
        ...


class SiteNode(torch.autograd.Function):
    """A site's call as a node of the outer graph."""

    @staticmethod
    def forward(ctx: Any, call: SiteCall, anchor: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return call.forward(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *ctx.call.backward(gradients))


@dataclass(slots=True)
class _Slice:
    """The arguments of one slice's call: those that want a gradient are taken out and kept in the boundary slot."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    wanting: list[int]
    """positions in `leaves` of the inputs that want a gradient"""
    kept: list[Kept]
    collects: Mapping[str, int]

    def arguments(self, inputs: Sequence[Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        leaves = list(self.leaves)
        for position, tensor in zip(self.wanting, inputs, strict=True):
            leaves[position] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs


@dataclass(slots=True)
class _Result:
    """What one slice's call returned, without the tensors that want a gradient."""

    leaves: list[Any]
    spec: pytree.TreeSpec
    wanting: list[int]
    """positions in `leaves` of these tensors"""


def take_apart(arrival: Arrival) -> tuple[_Slice, list[Tensor]]:
    """One slice's arguments without the tensors that want a gradient, and these."""
    leaves, spec = pytree.tree_flatten((arrival.args, arrival.kwargs))
    wanting = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    inputs = [leaves[i] for i in wanting]
    for position in wanting:
        leaves[position] = None
    return _Slice(leaves, spec, wanting, [], arrival.collects), inputs


class ModuleCall:
    """A site that is one module with one unit."""

    def __init__(self, step: Steps, site: SiteSpec, slices: list[_Slice]) -> None:
        self.step, self.site, self.slices = step, site, slices
        self.unit = site.shape.units[0]
        self.results: list[_Result] = []

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given, flat = iter(inputs), []
        with forward_visit(self.step, self.site, self.unit) as (memory, slot):
            keeper = BoundaryWriter(slot, self.site.shape.name)
            with bound(places(self.site, self.unit, memory.weights)):
                for index, one in enumerate(self.slices):
                    tensors = [next(given) for _ in one.wanting]
                    one.kept = [keeper.keep(t) for t in tensors]
                    flat += self._run(index, one, tensors)
        return tuple(flat)

    def _run(self, index: int, one: _Slice, tensors: Sequence[Tensor]) -> list[Tensor]:
        """One slice through the module; of its outputs and what is collected inside, the tensors that want a gradient."""
        args, kwargs = one.arguments(tensors)
        self.step.seed(index, self.site.position)
        with collecting(one.collects) as collected:
            result = self.site.forward(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((result, collected))
        wanting = self._wanting(leaves)
        outputs = [leaves[i] for i in wanting]
        if len(self.results) == index:
            for position in wanting:
                leaves[position] = None
            self.results.append(_Result(leaves, spec, wanting))
        return outputs

    def _wanting(self, leaves: Sequence[Any]) -> list[int]:
        """Positions of the tensors that want a gradient: those that did when they were recorded, and all that is collected."""
        tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        recorded = dict(zip(tensors, self.site.outputs, strict=False))
        return [i for i in tensors if recorded.get(i, leaves[i].is_floating_point())]

    def take_results(self, flat: Sequence[Tensor]) -> list[tuple[Any, Collected]]:
        """The module's results and what it collected, slice by slice, from the node's flat outputs. Once."""
        given, results = iter(flat), []
        for result in self.results:
            for position in result.wanting:
                result.leaves[position] = next(given)
            results.append(pytree.tree_unflatten(result.leaves, result.spec))
            result.leaves = []
        return results

    def backward(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The buffers stay as the forward left them: running statistics count a batch once."""
        given, input_gradients = iter(gradients), []
        visit = backward_visit(self.step, self.site, self.unit)
        with buffers_replaced(self.site.module, torch.clone), visit as (memory, sink):
            for index, one in enumerate(self.slices):
                incoming = [next(given) for _ in self.results[index].wanting]
                tensors = [kept.find(memory.others[0]) for kept in one.kept]
                weights = self._leaves(memory, sink)
                with torch.enable_grad(), bound(places(self.site, self.unit, weights)):
                    outputs = self._run(index, one, tensors)
                    differentiate(outputs, incoming, [*tensors, *(w for w in weights if w.requires_grad)])
                input_gradients += [t.grad for t in tensors]
        return input_gradients

    def _leaves(self, memory: UnitMemory, sink: GradientSink | None) -> list[Tensor]:
        shapes = self.step.map.units[self.unit].shape.tensors
        return [
            sink.leaf(i, weight) if sink is not None and tensor.trainable else weight
            for i, (tensor, weight) in enumerate(zip(shapes, memory.weights, strict=True))
        ]


def differentiate(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], leaves: Sequence[Tensor]) -> None:
    """Autograd from the outputs that have a gradient down to the leaves."""
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if g is not None and o.requires_grad]
    if pairs and leaves:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs], inputs=list(leaves))
