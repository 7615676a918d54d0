"""Callbacks written for Transformers' Trainer, and the trackers that are such callbacks.

They are called with what they know: `TrainerState`, `TrainerControl`, and arguments that have our names and, for what lohan
does not have, the defaults of `TrainingArguments`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lohan.errors import OptionError
from lohan.train.config import TrainingConfig

if TYPE_CHECKING:
    from transformers import TrainerCallback

TRACKERS = {
    "tensorboard": ("TensorBoardCallback", ("tensorboard", "tensorboardX")),
    "wandb": ("WandbCallback", ("wandb",)),
    "trackio": ("TrackioCallback", ("trackio",)),
}
"""name -> class in transformers.integrations, packages of which it needs one"""


def check_trackers(config: TrainingConfig) -> None:
    """Refuse a tracker that is not installed, without importing one."""
    for name in config.report_to:
        packages = TRACKERS[name][1]
        if not any(find_spec(package) for package in packages):
            raise OptionError("report_to", name, f"{packages[0]} is not installed", f"Run: pip install {packages[0]}")


class Callbacks:
    """The callbacks of one run, what they are told, and what they ask for."""

    def __init__(self, config: TrainingConfig, callbacks: Sequence[TrainerCallback], **told: Any) -> None:
        """`told` goes to every event: model, processing_class and the like."""
        from transformers import TrainerControl, TrainerState, integrations

        trackers = [getattr(integrations, TRACKERS[name][0])() for name in config.report_to]
        self._callbacks = [*callbacks, *trackers]
        self._told = {"optimizer": None, "lr_scheduler": None, "train_dataloader": None, "eval_dataloader": None, **told}
        self.arguments = CallbackArguments(config)
        self.control = TrainerControl()
        self.state = TrainerState(
            logging_steps=config.logging_steps, eval_steps=config.evaluates_every or 0, save_steps=config.save_steps
        )

    def call(self, event: str, **told: Any) -> None:
        """One event, to all in their order. A control that a callback returns replaces the one before."""
        for callback in self._callbacks:
            answer = getattr(callback, event)(self.arguments, self.state, self.control, **self._told, **told)
            self.control = answer or self.control

    def log(self, logs: dict[str, Any]) -> None:
        """`on_log`, and the history that some callbacks look into."""
        logs = {name: value for name, value in logs.items() if isinstance(value, int | float)}
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.call("on_log", logs=logs)

    def evaluated(self, loss: float) -> None:
        """`on_evaluate`; the best loss is known to those who stop early."""
        metrics = {"eval_loss": loss, "epoch": self.state.epoch}
        self.log(metrics)
        self.call("on_evaluate", metrics=metrics)
        if self.state.best_metric is None or loss < self.state.best_metric:
            self.state.best_metric, self.state.best_global_step = loss, self.state.global_step

    def begin_step(self) -> None:
        self.control.should_log = self.control.should_evaluate = self.control.should_save = False
        self.call("on_step_begin")


class CallbackArguments:
    """A TrainingConfig that answers for all of TrainingArguments."""

    load_best_model_at_end = False
    metric_for_best_model = "eval_loss"
    greater_is_better = False
    world_size = n_gpu = 1
    process_index = local_process_index = 0

    def __init__(self, config: TrainingConfig) -> None:
        from transformers import TrainingArguments

        for field in dataclasses.fields(TrainingArguments):
            if not hasattr(type(self), field.name):
                setattr(self, field.name, None if field.default is dataclasses.MISSING else field.default)
        self._config = config
        for name, value in config.to_dict().items():
            setattr(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        return self._config.to_dict()

    def to_sanitized_dict(self) -> dict[str, Any]:
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in self.to_dict().items()
        }

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2)
