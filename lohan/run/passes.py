"""The model's own forward, driven through the schedule: its sites are intercepted, everything between them runs as it is.

train      all slices in lockstep, sites as nodes of the outer graph; then one backward through that graph
evaluate   the same without a graph
generate   Transformers' own generation; every pass through the model is one evaluation
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lohan.config import Numerics, keyed_seed
from lohan.device.protocol import Device
from lohan.errors import OptionError, ScheduleError
from lohan.model.shape import UnitKind
from lohan.model.units import Binding, ModelMap, Site
from lohan.run.batches import HostSlice, Slice, on_device
from lohan.run.caches import without_cache
from lohan.run.captures import Collected, hand_over, num_collected
from lohan.run.edges import EmbeddingCall, HeadLogitsCall, HeadLossCall
from lohan.run.executor import Run
from lohan.run.lockstep import Arrival, Lockstep
from lohan.run.logits import Transform
from lohan.run.record import Recording
from lohan.run.sites import ModuleCall, SiteCall, SiteNode, SiteSpec, take_apart

LossFn = Callable[[nn.Module, Mapping[str, Any]], Tensor]
"""a model and a micro-batch -> its mean loss, a scalar"""
GLUE = 1 << 20
"""added to a site's number: the place between it and the next one"""


class HeadReached(Exception):
    """Unwinds the model's forward where the loss in tiles takes over: everything before the head has run."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


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


@contextmanager
def _keeping_random_state() -> Iterator[None]:
    """The caller's random numbers are not ours."""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class ModelRunner:
    """A model whose sites wait for their weights."""

    def __init__(self, model: nn.Module, model_map: ModelMap, recording: Recording, numerics: Numerics, device: Device) -> None:
        self.model, self.map, self.recording, self.numerics, self.device = model, model_map, recording, numerics, device
        self.dtype = torch.bfloat16 if numerics.rest_bytes else torch.float32
        self.transform: Transform | None = recording.transform if numerics.loss_tile else None
        self.specs = [self._spec(position, model_map.sites[number]) for position, number in enumerate(recording.order)]
        self.head = next((spec.position for spec in self.specs if spec.shape.kind is UnitKind.HEAD), None)
        self._pass: Pass | None = None
        self._lockstep: Lockstep | None = None
        self._in_tiles = False
        self._reached = 0
        self._begin_run: Callable[[], Run] | None = None
        self._end_run: Callable[[], None] | None = None
        with device.computing():
            self._anchor = device.put(torch.zeros(())).requires_grad_()
        self._intercept()

    def _intercept(self) -> None:
        for spec in self.specs:
            spec.module.forward = partial(self._enter, spec.position)

    def _spec(self, position: int, site: Site) -> SiteSpec:
        bindings: dict[int, list[tuple[int, Binding]]] = {}
        for unit in site.units:
            numbers = {id(tensor): index for index, tensor in enumerate(self.map.units[unit].shape.tensors)}
            own = [b for b in self.map.units[unit].bindings if b.site == site.index]
            bindings[unit] = [(numbers[id(b.tensor)], b) for b in own]
        shape, outputs = self.recording.sites[position], self.recording.outputs[position]
        return SiteSpec(position, shape, site.module, site.module.forward, bindings, outputs)

    def close(self) -> None:
        """Give the modules their own forward back."""
        for spec in self.specs:
            spec.module.__dict__.pop("forward", None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """The model runs as if it were not intercepted: to be recorded once more."""
        self.close()
        try:
            yield
        finally:
            self._intercept()

    # ---------------------------------------------------------------- passes

    def forward_backward(
        self, run: Run, slices: Sequence[HostSlice], loss_fn: LossFn | None, step: int, present: dict[int, set[int]]
    ) -> float:
        """The compute lane of a training schedule, from its first operation to its last; the loss."""
        with _keeping_random_state(), run.failing():
            losses = self._forward(run, slices, loss_fn, step, present)
            if wanting := [loss for loss in losses if loss.requires_grad]:
                self.device.run_backward(partial(torch.autograd.backward, wanting))
            run.end_compute()
            return self._fetch(losses)

    def forward(self, run: Run, slices: Sequence[HostSlice], loss_fn: LossFn | None) -> float:
        """The compute lane of an evaluation; the loss."""
        with _keeping_random_state(), run.failing(), torch.no_grad():
            return self._fetch(self._forward(run, slices, loss_fn, 0, {}))

    def _forward(
        self, run: Run, slices: Sequence[HostSlice], loss_fn: LossFn | None, step: int, present: dict[int, set[int]]
    ) -> list[Tensor]:
        num_targets = sum(one.num_targets for one in slices)
        scale = 1.0 / num_targets if num_targets else math.nan
        this = Pass(run, len(slices), self.map, self.dtype, self.device, (self.numerics.seed, step), scale, present)
        with self.device.computing():
            return self.losses(this, on_device(slices, self.device, in_tiles=self.computes_tiles(loss_fn)), loss_fn)

    def _fetch(self, losses: Sequence[Tensor]) -> float:
        with self.device.computing():
            parts = self.device.fetch(torch.stack([loss.detach().float() for loss in losses]))
        return float(sum(parts.tolist()))

    # ---------------------------------------------------------------- programs

    def computes_tiles(self, loss_fn: LossFn | None) -> bool:
        """Whether the loss is computed in tiles of the vocabulary, by the head."""
        return loss_fn is None and self.transform is not None

    def losses(self, this: Pass, slices: Sequence[Slice], loss_fn: LossFn | None) -> list[Tensor]:
        """The share of each slice in the step's loss; their sum is the loss."""
        self._in_tiles = self.computes_tiles(loss_fn) and all(s.targets is not None for s in slices)
        program = self._tiled_loss if self._in_tiles else partial(self._whole_loss, loss_fn=loss_fn)
        self._pass, self._reached = this, 0
        self._lockstep = Lockstep(self._run_site, lambda index, site: this.seed(index, site + GLUE))
        try:
            with without_cache(self.model):
                losses = self._lockstep.run([partial(program, one) for one in slices])
            self._expect(len(self.specs))
            return losses
        finally:
            self._pass = self._lockstep = None
            self._in_tiles = False

    def _tiled_loss(self, one: Slice) -> Tensor:
        assert self._lockstep is not None and self.head is not None and one.rows is not None
        try:
            self.model(**one.inputs)
        except HeadReached as reached:
            hidden = reached.hidden.flatten(0, -2).index_select(0, one.rows)
        else:
            raise ScheduleError("the model's forward did not reach its head")
        loss: Tensor = self._lockstep.arrive(Arrival(self.head, (hidden, one.targets), {}, {}))[0]
        return loss

    def _whole_loss(self, one: Slice, *, loss_fn: LossFn | None) -> Tensor:
        loss: Tensor | None
        loss = self.model(**one.inputs).loss if loss_fn is None else loss_fn(self.model, one.inputs)
        if loss is None:
            given = ", ".join(one.inputs)
            raise OptionError("batches", given, "the model computes no loss from these", "Give labels, or pass loss_fn=")
        # A mean over no targets is NaN, and stays so when it is weighted with zero.
        return loss * one.weight if one.weight else torch.zeros_like(loss.detach())

    @contextmanager
    def passes(self, begin: Callable[[], Run], end: Callable[[], None]) -> Iterator[None]:
        """Whatever runs the model inside (generation), each of its passes begins and ends like this."""
        self._begin_run, self._end_run = begin, end
        try:
            yield
        finally:
            self._begin_run = self._end_run = self._pass = None

    # ---------------------------------------------------------------- sites

    def _enter(self, position: int, *args: Any, **kwargs: Any) -> Any:
        """What a site's module does when the model calls it."""
        if self._lockstep is not None and self._in_tiles and position == self.head:
            raise HeadReached(args[0])
        arrival = Arrival(position, args, kwargs, num_collected())
        if self._lockstep is not None:
            result, collected = self._lockstep.arrive(arrival)
            hand_over(collected)
            return result
        if self._begin_run is None or self._end_run is None:
            raise ScheduleError(f"{self.specs[position].shape.name} was called outside of the engine, which holds its weights")
        if position == 0:
            self._reached = 0
            self._pass = Pass(self._begin_run(), 1, self.map, self.dtype, self.device, (self.numerics.seed, 0))
        result, collected = self._run_site(position, [arrival])[0]
        hand_over(collected)
        if position == len(self.specs) - 1:
            self._end_run()
        return result

    def _expect(self, position: int) -> None:
        """The forward stands before this site, or at its end."""
        if position != self._reached:
            names = [*(spec.shape.name for spec in self.specs), "the end"]
            raise ScheduleError(
                f"the model departs from the order that was recorded at the start: expected {names[self._reached]}, "
                f"got {names[position]}. Its forward must visit the same modules in every step"
            )

    def _run_site(self, position: int, arrivals: list[Arrival]) -> list[tuple[Any, Collected]]:
        """Each slice's result, and what the model collects beside it."""
        self._expect(position)
        self._reached += 1
        assert self._pass is not None
        site = self.specs[position]
        kind, pieces = site.shape.kind, len(site.shape.units)
        if kind is UnitKind.EMBEDDING and pieces > 1:
            return _alone(self._node(site, EmbeddingCall(self._pass, site, [_only(a) for a in arrivals]), []))
        if kind is UnitKind.HEAD and self._in_tiles:
            assert self.transform is not None
            targets = [arrival.args[1] for arrival in arrivals]
            call = HeadLossCall(
                self._pass, site, targets, scale=self._pass.scale, tile=self.numerics.loss_tile, transform=self.transform
            )
            return _alone(self._node(site, call, [arrival.args[0] for arrival in arrivals]))
        if kind is UnitKind.HEAD and pieces > 1:
            return _alone(self._node(site, HeadLogitsCall(self._pass, site), [_only(a) for a in arrivals]))
        apart = [take_apart(arrival) for arrival in arrivals]
        module_call = ModuleCall(self._pass, site, [one for one, _ in apart])
        inputs = [tensor for _, tensors in apart for tensor in tensors]
        del apart, arrivals
        return module_call.take_results(self._node(site, module_call, inputs))

    def _node(self, site: SiteSpec, call: SiteCall, inputs: list[Tensor]) -> Sequence[Tensor]:
        """The call's outputs, as a node of the outer graph where gradients flow through it."""
        if torch.is_grad_enabled() and site.shape.needs_backward:
            outputs: tuple[Tensor, ...] = SiteNode.apply(call, self._anchor, *inputs)  # type: ignore[no-untyped-call]
            return outputs
        with torch.no_grad():
            return call.forward(inputs)


def _alone(outputs: Sequence[Tensor]) -> list[tuple[Any, Collected]]:
    """Results of an edge, which has nothing inside that a model would collect."""
    return [(output, {}) for output in outputs]


def _only(arrival: Arrival) -> Tensor:
    """The one argument of an edge's call."""
    values = [*arrival.args, *arrival.kwargs.values()]
    if len(values) != 1 or not isinstance(values[0], Tensor):
        raise ScheduleError(f"an embedding or head in pieces is called with one tensor, not with {len(values)} arguments")
    return values[0]
