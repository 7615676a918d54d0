"""What a training run is set to. No torch.

A field's name is its key in a YAML file and its flag; the text below a field is its help. Names are those of Transformers'
`TrainingArguments` and TRL's `SFTConfig`. What cannot work is refused when the object is made. Files and flags are read by
`arguments.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lohan.config import Numerics, parse_bytes, parse_dtype, parse_store_mode
from lohan.data.settings import DataSettings
from lohan.errors import OptionError
from lohan.optim.schedules import LrSchedule, schedule_name
from lohan.train.values import convert

OPTIMIZERS = ("adamw", "sgd")
PLACEMENTS = ("auto", "memory")
EVAL_STRATEGIES = ("no", "steps", "epoch")
REPORTERS = ("tensorboard", "wandb", "trackio")
DEFAULT_EVAL_STEPS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """One run. Everything but `output_dir` has a default."""

    output_dir: str
    """folder of the run: log.jsonl, config.yaml, trace.json, store/, model/"""
    model_name_or_path: str | None = None
    """folder or hub name of the model to train"""
    run_name: str | None = None
    """what trackers call the run"""

    dataset_name: str | None = None
    """file, folder or hub name of the training data"""
    dataset_train_split: str = "train"
    """split to train on"""
    dataset_test_split: str = "test"
    """split to evaluate on, if there is no eval_dataset_name"""
    eval_dataset_name: str | None = None
    """file, folder or hub name of the evaluation data"""
    dataset_text_field: str = "text"
    """column of plain text"""
    max_length: int = 1024
    """tokens of an example, and of a packed row"""
    too_long: str = "truncate"
    """what becomes of a longer example: truncate, split, drop, or error"""
    packing: bool = False
    """several examples in a row, none of which sees another"""
    completion_only_loss: bool | None = None
    """train on completions only; none: yes where there are prompts and completions"""
    assistant_only_loss: bool = False
    """train on what the assistant says only"""
    group_by_length: bool = False
    """examples of about the same length in a batch"""
    chat_template_path: str | None = None
    """file with a chat template, instead of the tokenizer's"""
    debug_data: bool = False
    """show examples with what is trained on in colour, and stop"""

    learning_rate: float = 2e-5
    """highest learning rate of the schedule"""
    lr_scheduler_type: str = "linear"
    """linear, cosine, constant, or constant_with_warmup"""
    warmup_steps: float = 0
    """steps in which the learning rate rises; below 1: their share of all steps"""
    num_train_epochs: float = 3.0
    """times that the data is gone through"""
    max_steps: int = -1
    """optimizer steps, instead of num_train_epochs; -1: by epochs"""
    per_device_train_batch_size: int = 8
    """rows of a micro-batch"""
    gradient_accumulation_steps: int = 1
    """micro-batches of an optimizer step"""
    optim: str = "adamw"
    """adamw or sgd"""
    weight_decay: float = 0.0
    """of matrices; norms, biases and other vectors do not decay"""
    adam_beta1: float = 0.9
    """decay of AdamW's running mean of the gradient"""
    adam_beta2: float = 0.999
    """decay of AdamW's running mean of its square"""
    adam_epsilon: float = 1e-8
    """added to the root of AdamW's mean square"""
    max_grad_norm: float | None = 1.0
    """the gradient's global norm is clipped to it, exactly; 0 or none: no clipping"""
    max_skipped_steps: int = 5
    """steps in a row whose loss or gradient is not finite before the run stops; each of them changes nothing"""
    seed: int = 42
    """of the order of the data, of dropout, and of all else that is random"""

    eval_strategy: str = "no"
    """when to evaluate: no, steps, or epoch"""
    eval_steps: int | None = None
    """steps between evaluations; none: 100"""
    per_device_eval_batch_size: int = 8
    """rows of a micro-batch in evaluation"""
    sample_prompts: Sequence[str] = ()
    """prompts that the model continues at each evaluation and at the end"""
    sample_max_new_tokens: int = 32
    """the most tokens of such a continuation; each takes a pass over all weights"""
    logging_steps: int = 1
    """steps between lines on the screen and in trackers; log.jsonl has every step"""
    report_to: Sequence[str] = ()
    """trackers: tensorboard, wandb, trackio"""
    save_steps: int = 0
    """steps between checkpoints to keep, checkpoint-<step>; 0: none. The store holds every step without them"""
    save_total_limit: int | None = None
    """how many checkpoints are kept, the newest; none: all"""
    save_first_step: bool = False
    """a checkpoint after the first step too, so that what would go wrong with one goes wrong at once"""
    save_only_model: bool = False
    """checkpoints hold the model only, 2 B a parameter in bf16; else also what the run can go on from, 12 B more with adamw"""
    checkpoint_dir: str | None = None
    """folder for checkpoints, on another disk for example; none: output_dir"""
    resume_from_checkpoint: str | bool = True
    """true: continue what the store holds; false: refuse to, if it holds a run; or the checkpoint to go on from"""

    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda, cuda:<number>, or emulated"""
    device_memory: str | int | None = None
    """the most that may be used of the device's memory; none: all of a GPU"""
    host_memory: str | int | None = None
    """the most RAM for buffers, like 24GiB; none: half of what is available"""
    ssd: Sequence[str] = ()
    """a folder on each drive that keeps the state; none: output_dir/store"""
    ssd_endurance_tbw: float | None = None
    """terabytes written that each of these drives is rated for, from its data sheet; none: what the drive tells"""
    dtype: str = "bf16"
    """what the device computes with: bf16 or fp32; masters are fp32"""
    store: str = "auto"
    """how the SSD keeps what changes: double (26 B a parameter with adamw), log (14 B, and a few units), single (14 B; a crash
    costs the run back to its last checkpoint), or auto: double if it fits, else log"""
    placement: str = "auto"
    """auto, or memory: all in RAM, and no way to continue an interrupted run"""
    slice_rows: int = 0
    """rows of a micro-batch that run through a layer at once; 0: all"""
    loss_tile: int = 4096
    """rows of the vocabulary whose logits exist at once; 0: the model's own loss"""
    measure_lanes: bool = True
    """time every lane once, after the second step, so that the speed of light is known; takes about a step"""

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, convert(field.name, str(field.type), getattr(self, field.name)))
        _one_of("optim", self.optim, OPTIMIZERS)
        _one_of("placement", self.placement, PLACEMENTS)
        _one_of("eval_strategy", self.eval_strategy, EVAL_STRATEGIES)
        for name in self.report_to:
            _one_of("report_to", name, REPORTERS)
        for name in _POSITIVE:
            _at_least(name, getattr(self, name), 1)
        for name in _NOT_NEGATIVE:
            _at_least(name, getattr(self, name), 0)
        if self.num_train_epochs <= 0:
            raise OptionError("num_train_epochs", self.num_train_epochs, "it is not above 0", "Set it to 1 or another number")
        for name in ("adam_beta1", "adam_beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                raise OptionError(name, value, "it is not between 0 and 1", "Leave it out for the usual value")
        if self.ssd_endurance_tbw is not None and self.ssd_endurance_tbw <= 0:
            reason = "a rating is above 0"
            raise OptionError("ssd_endurance_tbw", self.ssd_endurance_tbw, reason, "Give the TBW of the drive's data sheet")
        if self.max_steps != -1:
            _at_least("max_steps", self.max_steps, 1)
        if self.eval_steps is not None and self.eval_strategy != "steps":
            reason = f"eval_strategy is {self.eval_strategy!r}, so it has no effect"
            raise OptionError("eval_steps", self.eval_steps, reason, "Set eval_strategy to steps, or leave eval_steps out")
        for name in ("save_total_limit", "save_only_model", "checkpoint_dir"):
            if getattr(self, name) not in (None, False) and not (self.save_steps or self.save_first_step):
                reason = "save_steps is 0, so it has no effect"
                raise OptionError(name, getattr(self, name), reason, "Set save_steps, or leave it out")
        if self.placement == "memory" and self.ssd:
            reason = "placement is 'memory', so nothing would be there"
            raise OptionError("ssd", list(self.ssd), reason, "Leave ssd out, or set placement to auto")
        parse_store_mode(self.store)
        self.schedule(max(self.max_steps, 1))
        self.data_settings()
        Numerics(parse_dtype(self.dtype), self.slice_rows, self.loss_tile, self.seed)
        for name in ("host_memory", "device_memory"):
            if (size := getattr(self, name)) is not None:
                parse_bytes(name, size)

    @property
    def clip_norm(self) -> float | None:
        """What the engine takes: none for no clipping."""
        return self.max_grad_norm or None

    @property
    def evaluates_every(self) -> int | None:
        """Steps between evaluations, if they are counted in steps."""
        return (self.eval_steps or DEFAULT_EVAL_STEPS) if self.eval_strategy == "steps" else None

    @property
    def folder(self) -> Path:
        return Path(self.output_dir)

    @property
    def checkpoint_folder(self) -> Path:
        return Path(self.checkpoint_dir or self.output_dir)

    @property
    def drives(self) -> list[Path]:
        """The folders of the store."""
        if self.placement == "memory":
            return []
        return [Path(folder) for folder in self.ssd] or [self.folder / "store"]

    def data_settings(self) -> DataSettings:
        return DataSettings(
            max_length=self.max_length,
            too_long=self.too_long,
            completion_only_loss=self.completion_only_loss,
            assistant_only_loss=self.assistant_only_loss,
            text_field=self.dataset_text_field,
            packing=self.packing,
            group_by_length=self.group_by_length,
            seed=self.seed,
        )

    def schedule(self, num_steps: int) -> LrSchedule:
        """The learning rate over a run of so many steps."""
        return LrSchedule(schedule_name(self.lr_scheduler_type), num_steps, self.warmup_steps)

    def to_dict(self) -> dict[str, Any]:
        """What YAML can hold."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


_POSITIVE = (
    "max_length",
    "per_device_train_batch_size",
    "per_device_eval_batch_size",
    "gradient_accumulation_steps",
    "logging_steps",
    "eval_steps",
    "save_total_limit",
    "sample_max_new_tokens",
    "max_skipped_steps",
)
_NOT_NEGATIVE = ("learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm", "warmup_steps", "save_steps", "seed")


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise OptionError(option, value, "it is not known here", f"Choose one of: {', '.join(known)}")


def _at_least(option: str, value: float | None, least: int) -> None:
    if value is not None and value < least:
        raise OptionError(option, value, f"it is below {least}", f"Set it to {least} or more")
