"""Learning-rate schedules have the values of Transformers'."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments, get_scheduler

from lohan.errors import OptionError
from lohan.optim import LrSchedule, LrScheduleName, schedule_name


@pytest.mark.parametrize("name", LrScheduleName)
@pytest.mark.parametrize("warmup_steps", [0, 1, 3, 0.25, 0.33])
@pytest.mark.parametrize("num_steps", [1, 12])
def test_factors_are_those_of_transformers(name: LrScheduleName, warmup_steps: float, num_steps: int) -> None:
    if name is LrScheduleName.CONSTANT:
        warmup_steps = 0
    num_warmup = TrainingArguments.get_warmup_steps(SimpleNamespace(warmup_steps=warmup_steps), num_steps)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name.value, optimizer, num_warmup_steps=num_warmup, num_training_steps=num_steps)
    schedule = LrSchedule(name, num_steps, warmup_steps)
    for step in range(1, num_steps + 3):
        assert schedule.factor(step) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-15, abs=1e-15)
        optimizer.step()
        scheduler.step()


def test_a_schedule_is_found_by_the_name_that_users_give_it() -> None:
    assert schedule_name("cosine") is LrScheduleName.COSINE
    with pytest.raises(OptionError, match="lr_scheduler_type='cosinus'.*constant, constant_with_warmup, linear, cosine"):
        schedule_name("cosinus")


@pytest.mark.parametrize(
    ("name", "num_steps", "warmup_steps", "option"),
    [("linear", 0, 0, "max_steps"), ("linear", 10, -1, "warmup_steps"), ("constant", 10, 2, "warmup_steps")],
)
def test_impossible_schedules_are_refused_by_name(name: str, num_steps: int, warmup_steps: float, option: str) -> None:
    with pytest.raises(OptionError, match=f"^{option}="):
        LrSchedule(LrScheduleName(name), num_steps, warmup_steps)
