"""The model's own forward, driven through the schedule: its sites are intercepted, everything between them runs as it is.

train      all slices in lockstep, sites as nodes of the outer graph; then one backward through that graph
evaluate   the same without a graph
generate   Transformers' own generation; every pass through the model is one evaluation
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lohan.config import Numerics, keyed_seed
from lohan.device.protocol import Device
from lohan.errors import ScheduleError
from lohan.model.shape import UnitKind
from lohan.model.units import Binding, ModelMap, Site
from lohan.run.edges import EmbeddingCall, HeadLogitsCall, HeadLossCall, Transform
from lohan.run.executor import Run
from lohan.run.lockstep import Arrival, Lockstep
from lohan.run.record import Recording
from lohan.run.sites import ModuleCall, SiteCall, SiteNode, SiteSpec, take_apart

GLUE = 1 << 20
"""added to a site's number: the place between it and the next one"""


class HeadReached(Exception):
    """Unwinds the model's forward where the loss in tiles takes over: everything before the head has run."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one micro-batch, on the device."""

    inputs: Mapping[str, Any]
    weight: float
    """its share of the step's loss, where the model or the caller computes the mean"""
    rows: Tensor | None = None
    """positions, in [rows * length], of the tokens that have a target"""
    targets: Tensor | None = None


@dataclass(slots=True)
class Pass:
    """One pass of all slices through the model: what sites need of it."""

    run: Run
    num_slices: int
    map: ModelMap
    dtype: torch.dtype
    device: Device
    seed_base: tuple[int, int]
    """the run's seed, and the step"""
    scale: float = 1.0
    """on the summed loss of a token"""
    present: dict[int, set[int]] = field(default_factory=dict)

    def seed(self, slice_index: int, place: int) -> None:
        self.device.seed(keyed_seed(*self.seed_base, slice_index, place))


