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
    """steps whose updates are all applied; one less while updates wait for the next forward pass"""
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
    speed_of_light: float | None
    """the busiest lane's work as measured alone, over the step's time; None until the lanes have been measured"""
    simulated: Timeline | None
    """the same schedule in virtual time, with the durations of lanes measured alone"""
