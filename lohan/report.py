"""What a step tells: its result, what it cost, and how close it came to what the machine can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lohan.schedule.ops import Lane
from lohan.simulate.timeline import LaneUse, Timeline


@dataclass(frozen=True, slots=True)
class StepReport:
    """One optimizer step."""

    step: int
    """optimizer steps begun so far, this one included; a step that was skipped does not count"""
    committed_step: int
    """the step that a crash now would come back to; without an SSD, the last one whose updates are all applied"""
    loss: float
    grad_norm: float
    """before clipping"""
    clipped: bool
    skipped: bool
    """the loss or the norm was not finite: nothing was updated"""
    learning_rate: float
    tokens: int
    """with a target"""
    step_s: float
    lanes: Mapping[Lane, LaneUse]
    """of the schedule that finished last: this step's as far as it is done"""
    ssd_read_bytes: int
    ssd_write_bytes: int
    peak_host_bytes: int
    """buffers, and on the cpu device what the model's own operations held at most"""
    peak_device_bytes: int
    alone_s: Mapping[Lane, float] | None
    """the work of each lane as measured alone; None until the lanes have been measured"""
    simulated: Timeline | None
    """the same schedule in virtual time, with the durations of lanes measured alone"""

    @property
    def speed_of_light(self) -> float | None:
        """The busiest lane's work as measured alone, over the step's time: no schedule of the same work reaches more than 1."""
        return None if self.alone_s is None else max(self.alone_s.values()) / self.step_s

    def __str__(self) -> str:
        """The line that people watch."""
        clipped = " (skipped)" if self.skipped else " (clipped)" if self.clipped else ""
        light = "" if self.speed_of_light is None else f", {self.speed_of_light:.0%} of the speed of light"
        moved = f"{self.ssd_read_bytes / 1e9:.2f} GB read, {self.ssd_write_bytes / 1e9:.2f} GB written"
        return (
            f"step {self.step}: loss {self.loss:.4f}, gradient norm {self.grad_norm:.3f}{clipped}, "
            f"{self.tokens / self.step_s:.0f} tokens/s, {self.step_s:.2f} s{light}, {moved}"
        )

    def lane_table(self) -> str:
        """Lane by lane: measured in this step, alone, and simulated."""
        lines = [f"{'lane':<10} {'busy s':>8} {'waiting s':>10} {'GB':>8} {'alone s':>8} {'simulated busy s':>17}"]
        simulated = {} if self.simulated is None else self.simulated.lanes
        for lane, use in self.lanes.items():
            alone = "" if self.alone_s is None else f"{self.alone_s.get(lane, 0.0):.2f}"
            busy = f"{simulated[lane].busy_s:.2f}" if lane in simulated else ""
            gigabytes = f"{use.bytes / 1e9:.2f}"
            lines.append(f"{lane.value:<10} {use.busy_s:>8.2f} {use.waiting_s:>10.2f} {gigabytes:>8} {alone:>8} {busy:>17}")
        if self.simulated is not None:
            lines.append(f"step {self.step_s:.2f} s measured, {self.simulated.step_s:.2f} s simulated")
        return "\n".join(lines)
