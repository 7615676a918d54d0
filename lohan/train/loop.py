"""The steps of a run, and what happens between them.

    step       the batch of this number through the engine, at the schedule's learning rate
    tell       a line in log.jsonl, on the screen, and to the callbacks
    in between the lanes are measured once; evaluation, samples and checkpoints when their time has come

Which batch a step takes is the number of steps and of skipped batches before it, so a run that continues takes the same.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from lohan.engine import Engine
from lohan.errors import OptionError
from lohan.report import StepReport
from lohan.run.batches import IGNORED
from lohan.train.callbacks import Callbacks
from lohan.train.checkpoints import Checkpoints
from lohan.train.config import TrainingConfig
from lohan.train.console import Console
from lohan.train.inputs import Inputs
from lohan.train.interrupts import Interrupts
from lohan.train.log import RunLog
from lohan.train.meter import Meter
from lohan.train.prompts import encode_prompt
from lohan.train.run_wear import RunWear

MEASURED_STEP, TRACED_STEP = 2, 3
"""of those that this process does: the first also plans; the trace then shows what the simulator makes of it"""
Batch = Mapping[str, Any]


@dataclass(slots=True)
class Loop:
    """One process's part of a run."""

    config: TrainingConfig
    engine: Engine
    inputs: Inputs
    callbacks: Callbacks
    meter: Meter
    log: RunLog
    console: Console
    interrupts: Interrupts
    checkpoints: Checkpoints
    wear: RunWear
    num_steps: int
    """optimizer steps done so far, by earlier processes too"""
    num_skipped: int = 0
    """batches that were passed over"""
    num_skipped_now: int = 0
    """in a row, just now"""
    num_here: int = 0
    """steps done by this process"""

    @property
    def epoch(self) -> float:
        return (self.num_steps + self.num_skipped) / self.inputs.plan.steps_per_epoch

    @property
    def is_done(self) -> bool:
        return self.num_steps >= self.inputs.num_steps or self.callbacks.control.should_training_stop

    def run(self) -> None:
        """Until the run is done, or somebody wants it to stop."""
        self._tell_state()
        self.callbacks.call("on_train_begin")
        self.wear.begin_steps()
        with self.interrupts.patience():
            while not self.is_done and not self.interrupts.requested:
                self._step()
                if self.interrupts.paused:
                    self._pause()
            if not self.interrupts.requested:
                if self.config.sample_prompts and not self._evaluates_now():
                    self._sample()
                self.callbacks.call("on_train_end")

    def _pause(self) -> None:
        """All of the run is on its drives, and nothing is done, until it is to go on."""
        self.console.phase("write what is pending")
        self.engine.drain()
        self.console.idle()
        self.console.line(f"paused after step {self.num_steps}: kill -USR1 {os.getpid()} goes on, Ctrl-C ends the run")
        self.interrupts.wait_while_paused()

    # ---------------------------------------------------------------- one step

    def _step(self) -> None:
        number = self.num_steps + self.num_skipped
        if number % self.inputs.plan.steps_per_epoch == 0:
            self.callbacks.call("on_epoch_begin")
        self.callbacks.begin_step()
        batches = self.inputs.plan.step(number)
        lr = self.config.learning_rate * self.inputs.schedule.factor(self.num_steps + 1)
        is_traced = self.num_here + 1 == min(TRACED_STEP, self.num_here + self.inputs.num_steps - self.num_steps)
        self.meter.begin_step()
        begin = self.console.work if self.num_here else self.console.phase
        begin(f"step {self.num_steps + 1}/{self.inputs.num_steps}", lambda: self.engine.share_computed)
        report = self.engine.step(batches, lr=lr, trace=self.config.folder / "trace.json" if is_traced else None)
        self._count(report)
        self._tell(report, batches)
        if self.config.measure_lanes and self.engine.uses_ssd and self.num_here == MEASURED_STEP and not self.is_done:
            self.console.phase("measure lanes")
            self.engine.measure_lanes(batches)
        if not report.skipped:
            self._between()

    def _count(self, report: StepReport) -> None:
        self.num_steps, self.num_here = report.step, self.num_here + 1
        if not report.skipped:
            self.num_skipped_now = 0
            return
        self.num_skipped += 1
        self.num_skipped_now += 1

    def _tell(self, report: StepReport, batches: Sequence[Batch]) -> None:
        tokens = sum(map(num_tokens, batches))
        record = self.meter.record(report, num_tokens=tokens, epoch=self.epoch) | self.wear.record(tokens)
        self.log.write(record)
        self._tell_state()
        state, control = self.callbacks.state, self.callbacks.control
        state.num_input_tokens_seen += record["tokens"]
        control.should_log = self.num_steps % self.config.logging_steps == 0 or self.num_here == 1 or self.is_done
        control.should_save = bool(self.config.save_steps) and self.num_steps % self.config.save_steps == 0
        control.should_save |= self.config.save_first_step and self.num_steps == 1
        control.should_evaluate = self._evaluates_now()
        self.console.idle()
        if control.should_log or report.skipped:
            self.console.line(self.meter.line(record, self.inputs.num_steps))
        if report.skipped:
            self._refuse_many_skips(report)
            return
        self.callbacks.call("on_step_end")
        if self.callbacks.control.should_log:
            self.callbacks.log(record)

    def _tell_state(self) -> None:
        state = self.callbacks.state
        state.global_step, state.epoch, state.max_steps = self.num_steps, self.epoch, self.inputs.num_steps

    def _refuse_many_skips(self, report: StepReport) -> None:
        most = self.config.max_skipped_steps
        self.console.warn(
            f"the loss or the gradient is not finite: this batch changed nothing ({self.num_skipped_now} of {most})"
        )
        if self.num_skipped_now >= most:
            reason = (
                f"{most} steps in a row had a loss ({report.loss}) or a gradient norm ({report.grad_norm}) that is not finite"
            )
            remedy = f"Lower learning_rate, or look at the data with debug_data. The model is that of step {self.num_steps}"
            raise OptionError("max_skipped_steps", most, reason, remedy)

    # ---------------------------------------------------------------- between steps

    def _between(self) -> None:
        if self._ends_epoch():
            self.callbacks.call("on_epoch_end")
        control = self.callbacks.control
        if control.should_evaluate:
            self._evaluate()
            self._sample()
        if control.should_save:
            self._save_checkpoint()
        if control.should_epoch_stop:
            reason = "an epoch cannot be left early: a run that continues would not know"
            raise OptionError("should_epoch_stop", True, reason, "Set should_training_stop in the callback, to end the run")

    def _ends_epoch(self) -> bool:
        return (self.num_steps + self.num_skipped) % self.inputs.plan.steps_per_epoch == 0

    def _evaluates_now(self) -> bool:
        every = self.config.evaluates_every
        return self.num_steps % every == 0 if every else self.config.eval_strategy == "epoch" and self._ends_epoch()

    def _evaluate(self) -> None:
        """The mean loss over all targets of the evaluation data, so many micro-batches at a time as a step has."""
        if self.inputs.eval_plan is None:
            raise OptionError(
                "should_evaluate", True, "there is no data to evaluate on", "Set eval_strategy and eval_dataset_name"
            )
        phase, num_rows = f"evaluate after step {self.num_steps}", 0
        self.console.phase(phase)
        loss, num_targets = 0.0, 0
        for group in grouped(self.inputs.eval_plan.evaluation_batches(), self.config.gradient_accumulation_steps):
            if self.interrupts.requested:
                return
            if num := sum(map(num_labels, group)):
                loss += self.engine.evaluate(group) * num
                num_targets += num
            num_rows += sum(len(batch["input_ids"]) for batch in group)
            self.console.progress(phase, num_rows, self.inputs.eval_plan.num_rows)
        loss = loss / num_targets if num_targets else float("nan")
        self.console.idle()
        self.console.line(f"evaluation after step {self.num_steps}: loss {loss:.4f} on {num_targets:,} targets")
        self.log.write({"step": self.num_steps, "epoch": round(self.epoch, 4), "eval_loss": loss, "eval_targets": num_targets})
        self.callbacks.evaluated(loss)

    def _sample(self) -> None:
        tokenizer = self.inputs.tokenizer
        for prompt in self.config.sample_prompts:
            self.console.phase(f"sample after step {self.num_steps}")
            inputs = encode_prompt(tokenizer, prompt)
            output = self.engine.generate(
                inputs["input_ids"],
                max_new_tokens=self.config.sample_max_new_tokens,
                do_sample=False,
                pad_token_id=self.inputs.pad_id,
                stopping_criteria=[_Interrupted(self.interrupts)],
            )
            if self.interrupts.requested:
                return
            text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            self.console.idle()
            self.console.line(f"  {prompt!r} -> {text!r}")
            self.log.write({"step": self.num_steps, "prompt": prompt, "sample": text})

    def _save_checkpoint(self) -> None:
        self.checkpoints.save(self.num_steps)
        self.callbacks.call("on_save")


class _Interrupted(StoppingCriteria):
    """Ends a generation after the token at which somebody interrupts."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts

    def __call__(self, input_ids: Tensor, scores: Tensor, **options: Any) -> Tensor:
        return torch.full_like(input_ids[:, 0], self._interrupts.requested, dtype=torch.bool)


def grouped(batches: Iterator[Batch], size: int) -> Iterator[list[Batch]]:
    while group := list(islice(batches, size)):
        yield group


def num_tokens(batch: Batch) -> int:
    """Tokens of a micro-batch that are no padding."""
    mask = batch.get("attention_mask")
    return batch["input_ids"].numel() if mask is None or mask.ndim != 2 else int(mask.sum())


def num_labels(batch: Batch) -> int:
    """Targets of a micro-batch: a label is the target of the token before it."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())
