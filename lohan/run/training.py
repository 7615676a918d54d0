"""The state of a training run between schedules: what is pending, where on the SSD each unit is, what comes next.

    begin   a schedule starts; what was pending is written by it, and the step before is committed as these units move
    decide  the norm is known: accept, redo, or skip
    settle  the schedule is done: units are in their new places, and the step is committed. Updates that wait for the next
            schedule are part of that commit, if their gradients are on the SSD: after a crash they are made from those

*Accept*: updates made during backward stand; deferred ones are pending. *Redo*: the norm exceeds the limit; updates made in
other places are worthless, all are pending, with the clip coefficient. *Skip*: loss or norm is not finite; nothing happened.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from lohan.config import Numerics, StoreMode
from lohan.model.shape import ModelShape
from lohan.optim.base import Optimizer
from lohan.optim.norm import clip_coefficient
from lohan.optim.team import Team
from lohan.optim.worker import Hyper, UpdateWorker
from lohan.plan.plan import Plan, Update
from lohan.run.alone import Alone, AloneMeasurement
from lohan.run.executor import Executor, Run
from lohan.run.gate import COMMIT_EVERY, Gate, Move
from lohan.run.memory import Memory, Workspace
from lohan.run.places import NOWHERE
from lohan.run.ssd_map import Place, SsdMap
from lohan.run.storage import Storage
from lohan.schedule.builder import Call, Mode, ScheduleBuilder
from lohan.schedule.checker import check
from lohan.schedule.ops import Kind, Lane, Op, Schedule, Tier
from lohan.schedule.slots import Role, SlotTable
from lohan.ssd.records import Commit, Redo

KEPT = (Role.WEIGHTS, Role.STATE)
"""what RAM may keep beside the SSD"""


@dataclass(slots=True)
class Prepared:
    """A plan made real: slots, memory, schedules."""

    plan: Plan
    table: SlotTable
    builder: ScheduleBuilder
    memory: Memory
    workspace: Workspace
    schedules: dict[Call, Schedule] = field(default_factory=dict)

    @property
    def kept(self) -> frozenset[tuple[Role, int]]:
        """All weights and state that RAM keeps beside the SSD."""
        if not self.plan.use_ssd:
            return frozenset()
        units = range(len(self.plan.units))
        return frozenset((r, u) for r in KEPT for u in units if self.table.permanent(Tier.HOST, r, u) is not None)

    def schedule(self, call: Call) -> Schedule:
        """Built once for each call, and checked."""
        if call not in self.schedules:
            schedule = self.builder.build(call)
            check(schedule)
            self.schedules[call] = schedule
        return self.schedules[call]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step."""

    norm: float
    clip: float
    skipped: bool


