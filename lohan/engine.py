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

import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lohan.config import Numerics, StoreMode, parse_bytes, parse_dtype, parse_store_mode
from lohan.device import open_device
from lohan.device.protocol import Device
from lohan.errors import ClosedError, ModelError, OptionError
from lohan.keep.checkpoint import find_checkpoint, save_state
from lohan.keep.planes import RunState
from lohan.model.load import open_model
from lohan.model.shape import ModelShape, fingerprint_of
from lohan.model.units import discover
from lohan.model.weights_out import export
from lohan.optim.adamw import AdamW
from lohan.optim.base import Optimizer
from lohan.plan.plan import Plan
from lohan.report import StepReport
from lohan.run.alone import Alone
from lohan.run.batches import HostSlice, cut
from lohan.run.executor import Executor, Run
from lohan.run.memory import Memory
from lohan.run.passes import LossFn, ModelRunner
from lohan.run.places import UnitLayout, layout_of
from lohan.run.preparing import Preparer
from lohan.run.ram import Ram
from lohan.run.record import Recording, record, record_language_model
from lohan.run.state import MemoryState, StoreState
from lohan.run.storage import Storage, Stores
from lohan.run.training import Prepared, Training
from lohan.run.transfer import Exporter, Importer, UnitBuffers
from lohan.schedule.builder import Mode
from lohan.schedule.ops import Schedule
from lohan.schedule.slots import Sizes
from lohan.simulate.simulator import simulate
from lohan.simulate.timeline import Timeline, lane_use
from lohan.simulate.trace import write_trace
from lohan.ssd.records import Commit
from lohan.ssd.run_stores import DriveStores, MadeStores, MakeStore

