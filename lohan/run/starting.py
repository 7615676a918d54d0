"""What an engine is before its first step: from a model's name to units that a schedule can move.

    open      the model on the meta device; its units; the order in which its forward enters them, recorded
    start     the store (or RAM), refused where it does not fit; what is in it: a run that goes on, a checkpoint, or the weights
              of the source
    prepare   for a batch: sizes, plan, slots, memory; kept while batches are no larger

A model that is not a language model is recorded, and started, with its first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lohan.config import Numerics, StoreMode
from lohan.device.protocol import Device
from lohan.errors import ClosedError, OptionError
from lohan.keep.checkpoint import Checkpoint
from lohan.keep.planes import RunState
from lohan.model.load import OpenedModel, open_model
from lohan.model.shape import ModelShape, fingerprint_of
from lohan.model.units import ModelMap, discover
from lohan.optim.base import Optimizer
from lohan.plan.plan import Plan
from lohan.run.batches import HostSlice, cut
from lohan.run.executor import Executor
from lohan.run.importer import import_weights
from lohan.run.memory import Memory
from lohan.run.passes import LossFn, ModelRunner
from lohan.run.places import UnitLayout, layout_of
from lohan.run.preparing import Preparer
from lohan.run.ram import Ram
from lohan.run.record import Recording, record, record_language_model
from lohan.run.state import MemoryState, StoreState
from lohan.run.storage import Storage, Stores
from lohan.run.training import Prepared, Training
from lohan.schedule.slots import Sizes
from lohan.ssd.records import Commit
from lohan.ssd.run_stores import DriveStores, MadeStores, MakeStore

Progress = Callable[[str, int, int | None], None]
"""what is being done, how much of it is, and of how much, if that is known"""

Batches = Sequence[Mapping[str, Any]] | Mapping[str, Any]
"""micro-batches: dicts of tensors that the model takes; one, or several"""


@dataclass(frozen=True, slots=True)
class Started:
    """What exists once the model's order is known."""

    recording: Recording
    preparer: Preparer
    units: Storage | Ram
    training: Training
    runner: ModelRunner


class Starting:
    """A model on its way to its first step. The engine's constructor sets what is declared here."""

    numerics: Numerics
    optimizer: Optimizer
    placement: str | Plan
    device: Device
    sizes: Sizes
    checkpoint: Checkpoint | None
    model: nn.Module
    map: ModelMap
    _opened: OpenedModel
    _executor: Executor
    _memory: Memory
    _storage: Storage | None
    _started: Started | None
    _run_id: str
    _dtype: torch.dtype
    _wanted_mode: StoreMode | None
    _max_grad_norm: float | None
    _host_bytes: int
    _folders: list[str | Path]
    _room_for: tuple[Batches | None, Batches | None]
    _resume: bool
    _identity: dict[str, Any]
    _make_store: MakeStore | None
    _progress: Progress
    _closed: bool

    def _open(self, model: str | Path | nn.Module) -> None:
        self._progress("open model", 0, None)
        self._opened = open_model(model, dtype=self._dtype)
        self.model = self._opened.model
        self.map = discover(self.model)
        self.model.train()
        if is_language_model(self.model):
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
            layout = layout_of(shape, self.sizes)
            import_weights(self._opened.tensors, shape.units, layout, self.numerics, state, self._progress)
        self._release_source()
        training = Training(shape, self.optimizer, self.numerics, self._max_grad_norm, self._executor, self._storage, resumed)
        if not training.pending:
            training.commit()
        self._started = Started(recording, preparer, units, training, runner)

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

    def _ready(self, slices: Sequence[HostSlice] = (), loss_fn: LossFn | None = None) -> Started:
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
                with evaluating(self.model) if evaluates else nullcontext():
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

    def _adopt(self, started: Started) -> Prepared:
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
        return cut(batches, self.numerics.slice_rows, is_causal=is_language_model(self.model))


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout and the like are off."""
    model.eval()
    try:
        yield
    finally:
        model.train()


def is_language_model(model: nn.Module) -> bool:
    """A decoder alone: what an encoder is given has a length of its own."""
    return isinstance(model, PreTrainedModel) and model.can_generate() and not model.config.is_encoder_decoder


def silent(phase: str, done: int, total: int | None) -> None:
    """Nobody asked."""
