"""Learning-rate schedules: the factor on the peak learning rate, as a pure function of the step.

Names and values are those of Transformers' `lr_scheduler_type`. A step counts from 1, as everywhere in lohan: step 1 has
the factor that Transformers gives before its first `scheduler.step()`, which is zero where there is a warmup.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from lohan.errors import OptionError


class LrScheduleName(Enum):
    """The schedules by the names that users give them."""

    CONSTANT = "constant"
    """1.0, without warmup"""
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    LINEAR = "linear"
    """down to zero in a straight line after the warmup"""
    COSINE = "cosine"
    """down to zero in half a cosine wave after the warmup"""


@dataclass(frozen=True, slots=True)
class LrSchedule:
    """One schedule over a run of known length."""

    name: LrScheduleName
    num_steps: int
    """optimizer steps of the whole run"""
    warmup_steps: float = 0
    """steps of linear warmup; below 1: a fraction of `num_steps`, rounded up"""

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise OptionError("max_steps", self.num_steps, "a run has at least one step", "Set max_steps to 1 or more")
        if self.warmup_steps < 0:
            raise OptionError("warmup_steps", self.warmup_steps, "it is negative", "Set it to 0 for no warmup")
        if self.name is LrScheduleName.CONSTANT and self.warmup_steps > 0:
            raise OptionError(
                "warmup_steps",
                self.warmup_steps,
                "the constant schedule has no warmup",
                "Set lr_scheduler_type to constant_with_warmup",
            )

    @property
    def num_warmup_steps(self) -> int:
        """The warmup in steps."""
        if self.warmup_steps >= 1:
            return int(self.warmup_steps)
        return math.ceil(self.num_steps * self.warmup_steps)

    def factor(self, step: int) -> float:
        """What the peak learning rate is multiplied with in this step, counted from 1."""
        num_done = step - 1
        num_warmup = self.num_warmup_steps
        if num_done < num_warmup:
            return num_done / num_warmup
        num_left = max(1, self.num_steps - num_warmup)
        if self.name is LrScheduleName.LINEAR:
            return max(0.0, (self.num_steps - num_done) / num_left)
        if self.name is LrScheduleName.COSINE:
            progress = (num_done - num_warmup) / num_left
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
        return 1.0


def schedule_name(lr_scheduler_type: str) -> LrScheduleName:
    """The schedule that a user's `lr_scheduler_type` names."""
    try:
        return LrScheduleName(lr_scheduler_type)
    except ValueError:
        known = ", ".join(name.value for name in LrScheduleName)
        raise OptionError("lr_scheduler_type", lr_scheduler_type, "it is not known here", f"Choose one of: {known}") from None
