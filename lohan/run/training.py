"""The state of a training run between schedules: what is pending, which side of the SSD is current, what comes next.

    begin   a schedule starts; once the updates that were pending are written, the step before is committed
    decide  the norm is known: accept, redo, or skip
    settle  the schedule is done: sides turn; updates are done, and the step is committed, or they wait for the next schedule

*Accept*: updates made during backward stand; deferred ones are pending. *Redo*: the norm exceeds the limit; updates made in the
other side are worthless, all are pending, with the clip coefficient. *Skip*: loss or norm is not finite; nothing happened.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from lohan.config import Numerics
from lohan.model.shape import ModelShape
from lohan.optim.base import Optimizer
from lohan.optim.norm import clip_coefficient
from lohan.optim.team import Team
from lohan.optim.worker import Hyper, UpdateWorker
from lohan.plan.plan import Plan, Update
from lohan.run.alone import Alone, AloneMeasurement
from lohan.run.commits import Commits
from lohan.run.executor import Executor, Run
from lohan.run.memory import Memory, Place, SsdMap, Workspace
from lohan.schedule.builder import Call, Mode, ScheduleBuilder
from lohan.schedule.checker import check
from lohan.schedule.ops import Kind, Lane, Op, Schedule, Tier
from lohan.schedule.slots import Role, SlotTable
from lohan.ssd.records import Commit

KEPT = (Role.WEIGHTS, Role.STATE)
"""what RAM may keep beside the SSD"""


@dataclass(slots=True)
class Prepared:
    """A plan made real: slots, memory, schedules."""

    plan: Plan
    table: SlotTable
    builder: ScheduleBuilder
    memory: Memory
    places: dict[tuple[Role, int], Place]
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
        commits: Commits | None = None,
        resumed: Commit | None = None,
    ) -> None:
        self.shape, self.optimizer, self.numerics, self.max_grad_norm = shape, optimizer, numerics, max_grad_norm
        self.executor = executor
        self._commits = commits if commits is not None and commits.keeps else None
        self.sides = [0] * len(shape.units) if resumed is None else [int(side) for side in resumed.sides]
        self.step = 0 if resumed is None else resumed.step
        self.pending: frozenset[int] = frozenset()
        self.stale: frozenset[tuple[Role, int]] = frozenset()
        """what RAM keeps, but not in the version that the SSD has"""
        self._expects_clipping = False
        """the step before was clipped, so this one probably is"""
        self._pending_hyper: Hyper | None = None
        self._pending_present: dict[int, set[int]] = {}
        self._running: _Running | None = None
        self._team = Team(executor.device.optimizer_threads)

    @property
    def committed_step(self) -> int:
        """The step that a crash now would come back to; where only RAM has the model, steps whose updates are all applied."""
        return self.step - bool(self.pending) if self._commits is None else self._commits.durable_step

    def begin(self, prepared: Prepared, mode: Mode, lr: float, present: dict[int, set[int]]) -> Run:
        """Start a schedule. `present` fills during its backward pass."""
        self.settle()
        call = Call(mode, self.pending, self.stale, defer=self._expects_clipping and mode is Mode.TRAIN)
        now = Hyper(self.step + 1, lr, 1.0)
        worker = self._worker(prepared, now, self._pending_hyper, present, self._pending_present)
        gate = _Gate(self._commits, call.pending)
        ssd = SsdMap.of(prepared.table, prepared.places, self.sides, gate.admit)
        run = self.executor.start(prepared.schedule(call), prepared.memory, ssd, worker)
        self._running = _Running(run, worker, prepared, call, lr, present)
        if self._commits is not None and call.pending:
            sides = [side ^ (unit in call.pending) for unit, side in enumerate(self.sides)]
            self._commits.commit(self.step, sides, partial(run.wait_for, self._running.last_pending_write))
        gate.open()
        return run

    def measure(self, prepared: Prepared, compute: Callable[[Run, dict[int, set[int]]], None], tokens: int) -> Alone:
        """Every lane of a step alone, as `run.alone` says. Nothing of it is kept: what RAM holds beside the SSD is read again.

        All updates that may wait are pending in it, so that every kind of operation occurs, and none writes to a current side.
        """
        self.drain(prepared)
        self.commit()  # what is written from here on would spoil the step before it
        present = {i: {j for j, t in enumerate(u.tensors) if t.trainable} for i, u in enumerate(self.shape.units)}
        plans = prepared.plan.units if prepared.plan.use_ssd else ()
        waiting = frozenset(u for u, plan in enumerate(plans) if plan.update is not Update.IMMEDIATE and present[u])
        ssd = SsdMap.of(prepared.table, prepared.places, self.sides)
        schedule = prepared.schedule(Call(Mode.TRAIN, waiting, prepared.kept, defer=True))
        measurement = AloneMeasurement(self.executor, schedule, prepared.memory, ssd)
        hyper = Hyper(self.step + 1, 0.0, 1.0)

        def work() -> UpdateWorker:
            return self._worker(prepared, hyper, hyper, present, {unit: present[unit] for unit in waiting})

        alone = measurement.measure(work, lambda run: compute(run, {}), tokens)
        self.stale = prepared.kept
        return alone

    def _worker(
        self,
        prepared: Prepared,
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
        for unit in running.call.pending:
            self.sides[unit] ^= 1
        outcome, early = running.outcome, running.updated_early
        kept = outcome is not None and not outcome.skipped and outcome.clip == 1.0
        for unit in early if kept else ():
            self.sides[unit] ^= 1
        self.stale = running.stale_after(discarded=() if kept else early)
        if running.call.mode is not Mode.TRAIN:
            self.pending, self._pending_present, self._pending_hyper = frozenset(), {}, None
        self._running = None
        self._commit_settled()

    def _commit_settled(self) -> None:
        """What has no update pending is a step to come back to."""
        if self._commits is not None and not self.pending:
            self._commits.commit(self.step, self.sides)

    def commit(self) -> None:
        """The step as it stands is durable on return, unless updates are pending."""
        if self._commits is not None:
            self._commit_settled()
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


class _Gate:
    """Keeps a schedule from overwriting a place that the newest durable record names.

    An update that was pending goes to a place that was left two steps ago: it waits for the commits asked for before this
    schedule. One of this schedule's own step goes where the step before last is: it waits for the commit of the last step.
    """

    def __init__(self, commits: Commits | None, pending: frozenset[int]) -> None:
        self._commits, self._pending = commits, pending
        self._admit_pending = self._admit_own = _nothing if commits is None else commits.admit()
        self._is_open = threading.Event()

    def open(self) -> None:
        """The commit of the last step has been asked for."""
        if self._commits is not None:
            self._admit_own = self._commits.admit()
        self._is_open.set()

    def admit(self, op: Op) -> None:
        if op.unit in self._pending and op.writes[0].content.version == 1:
            self._admit_pending()
        else:
            self._is_open.wait()
            self._admit_own()


def _nothing() -> None:
    """There are no commits to wait for."""


@dataclass(slots=True)
class _Running:
    """The schedule in progress."""

    run: Run
    worker: UpdateWorker
    prepared: Prepared
    call: Call
    lr: float
    present: dict[int, set[int]]
    outcome: Outcome | None = None

    @property
    def last_pending_write(self) -> Op:
        """After it, the updates of the step before are all with the drives."""
        writes = [op for op in self.run.lanes[Lane.SSD_WRITE] if op.kind is Kind.WRITE_UPDATE and op.unit in self.call.pending]
        return [op for op in writes if op.writes[0].content.version == 1][-1]

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
