"""Trains a model whose state does not fit: the interface of lohan.

    with Engine("path/or/hub-name", ssd=["/nvme/lohan"], host_memory="3GiB", optimizer=AdamW(lr=2e-5)) as engine:
        report = engine.step([batch, batch])

What happens in it, from the top:

    open        the model on the meta device; its units; the order in which its forward enters them, recorded
    import      weights, piece by piece, into the store (or into RAM)
    prepare     for a batch: sizes, plan, slots, memory
    step        a schedule begins; the model's forward and backward run through it; the norm decides; updates finish behind
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lohan.config import Numerics, parse_bytes, parse_dtype, parse_store_mode
from lohan.device import open_device
from lohan.device.protocol import Device
from lohan.errors import ModelError, OptionError
from lohan.keep.checkpoint import find_checkpoint
from lohan.optim.adamw import AdamW
from lohan.optim.base import Optimizer
from lohan.plan.plan import Plan
from lohan.report import StepReport
from lohan.run.alone import Alone
from lohan.run.executor import Executor, Run
from lohan.run.measuring import Measuring
from lohan.run.memory import Memory
from lohan.run.passes import LossFn
from lohan.run.saving import Saving
from lohan.run.starting import Batches, Progress, Started, evaluating, silent
from lohan.run.storage import Storage
from lohan.schedule.builder import Mode
from lohan.schedule.slots import Sizes
from lohan.simulate.timeline import lane_use
from lohan.ssd.run_stores import MakeStore


class Engine(Measuring, Saving):
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
        store: str = "auto",
        slice_rows: int = 0,
        loss_tile: int = 4096,
        seed: int = 0,
        room_for: Batches | None = None,
        room_for_evaluation: Batches | None = None,
        resume: bool = False,
        checkpoint: str | Path | None = None,
        identity: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
        make_store: MakeStore | None = None,
    ) -> None:
        """Everything but the model has a name and a unit; what each means is in docs/options.md."""
        self.numerics = Numerics(parse_dtype(dtype), slice_rows, loss_tile, seed)
        self.optimizer: Optimizer = optimizer or AdamW()
        self.placement = _check_placement(placement)
        self._wanted_mode = parse_store_mode(store)
        self._max_grad_norm = _check_max_grad_norm(max_grad_norm)
        self._host_bytes = parse_bytes("host_memory", host_memory)
        budget = None if device_memory is None else parse_bytes("device_memory", device_memory)
        self._folders = [] if make_store is not None else _check_ssd(ssd, self.uses_ssd)
        self._room_for = room_for, room_for_evaluation
        self._resume, self._identity, self._make_store = resume, dict(identity or {}), make_store
        self.checkpoint = None if checkpoint is None else find_checkpoint(checkpoint)
        self._progress: Progress = progress or silent
        self.device = open_device(device, budget) if isinstance(device, str) else device
        self._dtype = torch.bfloat16 if self.numerics.rest_bytes else torch.float32
        planes = tuple(plane.itemsize for plane in self.optimizer.planes)
        rest = (self.numerics.rest_bytes,) if self.numerics.rest_bytes else ()
        self.sizes = Sizes(self.numerics.dtype.nbytes, rest + planes)

        self._executor = Executor(self.device)
        self._memory = Memory(self.device, self._host_bytes)
        self._storage: Storage | None = None
        self._started: Started | None = None
        self._alone: Alone | None = None
        self._last: Run | None = None
        self._run_id = secrets.token_hex(8) if self.checkpoint is None else self.checkpoint.manifest.run
        self._closed = False
        try:
            self._open(model)
        except BaseException:
            self.close()
            raise

    def step(
        self,
        batches: Batches,
        *,
        lr: float | None = None,
        loss_fn: LossFn | None = None,
        trace: str | Path | None = None,
    ) -> StepReport:
        """One optimizer step over micro-batches: dicts of tensors that the model takes.

        `lr` overrides the optimizer's, for a learning-rate schedule. `trace` names a file for the step's timeline.
        """
        began_s = time.perf_counter()
        slices = self._cut(batches)
        started = self._ready(slices, loss_fn)
        if not any(site.needs_backward for site in started.recording.sites):
            raise ModelError("there is nothing to train: the loss depends on no parameter that has requires_grad")
        prepared = self._prepare(slices, loss_fn)
        training = started.training
        read_before, written_before = self._transferred()
        self.device.reset_peak()
        lr = self.optimizer.lr if lr is None else lr
        present: dict[int, set[int]] = {}
        with training.guarded():
            run = training.begin(prepared, Mode.TRAIN, lr, present)
            loss = started.runner.forward_backward(run, slices, loss_fn, training.step, present)
            outcome = training.decide(loss)
        read, written = self._transferred()
        self._last = run
        step_s = time.perf_counter() - began_s
        timeline = self._simulate(run.schedule, slices)
        if trace is not None:
            self.write_trace(trace)
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
            peak_host_bytes=self._memory.host_bytes + (prepared.workspace.nbytes if self.device.is_host else 0),
            peak_device_bytes=self.device.peak_bytes,
            alone_s=None if timeline is None else timeline.work_s,
            simulated=timeline,
        )

    def evaluate(self, batches: Batches, *, loss_fn: LossFn | None = None) -> float:
        """The loss of micro-batches, as `step` would report it, without dropout and without training on them."""
        slices = self._cut(batches)
        with evaluating(self.model):
            prepared = self._prepare(slices, loss_fn, evaluates=True)
        started = self._ready()
        started.training.drain(prepared)
        with started.training.guarded(), evaluating(self.model):
            run = started.training.begin(prepared, Mode.EVALUATE, 0.0, {})
            loss = started.runner.forward(run, slices, loss_fn)
            started.training.settle()
        return loss

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Transformers' `generate`; each of its passes streams the weights once."""
        prepared, started = self._prepare([], evaluates=True), self._ready()
        started.training.drain(prepared)
        begin = partial(started.training.begin, prepared, Mode.EVALUATE, 0.0, {})
        with started.training.guarded(), evaluating(self.model), torch.no_grad(), self.device.computing():
            with started.runner.passes(begin, started.training.settle):
                generate: Callable[..., Tensor] = self.model.generate  # type: ignore[assignment]
                return self.device.fetch(generate(self.device.put(input_ids), **options))


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


__all__ = ["Engine", "LossFn"]
