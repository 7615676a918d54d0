"""A training run, from Python:

    from lohan import Trainer, TrainingConfig

    Trainer(model="path/or/hub-name", args=TrainingConfig(output_dir="runs/first"), train_dataset="chats.jsonl").train()

What `train` does:

    check    settings, folders, packages: whatever can be refused before anything is read
    read     the model's files, its tokenizer, the data; tokens are kept in output_dir/tokens
    open     the engine: a run that the store holds is continued
    steps    loop.py; the first Ctrl-C or TERM lets the step finish, and what is on disk is told
    end      the model goes to output_dir/model, and it is told what was done
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from torch import nn

from lohan.config import StoreMode, parse_bytes
from lohan.data.show import show_masked
from lohan.engine import Engine
from lohan.errors import OptionError
from lohan.host.memory import available_bytes
from lohan.optim.adamw import AdamW
from lohan.optim.base import Optimizer
from lohan.optim.sgd import SGD
from lohan.train.callbacks import Callbacks, check_trackers
from lohan.train.checkpoints import Checkpoints, chosen_checkpoint
from lohan.train.checks import check_folders
from lohan.train.config import TrainingConfig
from lohan.train.console import Console
from lohan.train.inputs import Inputs, read_inputs
from lohan.train.interrupts import Interrupts
from lohan.train.log import RunLog
from lohan.train.loop import Loop
from lohan.train.meter import Meter, clock, size
from lohan.train.run_wear import RunWear, rated_bytes

if TYPE_CHECKING:
    from transformers import TrainerCallback

NUM_SHOWN = 3
"""examples that debug_data shows"""


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """What `Trainer.train` did."""

    num_steps: int
    """optimizer steps of the run so far, those of earlier processes included"""
    num_tokens: int
    """that this process trained on, padding not counted"""
    took_s: float
    ssd_write_bytes: int
    model_dir: Path | None
    """where the model is; None: the run was interrupted, or only showed its data"""
    interrupted: bool = False


class Trainer:
    """One run of one model on one data set."""

    def __init__(
        self,
        model: str | Path | nn.Module | None = None,
        args: TrainingConfig | None = None,
        train_dataset: object = None,
        eval_dataset: object = None,
        processing_class: Any = None,
        callbacks: Sequence[TrainerCallback] = (),
        console: Console | None = None,
    ) -> None:
        """What is passed goes before what `args` names. Data: a path, a hub name, an object of `datasets`, a list of dicts."""
        if args is None:
            raise OptionError("args", None, "a run needs settings", "Pass TrainingConfig(output_dir=...)")
        self.args = args
        self.callbacks = list(callbacks)
        self._model, self._tokenizer = model, processing_class
        self._train_dataset, self._eval_dataset = train_dataset, eval_dataset
        self._console = console

    def add_callback(self, callback: TrainerCallback) -> None:
        self.callbacks.append(callback)

    def train(self) -> TrainSummary:
        """Train to the end, or until interrupted. A run that output_dir holds already is continued."""
        with ExitStack() as stack:
            console = self._console or stack.enter_context(Console())
            interrupts = stack.enter_context(Interrupts("finishing this step; once more leaves at once"))
            check_folders(self.args)
            check_trackers(self.args)
            checkpoint = chosen_checkpoint(self.args)
            inputs = read_inputs(self.args, self._model, self._train_dataset, self._eval_dataset, self._tokenizer, console)
            if self.args.debug_data:
                return self._show(inputs, console)
            host_bytes = self._host_bytes(console)
            meter = Meter(
                host_bytes, parse_bytes("device_memory", self.args.device_memory) if self.args.device_memory else None
            )
            engine = stack.enter_context(open_engine(self.args, inputs.model, host_bytes, console, inputs, checkpoint))
            log = stack.enter_context(RunLog(self.args.folder, engine.num_steps, checkpoint))
            self._write_config(inputs)
            callbacks = Callbacks(self.args, self.callbacks, model=engine.model, processing_class=inputs.tokenizer)
            checkpoints = Checkpoints(self.args, engine, inputs, callbacks, log, console)
            checkpoints.begin(engine.num_steps)
            wear = RunWear(log.written_bytes, rated_bytes(self.args), lambda: engine.ssd_written_bytes + checkpoints.worn_bytes)
            done = engine.num_steps, log.num_skipped
            loop = Loop(self.args, engine, inputs, callbacks, meter, log, console, interrupts, checkpoints, wear, *done)
            _announce(loop, console)
            loop.run()
            if not loop.is_done:
                return self._leave(loop, console)
            return self._finish(loop, console)

    def _show(self, inputs: Inputs, console: Console) -> TrainSummary:
        for index in range(min(NUM_SHOWN, len(inputs.dataset))):
            console.line(f"\nexample {index}: {show_masked(inputs.dataset[index], inputs.tokenizer, console.is_terminal)}")
        return TrainSummary(0, 0, 0.0, 0, None)

    def _write_config(self, inputs: Inputs) -> None:
        """What was run, so that the same can be run again; and where its model came from, if that was passed."""
        values = self.args.to_dict()
        if self._model is not None and not isinstance(inputs.model, nn.Module):
            values["model_name_or_path"] = str(inputs.model)
        text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
        (self.args.folder / "config.yaml").write_text(text, encoding="utf-8")

    def _host_bytes(self, console: Console) -> int:
        if self.args.host_memory is not None:
            return parse_bytes("host_memory", self.args.host_memory)
        half = available_bytes() // 2
        console.line(f"host_memory: {size(half)}, half of what is available; set it to use more or less")
        return half

    def _leave(self, loop: Loop, console: Console) -> TrainSummary:
        """What an interrupted run has on disk, and how to go on."""
        if loop.engine.uses_ssd:
            console.phase("write what is pending")
            loop.engine.drain()
            console.idle()
            drives = ", ".join(map(str, self.args.drives))
            console.line(
                f"interrupted: {loop.num_steps} of {loop.inputs.num_steps} steps are in {drives}. The same command continues"
            )
            console.line(f"SSD: {loop.wear.summary()}")
            model_dir = None
        else:
            model_dir = loop.checkpoints.save(loop.num_steps)
            only = "; its optimizer's state was in RAM only" if self.args.save_only_model else ". The same command continues"
            console.line(f"interrupted: the run after step {loop.num_steps} is in {model_dir}{only}")
        return self._summary(loop, model_dir, interrupted=True)

    def _finish(self, loop: Loop, console: Console) -> TrainSummary:
        model_dir = self.args.folder / "model"
        console.phase("save model")
        loop.inputs.save(loop.engine, model_dir)
        console.idle()
        summary, meter = self._summary(loop, model_dir), loop.meter
        console.line(
            f"\ndone: {loop.num_here} steps on {meter.num_tokens:,} tokens in {clock(summary.took_s)}, "
            f"{meter.read_bytes / 1e9:.2f} GB read, {meter.written_bytes / 1e9:.2f} GB written"
        )
        if loop.engine.uses_ssd:
            console.line(f"SSD        {loop.wear.summary()}")
        console.line(f"model      {model_dir}")
        console.line(f'load it    AutoModelForCausalLM.from_pretrained("{model_dir}")')
        console.line(f'try it     lohan generate {self.args.output_dir} "a prompt"')
        console.line(f"look back  lohan report {self.args.output_dir}")
        return summary

    def _summary(self, loop: Loop, model_dir: Path | None, *, interrupted: bool = False) -> TrainSummary:
        meter = loop.meter
        return TrainSummary(loop.num_steps, meter.num_tokens, meter.took_s, meter.written_bytes, model_dir, interrupted)


def open_engine(
    config: TrainingConfig,
    model: str | Path | nn.Module,
    host_bytes: int,
    console: Console,
    inputs: Inputs | None = None,
    checkpoint: Path | None = None,
) -> Engine:
    """The engine of a run, which continues if its store is there, or goes on from a checkpoint.

    It has room for the largest batches of `inputs`.
    """
    eval_plan = None if inputs is None else inputs.eval_plan
    resume = bool(config.resume_from_checkpoint) and config.placement != "memory"
    return Engine(
        model,
        ssd=config.drives,
        device=config.device,
        host_memory=host_bytes,
        device_memory=config.device_memory,
        dtype=config.dtype,
        optimizer=make_optimizer(config),
        max_grad_norm=config.clip_norm,
        placement=config.placement,
        store=config.store,
        slice_rows=config.slice_rows,
        loss_tile=config.loss_tile,
        seed=config.seed,
        room_for=None if inputs is None else inputs.plan.largest_step(),
        room_for_evaluation=None if eval_plan is None else eval_plan.largest_step(),
        resume=resume,
        checkpoint=checkpoint,
        progress=console.progress,
    )


def make_optimizer(config: TrainingConfig) -> Optimizer:
    if config.optim == "sgd":
        return SGD(config.learning_rate, weight_decay=config.weight_decay)
    betas = (config.adam_beta1, config.adam_beta2)
    return AdamW(config.learning_rate, betas=betas, eps=config.adam_epsilon, weight_decay=config.weight_decay)


_STORES = {
    StoreMode.DOUBLE: "double, two places for every unit: a crash costs at most the step in progress",
    StoreMode.LOG: "log, one place for every unit and a few to spare: a crash costs at most the step in progress",
    StoreMode.SINGLE: "single, every unit is overwritten where it is: after a crash the run goes on from its last checkpoint",
}


def _announce(loop: Loop, console: Console) -> None:
    plan, total = loop.inputs.plan, loop.inputs.num_steps
    console.idle()
    if loop.num_steps:
        console.line(f"continues after step {loop.num_steps} of {total}")
    else:
        console.line(f"{total} steps, {plan.steps_per_epoch} an epoch")
    if loop.engine.uses_ssd:
        console.line(f"store: {_STORES[loop.engine.store_mode]}")
    if loop.engine.uses_ssd and not loop.is_done:
        console.line(loop.wear.forecast(total - loop.num_steps, loop.engine.step_write_bytes))
