"""What an engine tells of its speed: lanes timed alone, the schedule in virtual time, traces, bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lohan.errors import OptionError
from lohan.run.alone import Alone
from lohan.run.batches import HostSlice
from lohan.run.executor import Run
from lohan.run.passes import LossFn
from lohan.run.starting import Batches, Starting
from lohan.schedule.ops import Schedule
from lohan.simulate.simulator import simulate
from lohan.simulate.timeline import Timeline
from lohan.simulate.trace import write_trace


class Measuring(Starting):
    """An engine that can be measured."""

    _alone: Alone | None
    _last: Run | None

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

    @property
    def share_computed(self) -> float | None:
        """How far the pass that computes is, from 0 to 1; none if there is none. Any thread may ask, for a sign of life."""
        return self._executor.share_computed
