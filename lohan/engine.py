"""Trains a model whose state does not fit: the interface of lohan.

    with Engine("path/or/hub-name", ssd=["/nvme/lohan"], host_memory="3GiB", optimizer=AdamW(lr=2e-5)) as engine:
        report = engine.step([batch, batch])

What happens in it, from the top:

    open        the model on the meta device; its units; the order in which its forward enters them, recorded
    import      weights, tensor by tensor, into the store (or into RAM)
    prepare     for a batch: sizes, plan, slots, memory
    step        a schedule begins; the model's forward and backward run through it; the norm decides; updates finish behind
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lohan.config import Numerics, parse_bytes, parse_dtype
from lohan.device import open_device
from lohan.device.protocol import Device
from lohan.errors import ClosedError, LohanError, ModelError, OptionError
from lohan.host.pool import HostPool
from lohan.model.load import open_model
from lohan.model.shape import ModelShape
from lohan.model.units import discover
from lohan.model.weights_out import export
from lohan.optim.adamw import AdamW
from lohan.optim.base import Optimizer
from lohan.plan.plan import Plan
from lohan.plan.policies import Situation, auto_plan, memory_plan
from lohan.report import StepReport
from lohan.run.alone import Alone
from lohan.run.batches import HostSlice, cut, on_device
from lohan.run.boundaries import boundary_bytes
from lohan.run.executor import Executor, Run
from lohan.run.memory import Memory
from lohan.run.passes import LossFn, ModelRunner, Pass
from lohan.run.record import Recording, record, record_language_model
from lohan.run.storage import Storage
from lohan.run.training import Prepared, Training
from lohan.run.transfer import Exporter, Importer, UnitBuffers
from lohan.schedule.builder import Mode, ScheduleBuilder
from lohan.schedule.ops import Schedule, Tier
from lohan.schedule.slots import Role, Sizes
from lohan.simulate.simulator import simulate
from lohan.simulate.timeline import Timeline, lane_use
from lohan.simulate.trace import write_trace
from lohan.ssd.base import Store
from lohan.ssd.file_store import FileStore

Batches = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""micro-batches: dicts of tensors that the model takes; one, or several"""