class Training:
    """Runs schedules one after the other and keeps the books."""

    def __init__(
        self,
        shape: ModelShape,
        optimizer: Optimizer,
        numerics: Numerics,
        max_grad_norm: float | None,
        executor: Executor,
        storage: Storage | None = None,
        resumed: Commit | None = None,
    ) -> None:
        self.shape, self.optimizer, self.numerics, self.max_grad_norm = shape, optimizer, numerics, max_grad_norm
        self.executor = executor
        self._storage = storage
        self._commits = storage.commits if storage is not None and storage.commits.keeps else None
        self.step = 0 if resumed is None else resumed.step
        self.pending: frozenset[int] = frozenset()
        self.stale: frozenset[tuple[Role, int]] = frozenset()
        """what RAM keeps, but not in the version that the SSD has"""
        self._expects_clipping = False
        """the step before was clipped, so this one probably is"""
        self._pending_hyper: Hyper | None = None
        self._pending_present: dict[int, set[int]] = {}
        if resumed is not None and (redo := resumed.redo) is not None:
            self.pending = frozenset(redo.present)
            self._pending_present = {unit: set(tensors) for unit, tensors in redo.present.items()}
            self._pending_hyper = Hyper(resumed.step, redo.lr, redo.clip)
        self._running: _Running | None = None
        self._team = Team(executor.device.optimizer_threads)

    @property
    def committed_step(self) -> int:
        """What a crash now would come back to, -1 for nothing; where only RAM has the model, steps that are all applied."""
        return self.step - bool(self.pending) if self._commits is None else self._commits.durable_step

    def begin(self, prepared: Prepared, mode: Mode, lr: float, present: dict[int, set[int]]) -> Run:
        """Start a schedule. `present` fills during its backward pass."""
        self.settle()
        call = Call(mode, self.pending, self.stale, defer=self._expects_clipping and mode is Mode.TRAIN)
        now = Hyper(self.step + 1, lr, 1.0)
        schedule = prepared.schedule(call)
        moves = self._moves(schedule, call.pending)
        gate = self._gate(moves)
        ssd = self._ssd_map(prepared, {move.unit: move.place for move in moves}, admit=_at_once if gate is None else gate.admit)
        worker = self._worker(prepared, ssd, now, self._pending_hyper, present, self._pending_present)
        run = self.executor.start(schedule, prepared.memory, ssd, worker)
        self._running = _Running(run, worker, prepared, call, lr, present, moves)
        if gate is not None:
            self._commit_moves(run, moves, gate)
        return run

    def _moves(self, schedule: Schedule, pending: frozenset[int]) -> list[Move]:
        """Where the units whose update is pending go, in the order in which they are written."""
        if self._storage is None:
            return []
        writes = [op for op in schedule.lane(Lane.SSD_WRITE) if op.kind is Kind.WRITE_UPDATE and op.unit in pending]
        last_write = {op.unit: op for op in writes if op.writes[0].content.version == 1}
        targets = self._storage.places.next_of(last_write)
        return [Move(unit, targets[unit], op) for unit, op in last_write.items()]

    def _ssd_map(
        self, prepared: Prepared, targets: Mapping[int, int], admit: Callable[[Op], None], *, is_rehearsal: bool = False
    ) -> SsdMap:
        """The places of a schedule that begins now: `targets` are where units go whose update it writes."""
        if self._storage is None:
            return SsdMap({})
        places: dict[tuple[Role, int], Place] = dict(self._storage.fixed)
        for unit, place in enumerate(self._storage.places.now):
            if place != NOWHERE:
                places[Role.SIDE_0, unit] = self._storage.place(place)
        for unit, place in {**self._storage.places.next_of(targets), **targets}.items():
            places[Role.SIDE_1, unit] = self._storage.place(place)
        return SsdMap.of(prepared.table, places, admit, is_rehearsal=is_rehearsal)

    def _gate(self, moves: Sequence[Move]) -> Gate | None:
        """What keeps a schedule with these moves from overwriting what a crash would come back to."""
        if self._commits is None or self._storage is None:
            return None
        places = self._storage.places
        if places.mode is StoreMode.SINGLE:
            if moves and (self._commits.asked is None or self._commits.asked.whole):
                self._commits.commit(Commit(self.step, tuple(places.now), whole=False))
            return Gate(self._commits, {move.unit for move in moves}, {}, self.executor.check)
        left = {places.now[move.unit]: move.unit for move in moves}
        followed = {move.unit: left[move.place] for move in moves if move.place in left}
        return Gate(self._commits, {move.unit for move in moves}, followed, self.executor.check)

    def _commit_moves(self, run: Run, moves: Sequence[Move], gate: Gate) -> None:
        """The step before, as its pending units arrive in their new places: all together, or a few at a time where others
        are to follow them."""
        assert self._commits is not None and self._storage is not None
        places = self._storage.places
        if places.mode is not StoreMode.SINGLE:
            at, each = list(places.now), COMMIT_EVERY if places.mode is StoreMode.LOG else max(1, len(moves))
            for first in range(0, len(moves), each):
                arrived, waiting = moves[first : first + each], moves[first + each :]
                for move in arrived:
                    at[move.unit] = move.place
                redo = self._redo([move.unit for move in waiting])
                self._commits.commit(Commit(self.step, tuple(at), redo), partial(run.wait_for, arrived[-1].last_write))
                gate.asked(arrived)
        gate.open()

    def _redo(self, units: Collection[int]) -> Redo | None:
        """What it takes to make the pending updates of these units again."""
        if not units:
            return None
        hyper = self._pending_hyper
        assert hyper is not None, "a unit that is pending comes with what its step was done with"
        return Redo(float(hyper.lr), hyper.clip, {unit: tuple(sorted(self._pending_present[unit])) for unit in sorted(units)})

    def restore_gradients(self, prepared: Prepared) -> None:
        """Of updates to be made again after a crash: the gradients that this run's plan keeps in RAM."""
        for unit in sorted(self.pending):
            kept = prepared.memory.kept(Role.GRADIENT, unit)
            if kept is not None and self._storage is not None:
                self._storage.read_gradient(unit, kept[: prepared.builder.sizes.trainable_of(self.shape.units[unit])])

    def measure(self, prepared: Prepared, compute: Callable[[Run, dict[int, set[int]]], None], tokens: int) -> Alone:
        """Every lane of a step alone, as `run.alone` says. Nothing of it is kept: what RAM holds beside the SSD is read again.

        All updates that may wait are pending in it, so that every kind of operation occurs, and none writes where a unit is.
        """
        self.drain(prepared)
        self.commit()  # what is written from here on would spoil the step before it
        present = {i: {j for j, t in enumerate(u.tensors) if t.trainable} for i, u in enumerate(self.shape.units)}
        plans = prepared.plan.units if prepared.plan.use_ssd else ()
        waiting = frozenset(u for u, plan in enumerate(plans) if plan.update is not Update.IMMEDIATE and present[u])
        aside = {} if self._storage is None else self._storage.places.aside(waiting)
        ssd = self._ssd_map(prepared, aside, _at_once, is_rehearsal=True)  # no order, so what is read may be anything
        schedule = prepared.schedule(Call(Mode.TRAIN, waiting, prepared.kept, defer=True))
        measurement = AloneMeasurement(self.executor, schedule, prepared.memory, ssd)
        hyper = Hyper(self.step + 1, 0.0, 1.0)

        def work() -> UpdateWorker:
            return self._worker(prepared, ssd, hyper, hyper, present, {unit: present[unit] for unit in waiting})

        alone = measurement.measure(work, lambda run: compute(run, {}), tokens)
        self.stale = prepared.kept
        return alone

    def _worker(
        self,
        prepared: Prepared,
        ssd: SsdMap,
        now: Hyper,
        pending: Hyper | None,
        present: dict[int, set[int]],
        present_pending: dict[int, set[int]],
    ) -> UpdateWorker:
        return UpdateWorker(
            self.shape.units,
            self.optimizer,
            self.numerics,
            prepared.plan.chunk_elements,
            now=now,
            pending=pending,
            present=present,
            present_pending=present_pending,
            team=self._team,
            checks=None if self._storage is None else ssd,
            grain_elements=self.shape.grain_elements,
        )

    def decide(self, loss: float) -> Outcome:
        """After the compute lane is done with a training schedule: its norm, and what becomes of it."""
        running = self._running
        assert running is not None
        if norms := [op for op in running.run.lanes[Lane.OPTIMIZER] if op.kind is Kind.NORM]:
            running.run.wait_for(norms[-1])
        norm = running.worker.norm.total()
        if not (math.isfinite(norm) and math.isfinite(loss)):
            running.outcome = Outcome(norm, 0.0, skipped=True)
        else:
            running.outcome = Outcome(norm, clip_coefficient(norm, self.max_grad_norm), skipped=False)
            self._expects_clipping = running.outcome.clip != 1.0
            self.step += 1
        self._book(running)
        return running.outcome

    def _book(self, running: _Running) -> None:
        """What is pending after this schedule: known before its last updates are written."""
        outcome, early = running.outcome, running.updated_early
        self.pending, self._pending_present, self._pending_hyper = frozenset(), {}, None
        if outcome is None or outcome.skipped:
            return
        trained = {unit for unit, tensors in running.present.items() if tensors}
        self.pending = frozenset(trained if outcome.clip != 1.0 else trained - early)
        self._pending_present = {unit: running.present[unit] for unit in self.pending}
        self._pending_hyper = Hyper(self.step, running.lr, outcome.clip)

    @contextmanager
    def guarded(self) -> Iterator[None]:
        """An exception in the middle of a schedule, an interrupt too, stops the engine: the books are not right any more."""
        try:
            yield
        except BaseException as error:
            if self._running is not None or self.executor.is_busy or self.executor.error is not None:
                self.executor.stop(error)
            raise

    def settle(self) -> None:
        """Wait for the schedule that runs, and turn the sides of the units that it updated for good."""
        running = self._running
        if running is None:
            return
        running.run.finish()
        outcome, early = running.outcome, running.updated_early
        kept = outcome is not None and not outcome.skipped and outcome.clip == 1.0
        if self._storage is not None:
            places = self._storage.places
            for move in running.moves:
                places.move(move.unit, move.place)
            for unit in early if kept else ():
                places.move(unit, places.next_of([unit])[unit])
        self.stale = running.stale_after(discarded=() if kept else early)
        if running.call.mode is not Mode.TRAIN:
            self.pending, self._pending_present, self._pending_hyper = frozenset(), {}, None
        self._running = None
        if self._storage is not None and self._storage.places.mode is not StoreMode.SINGLE:
            self._commit_settled(running.prepared.plan)

    def _commit_settled(self, plan: Plan | None) -> None:
        """What stands is a step to come back to: whole, or with updates that can be made again from what is on the SSD."""
        if self._commits is None or self._storage is None:
            return
        if plan is None or all(plan.units[unit].gradient is Tier.SSD for unit in self.pending):
            self._commits.commit(Commit(self.step, tuple(self._storage.places.now), self._redo(self.pending)))

    def commit(self) -> None:
        """The step as it stands is durable on return. Nothing may be pending."""
        if self._commits is not None:
            self._commit_settled(None)
            self._commits.wait()

    def close(self) -> None:
        """Nothing runs any more."""
        self._team.close()

    def drain(self, prepared: Prepared) -> None:
        """Apply what is pending."""
        with self.guarded():
            self.settle()
            if self.pending:
                self.begin(prepared, Mode.DRAIN, 0.0, {})
                self.settle()


def _at_once(op: Op) -> None:
    """Nothing stands in the way of a write."""


@dataclass(slots=True)
class _Running:
    """The schedule in progress."""

    run: Run
    worker: UpdateWorker
    prepared: Prepared
    call: Call
    lr: float
    present: dict[int, set[int]]
    moves: list[Move]
    outcome: Outcome | None = None

    @property
    def updated_early(self) -> frozenset[int]:
        """Units that are updated during this schedule's backward, as if nothing were clipped."""
        updates = [op for op in self.run.lanes[Lane.OPTIMIZER] if op.kind is Kind.UPDATE]
        return frozenset(op.unit for op in updates if op.writes[0].content.version == 1 + (op.unit in self.call.pending))

    def stale_after(self, discarded: Iterable[int]) -> frozenset[tuple[Role, int]]:
        """What RAM keeps in the wrong version once this schedule is done."""
        visited = {op.unit for op in self.run.schedule.ops}
        updated = self.call.pending.union(self.updated_early)
        refreshed = {(Role.WEIGHTS, u) for u in visited} | {(Role.STATE, u) for u in updated}
        undone = self.prepared.kept & {(role, unit) for role in KEPT for unit in discarded}
        return (self.call.stale - refreshed) | undone