class ModelRunner:
    """A model whose sites wait for their weights."""

    def __init__(self, model: nn.Module, model_map: ModelMap, recording: Recording, numerics: Numerics, device: Device) -> None:
        self.model, self.map, self.recording, self.numerics, self.device = model, model_map, recording, numerics, device
        self.transform: Transform | None = recording.transform if numerics.loss_tile else None
        self.specs = [self._spec(position, model_map.sites[number]) for position, number in enumerate(recording.order)]
        self.head = next((spec.position for spec in self.specs if spec.shape.kind is UnitKind.HEAD), None)
        self._pass: Pass | None = None
        self._lockstep: Lockstep | None = None
        self._in_tiles = False
        self._begin_pass: Callable[[], Pass] | None = None
        self._end_pass: Callable[[], None] | None = None
        with device.computing():
            self._anchor = device.put(torch.zeros(())).requires_grad_()
        for spec in self.specs:
            spec.module.forward = partial(self._enter, spec.position)

    def _spec(self, position: int, site: Site) -> SiteSpec:
        bindings: dict[int, list[tuple[int, Binding]]] = {}
        for unit in site.units:
            numbers = {id(tensor): index for index, tensor in enumerate(self.map.units[unit].shape.tensors)}
            own = [b for b in self.map.units[unit].bindings if b.site == site.index]
            bindings[unit] = [(numbers[id(b.tensor)], b) for b in own]
        return SiteSpec(position, self.recording.sites[position], site.module, site.module.forward, bindings)

    def close(self) -> None:
        """Give the modules their own forward back."""
        for spec in self.specs:
            spec.module.__dict__.pop("forward", None)

    # ---------------------------------------------------------------- programs

    def losses(
        self, this: Pass, slices: Sequence[Slice], loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None
    ) -> list[Tensor]:
        """The share of each slice in the step's loss; their sum is the loss."""
        self._in_tiles = loss_fn is None and self.transform is not None and all(s.targets is not None for s in slices)
        program = self._tiled_loss if self._in_tiles else partial(self._whole_loss, loss_fn=loss_fn)
        self._pass = this
        self._lockstep = Lockstep(self._run_site, lambda index, site: this.seed(index, site + GLUE))
        try:
            return self._lockstep.run([partial(program, one) for one in slices])
        finally:
            self._pass = self._lockstep = None
            self._in_tiles = False

    def _tiled_loss(self, one: Slice) -> Tensor:
        assert self._lockstep is not None and self.head is not None and one.rows is not None
        try:
            self.model(**one.inputs, use_cache=False)
        except HeadReached as reached:
            hidden = reached.hidden.flatten(0, -2).index_select(0, one.rows)
        else:
            raise ScheduleError("the model's forward did not reach its head")
        loss: Tensor = self._lockstep.arrive(self.head, (hidden, one.targets), {})
        return loss

    def _whole_loss(self, one: Slice, *, loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor] | None) -> Tensor:
        loss: Tensor = self.model(**one.inputs, use_cache=False).loss if loss_fn is None else loss_fn(self.model, one.inputs)
        return loss * one.weight

    @contextmanager
    def passes(self, begin: Callable[[], Pass], end: Callable[[], None]) -> Iterator[None]:
        """Whatever runs the model inside (generation), each of its passes begins and ends like this."""
        self._begin_pass, self._end_pass = begin, end
        try:
            yield
        finally:
            self._begin_pass = self._end_pass = self._pass = None

    # ---------------------------------------------------------------- sites

    def _enter(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """What a site's module does when the model calls it."""
        if self._lockstep is not None:
            if self._in_tiles and position == self.head:
                raise HeadReached(args[0])
            return self._lockstep.arrive(position, args, kwargs)
        if self._begin_pass is None or self._end_pass is None:
            raise ScheduleError(f"{self.specs[position].shape.name} was called outside of the engine, which holds its weights")
        if position == 0:
            self._pass = self._begin_pass()
        result = self._run_site(position, [Arrival(position, args, kwargs)])[0]
        if position == len(self.specs) - 1:
            self._end_pass()
        return result

    def _run_site(self, position: int, arrivals: list[Arrival]) -> list[Any]:
        assert self._pass is not None
        site = self.specs[position]
        kind, pieces = site.shape.kind, len(site.shape.units)
        if kind is UnitKind.EMBEDDING and pieces > 1:
            return list(self._node(site, EmbeddingCall(self._pass, site, [_only(a) for a in arrivals]), []))
        if kind is UnitKind.HEAD and self._in_tiles:
            assert self.transform is not None
            targets = [arrival.args[1] for arrival in arrivals]
            call = HeadLossCall(
                self._pass, site, targets, scale=self._pass.scale, tile=self.numerics.loss_tile, transform=self.transform
            )
            return list(self._node(site, call, [arrival.args[0] for arrival in arrivals]))
        if kind is UnitKind.HEAD and pieces > 1:
            return list(self._node(site, HeadLogitsCall(self._pass, site), [_only(a) for a in arrivals]))
        apart = [take_apart(arrival) for arrival in arrivals]
        module_call = ModuleCall(self._pass, site, [one for one, _ in apart])
        inputs = [tensor for _, tensors in apart for tensor in tensors]
        del apart, arrivals
        return module_call.results(self._node(site, module_call, inputs))

    def _node(self, site: SiteSpec, call: SiteCall, inputs: list[Tensor]) -> Sequence[Tensor]:
        """The call's outputs, as a node of the outer graph where gradients flow through it."""
        if torch.is_grad_enabled() and site.shape.needs_backward:
            outputs: tuple[Tensor, ...] = SiteNode.apply(call, self._anchor, *inputs)  # type: ignore[no-untyped-call]
            return outputs
        return call.forward(inputs)


def _only(arrival: Arrival) -> Tensor:
    """The one argument of an edge's call."""
    values = [*arrival.args, *arrival.kwargs.values()]
    if len(values) != 1 or not isinstance(values[0], Tensor):
        raise ScheduleError(f"an embedding or head in pieces is called with one tensor, not with {len(values)} arguments")
    return values[0]
