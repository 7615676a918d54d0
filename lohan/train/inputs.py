"""What a run takes: the model's folder and tokenizer, and its data as batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from lohan.data.dataset import TokenDataset, tokenize
from lohan.data.fit import check_packing, check_vocabulary, padding_token
from lohan.data.plan import BatchPlan
from lohan.data.sources import open_rows
from lohan.engine import Engine
from lohan.errors import ModelError, OptionError
from lohan.model.load import build_on_meta
from lohan.optim.schedules import LrSchedule
from lohan.train.checks import check_length, check_model, open_tokenizer
from lohan.train.config import TrainingConfig
from lohan.train.console import Console


@dataclass(frozen=True, slots=True)
class Inputs:
    """Read and checked."""

    model: Path | nn.Module
    tokenizer: Any
    has_own_tokenizer: bool
    """it is not as it came in the model's folder"""
    dataset: TokenDataset
    plan: BatchPlan
    eval_plan: BatchPlan | None
    pad_id: int
    num_steps: int
    """optimizer steps of the whole run"""
    schedule: LrSchedule

    @property
    def model_name(self) -> str:
        return type(self.model).__name__ if isinstance(self.model, nn.Module) else str(self.model)

    def save(self, engine: Engine, folder: Path) -> dict[str, int]:
        """The model as it is now, with the tokenizer that it was trained with; the checksum of each tensor."""
        checksums = engine.save_pretrained(folder)
        if self.has_own_tokenizer:
            self.tokenizer.save_pretrained(folder)
        return checksums


def read_inputs(
    config: TrainingConfig, model: object, train_dataset: object, eval_dataset: object, tokenizer: Any, console: Console
) -> Inputs:
    """From what the user named to batches. `model`, the data sets and the tokenizer go before what the config names."""
    console.phase("open model files")
    source, model_config = _open_source(config, model)
    check_length(config, model_config)
    has_own_tokenizer = tokenizer is not None or config.chat_template_path is not None
    tokenizer = use_template(config, tokenizer or _open_tokenizer(source))
    vocab_size = _vocab_size(tokenizer, model_config)
    check_vocabulary(tokenizer, vocab_size)
    if config.packing and model_config is not None:
        check_packing(source if isinstance(source, nn.Module) else build_on_meta(model_config, torch.bfloat16))

    console.idle()
    settings, pad_id = config.data_settings(), padding_token(tokenizer, vocab_size)
    named = config.dataset_name if train_dataset is None else train_dataset
    dataset = _tokens(config, named, config.dataset_train_split, tokenizer, console)
    check_vocabulary(tokenizer, vocab_size, dataset)
    plan = BatchPlan(dataset, config.per_device_train_batch_size, config.gradient_accumulation_steps, settings, pad_id)
    eval_plan = None
    if config.eval_strategy != "no" or eval_dataset is not None:
        named = _evaluated(config, eval_dataset, train_dataset)
        eval_tokens = _tokens(config, named, config.dataset_test_split, tokenizer, console)
        check_vocabulary(tokenizer, vocab_size, eval_tokens)
        rows, batches = config.per_device_eval_batch_size, config.gradient_accumulation_steps
        eval_plan = BatchPlan(eval_tokens, rows, batches, settings, pad_id)
    num_steps = config.max_steps if config.max_steps > 0 else math.ceil(config.num_train_epochs * plan.steps_per_epoch)
    schedule = config.schedule(num_steps)
    return Inputs(source, tokenizer, has_own_tokenizer, dataset, plan, eval_plan, pad_id, num_steps, schedule)


def _open_source(config: TrainingConfig, model: object) -> tuple[Path | nn.Module, PreTrainedConfig | None]:
    """The model's folder, checked, or the module that was passed; and its configuration."""
    source = config.model_name_or_path if model is None else model
    if source is None:
        raise OptionError("model_name_or_path", None, "a run needs a model", "Name its folder, or its name on the hub")
    if isinstance(source, str | Path):
        try:
            return check_model(source)
        except ModelError as error:
            remedy = "Name a folder that Transformers loads from safetensors, or such a model of the hub"
            raise OptionError("model_name_or_path", str(source), str(error).removeprefix(f"{source}: "), remedy) from error
    if isinstance(source, nn.Module):
        return source, getattr(source, "config", None)
    raise OptionError("model", type(source).__name__, "it is no model", "Pass a folder, a hub name, or a module")


def _open_tokenizer(source: Path | nn.Module) -> Any:
    if isinstance(source, nn.Module):
        raise OptionError("processing_class", None, "a module comes without a tokenizer", "Pass its tokenizer")
    tokenizer = open_tokenizer(source)
    if tokenizer is None:
        remedy = "Put the files of its tokenizer into that folder"
        raise OptionError("model_name_or_path", str(source), "there is no tokenizer with it", remedy)
    return tokenizer


def _vocab_size(tokenizer: Any, model_config: PreTrainedConfig | None) -> int:
    """Rows of the model's embedding; of a module that does not say, as many as its tokenizer needs."""
    size = getattr(model_config.get_text_config(), "vocab_size", None) if model_config is not None else None
    return size if isinstance(size, int) else len(tokenizer)


def _tokens(config: TrainingConfig, source: object, split: str, tokenizer: Any, console: Console) -> TokenDataset:
    if source is None:
        raise OptionError("dataset_name", None, "a run needs data", "Name a file, a folder, or a data set of the hub")
    rows = open_rows(source, split)
    dataset = tokenize(rows, tokenizer, config.data_settings(), config.folder / "tokens", console.progress)
    console.idle()
    console.line(f"{rows.name}: {dataset}{' (kept from before)' if dataset.reused else ''}")
    for note in dataset.notes:
        console.line(f"  {note}")
    return dataset


def _evaluated(config: TrainingConfig, eval_dataset: object, train_dataset: object) -> object:
    """What to evaluate on: what is named for it, or the training data's other split."""
    named = config.eval_dataset_name if eval_dataset is None else eval_dataset
    if named is None and (train_dataset is not None or Path(config.dataset_name or "").is_file()):
        reason = f"eval_strategy is {config.eval_strategy!r}, and the training data has no other split"
        raise OptionError("eval_dataset_name", None, reason, "Name a file, or set eval_strategy to no")
    return config.dataset_name if named is None else named


def use_template(config: TrainingConfig, tokenizer: Any) -> Any:
    """The tokenizer, with the chat template that the config names."""
    if (path := config.chat_template_path) is not None:
        try:
            tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = f"it cannot be read ({error})"
            raise OptionError("chat_template_path", path, reason, "Name a file with a template") from error
    return tokenizer