Progress = Callable[[str, int, int | None], None]
"""what is being done, how much of it is, and of how much, if that is known"""

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
        self._progress: Progress = progress or _silent
        self.device = open_device(device, budget) if isinstance(device, str) else device
        self._dtype = torch.bfloat16 if self.numerics.rest_bytes else torch.float32
        planes = tuple(plane.itemsize for plane in self.optimizer.planes)
        rest = (self.numerics.rest_bytes,) if self.numerics.rest_bytes else ()
        self.sizes = Sizes(self.numerics.dtype.nbytes, rest + planes)

        self._executor = Executor(self.device)
        self._memory = Memory(self.device, self._host_bytes)
        self._storage: Storage | None = None
        self._started: _Started | None = None
        self._alone: Alone | None = None
        self._last: Run | None = None
        self._run_id = secrets.token_hex(8) if self.checkpoint is None else self.checkpoint.manifest.run
        self._closed = False
        try:
            self._open(model)
        except BaseException:
            self.close()
            raise

    # ---------------------------------------------------------------- opening

    def _open(self, model: str | Path | nn.Module) -> None:
        self._progress("open model", 0, None)
        self._opened = open_model(model, dtype=self._dtype)
        self.model = self._opened.model
        self.map = discover(self.model)
        self.model.train()
        if _is_language_model(self.model):
            self._start(record_language_model(self.model, self.map))

    @property
    def uses_ssd(self) -> bool:
        return self.placement.use_ssd if isinstance(self.placement, Plan) else self.placement != "memory"

    @property
    def store_mode(self) -> StoreMode:
        """How the SSD keeps what changes."""
        return self._ready().preparer.mode

    @property
    def shape(self) -> ModelShape:
        """Units and sites, as a plan made by hand counts them. Of a model with a `loss_fn`: known after its first batch."""
        return self._ready().preparer.shape

    def _start(self, recording: Recording) -> None:
        """From the recorded order to a model that waits for its first batch."""
        shape = ModelShape(tuple(unit.shape for unit in self.map.units), recording.sites)
        clips = self._max_grad_norm is not None
        if self.checkpoint is not None:
            self.checkpoint.check_fits(layout_of(shape, self.sizes), self._fingerprint(shape))
        self._put_buffers()
        runner = ModelRunner(self.model, self.map, recording, self.numerics, self.device)
        stores, mode = self._stores(shape), StoreMode.DOUBLE
        preparer = Preparer(shape, self.sizes, self.device, self._memory, self.placement, self._host_bytes, clips, runner, mode)
        contents = {mode: UnitLayout(mode, layout_of(shape, self.sizes)).contents for mode in StoreMode}
        if self.uses_ssd:
            mode = preparer.mode = stores.mode(self._wanted_mode, contents, self._most_spilled(preparer))
        self._make_room(preparer)
        if self.uses_ssd:
            stores.check_room(contents[mode], preparer.spill_bytes)
            self._storage = preparer.storage = Storage(stores, mode, shape, self.sizes, self.numerics)
        resumed = None if self._storage is None else self._storage.resumed
        units: Storage | Ram | None = self._storage
        if units is None:
            units = Ram(self._memory, shape, self.sizes, self.numerics, preparer.adopt().plan.chunk_elements)
        state = self._state_of(preparer)
        if resumed is None and self.checkpoint is not None:
            self.checkpoint.load(state, self._progress)
            resumed = Commit(self.checkpoint.manifest.step, ())
        elif resumed is None:
            told = _Told(units.write_unit, len(self.map.units), self._progress)
            Importer(self.map, self.sizes, self.numerics, told.write_unit).take(self._opened.tensors)
        self._release_source()
        training = Training(shape, self.optimizer, self.numerics, self._max_grad_norm, self._executor, self._storage, resumed)
        if not training.pending:
            training.commit()
        self._started = _Started(recording, preparer, units, training, runner)

    def _stores(self, shape: ModelShape) -> Stores:
        if self._make_store is not None:
            return MadeStores(self._make_store)
        origin = None if self.checkpoint is None else self.checkpoint.origin
        return DriveStores(self._folders, self._resume, self._fingerprint(shape), origin)

    def _state_of(self, preparer: Preparer) -> RunState:
        """Where the run has its planes."""
        layout = layout_of(preparer.shape, self.sizes)
        if self._storage is not None:
            return StoreState(self._storage, layout)
        assert preparer.current is not None, "without an SSD, memory is laid out before anything else"
        return MemoryState(self._memory, layout, preparer.current.plan.chunk_elements)

    def _fingerprint(self, shape: ModelShape) -> dict[str, Any]:
        """What a run has to have in common with the one that it goes on with."""
        optimizer = {name: value for name, value in asdict(self.optimizer).items() if name not in ("lr", "kernel")}  # type: ignore[call-overload]
        return {
            **self._identity,
            "model": fingerprint_of(shape),
            "numerics": {**asdict(self.numerics), "dtype": self.numerics.dtype.value},
            "optimizer": f"{type(self.optimizer).__name__} {optimizer}",
            "max_grad_norm": self._max_grad_norm,
        }

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

    def _ready(self, slices: Sequence[HostSlice] = (), loss_fn: LossFn | None = None) -> _Started:
        """What a step needs; a model that is not a language model is recorded with its first batch."""
        if self._closed:
            raise ClosedError("the engine is closed")
        self._executor.admit()
        if self._started is None:
            if loss_fn is None:
                remedy = "Pass loss_fn=, a function of the model and a micro-batch that returns the mean loss"
                raise OptionError("loss_fn", None, f"{type(self.model).__name__} is not a causal language model", remedy)
            self._start(self._record(slices[0], loss_fn))
        assert self._started is not None
        for one in slices:
            if loss_fn is not None and not self._started.recording.covers(one):
                with self._started.runner.aside():
                    self._started.recording.add(self._record(one, loss_fn))
        return self._started

    def _record(self, one: HostSlice, loss_fn: LossFn) -> Recording:
        """The model on rows like these; its buffers are on the device from the second time on."""

        def fetch(buffer: Tensor) -> Tensor:
            if self._started is None:
                return buffer
            with self.device.computing():
                return self.device.fetch(buffer)

        return record(self.model, self.map, loss_fn, one.inputs, fetch)

    def _make_room(self, preparer: Preparer) -> None:
        """Plan for the largest batches that the caller foresees: what does not fit is refused before anything is written."""
        for batches, evaluates in zip(self._room_for, (False, True), strict=True):
            if batches is not None:
                self._progress("rehearse", 0, None)
                with _evaluating(self.model) if evaluates else nullcontext():
                    preparer.grow(self._cut(batches), None, evaluates=evaluates)

    def _most_spilled(self, preparer: Preparer) -> int:
        """What the boundaries of the largest step that the caller foresees take on the SSD at most."""
        if self._room_for[0] is None:
            return 0
        return Storage.spill_bytes(preparer.size_of(self._cut(self._room_for[0]), evaluates=False).boundary_bytes)

    def _prepare(self, slices: Sequence[HostSlice], loss_fn: LossFn | None = None, *, evaluates: bool = False) -> Prepared:
        """Memory and schedules for a batch; kept while batches are no larger."""
        started = self._ready(slices, loss_fn)
        preparer = started.preparer
        if not preparer.room.covers(preparer.size_of(slices, evaluates=evaluates)):
            self._drain_current()
            self._progress("rehearse", 0, None)
            preparer.grow(slices, loss_fn, evaluates=evaluates)
        if preparer.current is None:
            self._adopt(started)
        return preparer.adopt()

    def _adopt(self, started: _Started) -> Prepared:
        """Memory for the room as it is, with nothing in it yet but gradients of updates that a crash left undone."""
        self._progress("allocate", 0, None)
        prepared = started.preparer.adopt()
        started.training.stale = prepared.kept
        started.training.restore_gradients(prepared)
        self._progress("allocate", 1, 1)
        return prepared

    def _drain_current(self) -> None:
        started = self._ready()
        if started.preparer.current is not None:
            started.training.drain(started.preparer.current)
        elif started.training.pending:
            started.training.drain(self._adopt(started))

    def _cut(self, batches: Batches) -> list[HostSlice]:
        return cut(batches, self.numerics.slice_rows, is_causal=_is_language_model(self.model))

    # ---------------------------------------------------------------- training

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
        with _evaluating(self.model):
            prepared = self._prepare(slices, loss_fn, evaluates=True)
        started = self._ready()
        started.training.drain(prepared)
        with started.training.guarded(), _evaluating(self.model):
            run = started.training.begin(prepared, Mode.EVALUATE, 0.0, {})
            loss = started.runner.forward(run, slices, loss_fn)
            started.training.settle()
        return loss

    def generate(self, input_ids: Tensor, **options: Any) -> Tensor:
        """Transformers' `generate`; each of its passes streams the weights once."""
        prepared, started = self._prepare([], evaluates=True), self._ready()
        started.training.drain(prepared)
        begin = partial(started.training.begin, prepared, Mode.EVALUATE, 0.0, {})
        with started.training.guarded(), _evaluating(self.model), torch.no_grad(), self.device.computing():
            with started.runner.passes(begin, started.training.settle):
                generate: Callable[..., Tensor] = self.model.generate  # type: ignore[assignment]
                return self.device.fetch(generate(self.device.put(input_ids), **options))

    # ---------------------------------------------------------------- measuring

    def measure_lanes(self, batches: Batches, *, loss_fn: LossFn | None = None) -> Alone:
        """Time every lane of a step on these batches alone. It takes about a step, and changes nothing.

        From then on reports say how close a step came to its busiest lane, and what the simulator makes of it.
        """
        if not self.uses_ssd:
            reason = "updates change the only copy of the model, so they cannot be timed on their own"
            raise OptionError("placement", self.placement, reason, "Measure lanes with placement='auto'")
        slices = self._cut(batches)
        prepared, started = self._prepare(slices, loss_fn), self._ready()

        def compute(run: Run, present: dict[int, set[int]]) -> None:
            started.runner.forward_backward(run, slices, loss_fn, started.training.step, present)

        with started.training.guarded():
            self._alone = started.training.measure(prepared, compute, sum(s.num_tokens for s in slices))
        return self._alone

    def _simulate(self, schedule: Schedule, slices: Sequence[HostSlice]) -> Timeline | None:
        """The schedule in virtual time, once the lanes have been measured."""
        if self._alone is None:
            return None
        return simulate(schedule, self._alone.costs(sum(s.num_tokens for s in slices)))

    def write_trace(self, path: str | Path) -> None:
        """The last training step as a trace for Perfetto: measured, and simulated if the lanes have been measured."""
        if self._last is None:
            raise OptionError("trace", str(path), "no step has run yet", "Call step() first")
        training = self._ready().training
        with training.guarded():
            training.settle()
        processes = {"measured": self._last.spans}
        if self._alone is not None:
            processes["simulated"] = list(simulate(self._last.schedule, self._alone.costs(self._alone.tokens)).spans)
        write_trace(processes, path)

    @property
    def ssd_written_bytes(self) -> int:
        """By this engine, from its first byte on: import, steps and what is written behind them, boundaries."""
        return self._transferred()[1]

    @property
    def step_write_bytes(self) -> int:
        """Of weights and state, by a step that updates every parameter; boundaries and waiting gradients come on top."""
        return sum(self.sizes.region_of(unit) for unit in self.shape.units) if self.uses_ssd else 0

    def _transferred(self) -> tuple[int, int]:
        return self._storage.transferred() if self._storage is not None else (0, 0)

    # ---------------------------------------------------------------- saving and closing

    @property
    def num_steps(self) -> int:
        """Optimizer steps done so far, those of earlier processes included; skipped ones do not count."""
        return self._ready().training.step

    @property
    def share_computed(self) -> float | None:
        """How far the pass that computes is, from 0 to 1; none if there is none. Any thread may ask, for a sign of life."""
        return self._executor.share_computed

    def drain(self) -> None:
        """Apply what is pending. On return the last step is what a crash would come back to."""
        self._drain_current()
        self._ready().training.commit()

    def save_pretrained(
        self, out_dir: str | Path, *, dtype: torch.dtype | None = None, max_shard_bytes: int = 5 * 10**9
    ) -> dict[str, int]:
        """Write a model that Transformers loads: the source's dtype (or `dtype`), from the fp32 masters.

        All of it is read back and compared before the files take their names. Returns the checksum of each tensor.
        """
        return export(self._opened, self._exporter().tensor, out_dir, dtype=dtype, max_shard_bytes=max_shard_bytes)

    def save_state(self, folder: str | Path, *, notes: Mapping[str, Any] | None = None) -> None:
        """Write all that a run goes on from (`checkpoint=`), read it back and compare it; whole or not there.

        `notes`, as JSON has them, go into its manifest.
        """
        self.drain()
        training, preparer = self._ready().training, self._ready().preparer
        save_state(
            folder,
            self._state_of(preparer),
            layout_of(preparer.shape, self.sizes),
            run_id=self.run_id,
            step=training.step,
            fingerprint=self._fingerprint(preparer.shape),
            notes=notes or {},
            progress=self._progress,
        )

    @property
    def state_bytes(self) -> int:
        """What `save_state` writes."""
        return layout_of(self.shape, self.sizes).nbytes

    @property
    def model_bytes(self) -> int:
        """What `save_pretrained` writes, if it is not told another dtype."""
        return sum(spec.num_bytes for spec in self._opened.stored.values())

    @property
    def run_id(self) -> str:
        """Of this run and of all that go on from its checkpoints."""
        self._ready()
        return self._storage.run_id if self._storage is not None else self._run_id

    def read_parameter(self, name: str) -> Tensor:
        """The fp32 master of a trainable parameter, the weight of a frozen one."""
        return self._exporter().tensor(name)

    def _exporter(self) -> Exporter:
        self.drain()
        started = self._ready()

        return Exporter(self.map, self.numerics, started.units.read_unit)

    def close(self) -> None:
        """Finish what runs, give everything back. The store's files stay. Raises what went wrong since the last call."""
        if self._closed:
            return
        self._closed = True
        started = self._started
        with ExitStack() as last_first:
            last_first.callback(self._memory.close)
            last_first.callback(self.device.close)
            if self._storage is not None:
                last_first.callback(self._storage.close)
            if started is not None:
                last_first.callback(started.training.close)
            last_first.callback(self._executor.close)
            if started is not None:
                last_first.callback(started.runner.close)
            if started is not None and started.preparer.current is not None and not self._executor.is_told:
                self._executor.admit()
                started.training.drain(started.preparer.current)
                started.training.commit()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """An error of the block counts for more than one of closing after it."""
        try:
            self.close()
        except Exception as another:
            if error is None:
                raise
            error.add_note(f"closing the engine failed as well: {another!r}")


@dataclass(frozen=True, slots=True)
class _Started:
    """What exists once the model's order is known."""

    recording: Recording
    preparer: Preparer
    units: Storage | Ram
    training: Training
    runner: ModelRunner


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout and the like are off."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def _is_language_model(model: nn.Module) -> bool:
    """A decoder alone: what an encoder is given has a length of its own."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder


class _Told:
    """Units that are written, with word of how many they are."""

    def __init__(self, write_unit: Callable[[int, UnitBuffers], None], num_units: int, progress: Progress) -> None:
        self._write_unit, self._num_units, self._progress = write_unit, num_units, progress
        self._num_written = 0
        progress("import weights", 0, num_units)

    def write_unit(self, index: int, buffers: UnitBuffers) -> None:
        self._write_unit(index, buffers)
        self._num_written += 1
        self._progress("import weights", self._num_written, self._num_units)


def _silent(phase: str, done: int, total: int | None) -> None:
    """Nobody asked."""


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