class Engine:
    """A model in training. Use it as a context manager, from one thread."""

    def __init__(
        self,
        model: str | Path | nn.Module,
        *,
        ssd: Sequence[str | Path] | str | Path | None = None,
        device: str | Device = "auto",
        host_memory: str | int,
        device_memory: str | int | None = None,
        dtype: str = "bf16",
        optimizer: Optimizer | None = None,
        max_grad_norm: float | None = 1.0,
        placement: str | Plan = "auto",
        slice_rows: int = 0,
        loss_tile: int = 4096,
        seed: int = 0,
        make_store: Callable[[int, str, bool], Store] | None = None,
    ) -> None:
        """Everything but the model has a name and a unit; what each means is in docs/options.md."""
        self.numerics = Numerics(parse_dtype(dtype), slice_rows, loss_tile, seed)
        self.optimizer: Optimizer = optimizer or AdamW()
        self.placement = _check_placement(placement)
        self._max_grad_norm = _check_max_grad_norm(max_grad_norm)
        self._host_bytes = parse_bytes("host_memory", host_memory)
        budget = None if device_memory is None else parse_bytes("device_memory", device_memory)
        self.device = open_device(device, budget) if isinstance(device, str) else device
        self._make_store = make_store or partial(_file_store, _check_ssd(ssd, self.uses_ssd))
        self._dtype = torch.bfloat16 if self.numerics.rest_bytes else torch.float32
        planes = tuple(plane.itemsize for plane in self.optimizer.planes)
        rest = (self.numerics.rest_bytes,) if self.numerics.rest_bytes else ()
        self.sizes = Sizes(self.numerics.dtype.nbytes, rest + planes)

        self._opened = open_model(model, dtype=self._dtype)
        self.model = self._opened.model
        self.map = discover(self.model)
        self.model.train()
        self._is_language_model = _is_language_model(self.model)
        self._runner: ModelRunner | None = None
        self._training: Training | None = None
        self._prepared: Prepared | None = None
        self._storage: Storage | None = None
        self._executor = Executor(self.device)
        self._memory = Memory(self.device, self._host_bytes)
        self._slice_shapes: list[tuple[int, int]] = []
        self._closed = False
        self._alone: Alone | None = None
        self._last: Run | None = None
        if self._is_language_model:
            self._start(record_language_model(self.model, self.map))

    # ---------------------------------------------------------------- opening

    @property
    def uses_ssd(self) -> bool:
        return self.placement.use_ssd if isinstance(self.placement, Plan) else self.placement != "memory"

    def _start(self, recording: Recording) -> None:
        """From the recorded order to a model that waits for its first batch."""
        units = tuple(unit.shape for unit in self.map.units)
        self.shape = ModelShape(units, recording.sites)
        self._recording = recording
        if self.uses_ssd:
            self._storage = Storage(self._make_store, self.shape, self.sizes, self.numerics)
        else:
            self._prepare([], 1)
        Importer(self.map, self.sizes, self.numerics, self._write_unit).take(self._opened.tensors)
        self._release_source()
        self._put_buffers()
        self._training = Training(self.shape, self.optimizer, self.numerics, self._max_grad_norm, self._executor)
        self._runner = ModelRunner(self.model, self.map, recording, self.numerics, self.device)

    def _write_unit(self, index: int, buffers: UnitBuffers) -> None:
        """A unit from the source, to where it starts."""
        if self._storage is not None:
            self._storage.write_unit(index, buffers)
            return
        weights, state = self._memory.kept(Role.WEIGHTS, index), self._memory.kept(Role.STATE, index)
        assert weights is not None
        parts = [part for part in (buffers.trainable, buffers.frozen) if part is not None]
        torch.cat(parts, out=weights[: sum(p.numel() for p in parts)])
        if buffers.rest is not None and state is not None:
            self._spread_rest(index, buffers.rest, state, to_state=True)

    def _spread_rest(self, index: int, rest: Tensor, state: Tensor, *, to_state: bool) -> None:
        """RAM keeps state chunk by chunk, planes within; the rest of the masters is the first plane."""
        assert self._prepared is not None
        total, each = self.shape.units[index].trainable_elements, self._prepared.plan.chunk_elements
        for first in range(0, total, each):
            num, base = min(each, total - first), first * self.sizes.state
            one, other = state[base : base + 2 * num], rest[2 * first : 2 * (first + num)]
            one.copy_(other) if to_state else other.copy_(one)

    def _release_source(self) -> None:
        """A module that was its own source gives its weights up: the engine has them."""
        for unit in self.map.units:
            for binding in unit.bindings:
                parameter = binding.module._parameters[binding.attribute]
                if parameter is not None and not parameter.is_meta:
                    empty = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                    binding.module._parameters[binding.attribute] = empty

    def _put_buffers(self) -> None:
        if not self.device.is_host:
            with self.device.computing():
                for module in self.model.modules():
                    for name, buffer in module._buffers.items():
                        if buffer is not None:
                            module._buffers[name] = self.device.put(buffer)

    # ---------------------------------------------------------------- preparing for a batch

    def _prepare(self, slices: Sequence[HostSlice], num_slices: int) -> Prepared:
        """Sizes, plan, slots and memory for a batch; kept while batches are no larger."""
        needed = self._boundary_bytes(slices)
        sums = num_slices > 1
        before = self._prepared
        if before is not None and all(n <= b for n, b in zip(needed, before.table.boundary_bytes, strict=True)):
            if before.builder.sums or not sums:
                return before
        if before is not None:
            needed = [max(n, b) for n, b in zip(needed, before.table.boundary_bytes, strict=True)]
            sums = sums or before.builder.sums
            if self._training is not None:
                self._training.drain(before)
        situation = Situation(self.shape, self.sizes, needed, self.device.is_host, sums, self._max_grad_norm is not None)
        plan = self._plan(situation)
        table = situation.slots(plan)
        builder = ScheduleBuilder(self.shape, plan, self.sizes, table, on_host=self.device.is_host, sums=sums)
        if self._storage is not None:
            spilled = [n if plan.boundaries[i] is Tier.SSD else 0 for i, n in enumerate(table.boundary_bytes)]
            self._storage.spill_boundaries(spilled)
        self._memory.adopt(table)
        places = self._storage.places if self._storage is not None else {}
        self._prepared = Prepared(plan, table, builder, self._memory, places)
        if self._training is not None:
            self._training.stale = self._prepared.kept
        return self._prepared

    def _plan(self, situation: Situation) -> Plan:
        if isinstance(self.placement, Plan):
            return self.placement
        if self.placement == "memory":
            return memory_plan(self.shape)
        return auto_plan(situation, self._host_bytes, self.device.memory_bytes)

    def _boundary_bytes(self, slices: Sequence[HostSlice]) -> list[int]:
        needed = [0] * len(self.shape.sites)
        for one in slices:
            for site, inputs in enumerate(self._recording.inputs_of(one)):
                needed[site] += boundary_bytes([(shape, self._dtype) for shape in inputs])
        return needed

    # ---------------------------------------------------------------- training

    def step(
        self,
        batches: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        lr: float | None = None,
        loss_fn: LossFn | None = None,
    ) -> StepReport:
        """One optimizer step over micro-batches: dicts of tensors that the model takes. `lr` overrides the optimizer's."""
        began_s = time.perf_counter()
        slices = cut(batches, self.numerics.slice_rows)
        training, _ = self._ready(slices, loss_fn)
        if not any(site.needs_backward for site in self.shape.sites):
            raise ModelError("there is nothing to train: the loss depends on no parameter that has requires_grad")
        prepared = self._prepare(slices, len(slices))
        read_before, written_before = self._transferred()
        self.device.reset_peak()
        lr = self.optimizer.lr if lr is None else lr
        present: dict[int, set[int]] = {}
        run = training.begin(prepared, Mode.TRAIN, lr, present)
        this = self._pass(run, slices, training.step, present)
        loss = self._forward_backward(this, slices, loss_fn)
        outcome = training.decide(loss)
        read, written = self._transferred()
        self._last = run
        timeline = self._simulate(run.schedule, slices)
        step_s = time.perf_counter() - began_s
        return StepReport(
            step=training.step,
            committed_step=training.committed_step,
            loss=loss,
            grad_norm=outcome.norm,
            clipped=not outcome.skipped and outcome.clip != 1.0,
            skipped=outcome.skipped,
            learning_rate=lr,
            tokens=sum(s.num_targets for s in slices),
            step_s=step_s,
            lanes=lane_use(list(run.spans)),
            ssd_read_bytes=read - read_before,
            ssd_write_bytes=written - written_before,
            peak_host_bytes=self._memory.host_bytes,
            peak_device_bytes=self.device.peak_bytes,
            speed_of_light=None if timeline is None else timeline.work_s[timeline.busiest_lane] / step_s,
            simulated=timeline,
        )

    def _forward_backward(self, this: Pass, slices: Sequence[HostSlice], loss_fn: LossFn | None) -> float:
        """The compute lane of a training schedule, from its first operation to its last."""
        assert self._runner is not None
        random_state = torch.get_rng_state()
        try:
            with self.device.computing():
                on = on_device(slices, self.device, in_tiles=self._runner.computes_tiles(loss_fn))
                losses = self._runner.losses(this, on, loss_fn)
            if wanting := [loss for loss in losses if loss.requires_grad]:
                self.device.run_backward(partial(torch.autograd.backward, wanting))
            this.run.end_compute()
            with self.device.computing():
                parts = self.device.fetch(torch.stack([loss.detach().float() for loss in losses]))
        except BaseException as error:
            self._executor.fail(error)
            raise
        finally:
            torch.set_rng_state(random_state)
        return float(sum(parts.tolist()))

    def measure_lanes(self, batches: Batches, *, loss_fn: LossFn | None = None) -> Alone:
        """Time every lane of a step on these batches alone. It takes about a step, and changes nothing.

        From then on reports say how close a step came to its busiest lane, and what the simulator makes of it.
        """
        slices = cut(batches, self.numerics.slice_rows)
        training, _ = self._ready(slices, loss_fn)
        prepared = self._prepare(slices, len(slices))

        def compute(run: Run, present: dict[int, set[int]]) -> None:
            self._forward_backward(self._pass(run, slices, training.step, present), slices, loss_fn)

        self._alone = training.measure(prepared, compute, sum(s.num_tokens for s in slices))
        return self._alone

    def evaluate(self, batches: Batches, *, loss_fn: LossFn | None = None) -> float:
        """The loss of micro-batches, as `step` would report it, without dropout and without training on them."""
        slices = cut(batches, self.numerics.slice_rows)
        training, runner = self._ready(slices, loss_fn)
        prepared = self._prepare(slices, len(slices))
        training.drain(prepared)
        self.model.eval()
        try:
            run = training.begin(prepared, Mode.EVALUATE, 0.0, {})
            this = self._pass(run, slices, training.step, {})
            with torch.no_grad(), self.device.computing():
                losses = runner.losses(this, on_device(slices, self.device, in_tiles=runner.computes_tiles(loss_fn)), loss_fn)
                parts = self.device.fetch(torch.stack([loss.float() for loss in losses]))
            training.settle()
        except BaseException as error:
            self._executor.fail(error)
            raise
        finally:
            self.model.train()
        return float(sum(parts.tolist()))

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Transformers' `generate`; each of its passes streams the weights once."""
        training, runner = self._ready([], None)
        prepared = self._prepare([], 1)
        training.drain(prepared)

        def begin() -> Pass:
            return self._pass(training.begin(prepared, Mode.EVALUATE, 0.0, {}), [], training.step, {})

        self.model.eval()
        try:
            with torch.no_grad(), self.device.computing(), runner.passes(begin, training.settle):
                generate: Callable[..., Tensor] = self.model.generate  # type: ignore[assignment]
                return self.device.fetch(generate(self.device.put(input_ids), **options))
        finally:
            self.model.train()

    def _pass(self, run: Run, slices: Sequence[HostSlice], step: int, present: dict[int, set[int]]) -> Pass:
        tokens = sum(s.num_targets for s in slices)
        scale = 1.0 / tokens if tokens else math.nan
        seed = (self.numerics.seed, step)
        return Pass(run, max(len(slices), 1), self.map, self._dtype, self.device, seed, scale, present)

    def _ready(self, slices: Sequence[HostSlice], loss_fn: LossFn | None) -> tuple[Training, ModelRunner]:
        """What a step needs; a model that is not a language model is recorded with its first batch."""
        if self._closed:
            raise ClosedError("the engine is closed")
        self._executor.check()
        if self._training is None:
            if loss_fn is None:
                remedy = "Pass loss_fn=, a function of the model and a micro-batch that returns the mean loss"
                raise OptionError("loss_fn", None, f"{type(self.model).__name__} is not a causal language model", remedy)
            self._start(self._record(slices[0], loss_fn))
        assert self._training is not None and self._runner is not None
        for one in slices:
            if loss_fn is not None and not self._recording.covers(one):
                with self._runner.aside():
                    self._recording.add(self._record(one, loss_fn))
        return self._training, self._runner

    def _record(self, one: HostSlice, loss_fn: LossFn) -> Recording:
        """The model on rows like these; its buffers are on the device from the second time on."""

        def fetch(buffer: Tensor) -> Tensor:
            if self._runner is None:
                return buffer
            with self.device.computing():
                return self.device.fetch(buffer)

        return record(self.model, self.map, loss_fn, one.inputs, fetch)

    def _simulate(self, schedule: Schedule, slices: Sequence[HostSlice]) -> Timeline | None:
        """The schedule in virtual time, once the lanes have been measured."""
        if self._alone is None:
            return None
        return simulate(schedule, self._alone.costs(sum(s.num_tokens for s in slices)))

    def write_trace(self, path: str | Path) -> None:
        """The last training step as a trace for Perfetto: measured, and simulated if the lanes have been measured."""
        if self._last is None or self._training is None:
            raise OptionError("trace", str(path), "no step has run yet", "Call step() first")
        self._training.settle()
        processes = {"measured": self._last.spans}
        if self._alone is not None:
            processes["simulated"] = list(simulate(self._last.schedule, self._alone.costs(self._alone.tokens)).spans)
        write_trace(processes, path)

    def _transferred(self) -> tuple[int, int]:
        return self._storage.transferred() if self._storage is not None else (0, 0)

    # ---------------------------------------------------------------- saving and closing

    def save_pretrained(
        self, out_dir: str | Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
    ) -> None:
        """Write a model that Transformers loads: the source's dtype (or `dtype`), from the fp32 masters."""
        self._ready([], None)
        export(self._opened, self._exporter().tensor, out_dir, dtype=dtype, max_shard_bytes=max_shard_bytes)

    def read_parameter(self, name: str) -> Tensor:
        """The fp32 master of a trainable parameter, the weight of a frozen one."""
        self._ready([], None)
        return self._exporter().tensor(name)

    def _exporter(self) -> Exporter:
        assert self._training is not None
        if self._prepared is not None:
            self._training.drain(self._prepared)
        return Exporter(self.map, self.numerics, self._read_unit)

    def _read_unit(self, index: int) -> UnitBuffers:
        assert self._training is not None
        unit = self.shape.units[index]
        trainable, frozen = self.sizes.trainable_of(unit), self.sizes.frozen_of(unit)
        rest_bytes = unit.trainable_elements * self.numerics.rest_bytes
        if self._storage is not None:
            pool = HostPool(trainable + frozen + rest_bytes)
            pool.reserve(trainable + frozen + rest_bytes)
            return self._storage.read_unit(index, self._training.sides[index], pool)
        weights, state = self._memory.kept(Role.WEIGHTS, index), self._memory.kept(Role.STATE, index)
        assert weights is not None
        rest = torch.empty(rest_bytes, dtype=torch.uint8) if rest_bytes and state is not None else None
        if rest is not None and state is not None:
            self._spread_rest(index, rest, state, to_state=False)
        return UnitBuffers(weights[:trainable], weights[trainable : trainable + frozen], rest)

    def close(self) -> None:
        """Finish what runs, give everything back. The store's files stay."""
        if self._closed:
            return
        self._closed = True
        try:
            if self._training is not None and self._prepared is not None and self._executor.error is None:
                self._training.drain(self._prepared)
        finally:
            if self._runner is not None:
                self._runner.close()
            self._executor.close()
            if self._storage is not None:
                self._storage.close()
            self._memory.close()
            self.device.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _is_language_model(model: nn.Module) -> bool:
    """A decoder alone: what an encoder is given has a length of its own."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder


def _file_store(directories: Sequence[str | Path], nbytes: int, name: str, vanishes: bool) -> Store:
    return FileStore.create(directories, nbytes, file_name=name, unlinked=vanishes)


def _check_placement(placement: str | Plan) -> str | Plan:
    if not isinstance(placement, Plan) and placement not in ("auto", "memory"):
        raise OptionError("placement", placement, "no such placement", "Choose 'auto', 'memory', or pass a Plan")
    return placement


def _check_max_grad_norm(value: float | None) -> float | None:
    if value is not None and not value > 0:
        raise OptionError("max_grad_norm", value, "it has to be positive", "Use None (or leave clipping off) for no limit")
    return value


def _check_ssd(ssd: Sequence[str | Path] | str | Path | None, needed: bool) -> list[str | Path]:
    if ssd is None or not ssd:
        if needed:
            raise OptionError(
                "ssd", ssd, "this placement keeps state on an SSD", "Name a directory on each drive, ssd=['/nvme/lohan']"
            )
        return []
    return [ssd] if isinstance(ssd, str | Path) else list(ssd)


__all__ = ["Engine", "LohanError", "LossFn"]
