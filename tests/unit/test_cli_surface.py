"""What people have written into scripts: the commands, and the options of `lohan train` with their defaults. It only grows."""

from __future__ import annotations

from dataclasses import MISSING, fields

import pytest

from lohan.cli import COMMANDS, main
from lohan.train.config import TrainingConfig

OPTIONS = {
    "output_dir": MISSING,
    "model_name_or_path": None,
    "run_name": None,
    "dataset_name": None,
    "dataset_train_split": "train",
    "dataset_test_split": "test",
    "eval_dataset_name": None,
    "dataset_text_field": "text",
    "max_length": 1024,
    "too_long": "truncate",
    "packing": False,
    "completion_only_loss": None,
    "assistant_only_loss": False,
    "group_by_length": False,
    "chat_template_path": None,
    "debug_data": False,
    "learning_rate": 2e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optim": "adamw",
    "weight_decay": 0.0,
    "adam_beta1": 0.9,
    "adam_beta2": 0.999,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "max_skipped_steps": 5,
    "seed": 42,
    "eval_strategy": "no",
    "eval_steps": None,
    "per_device_eval_batch_size": 8,
    "sample_prompts": (),
    "sample_max_new_tokens": 32,
    "logging_steps": 1,
    "report_to": (),
    "save_steps": 0,
    "save_total_limit": None,
    "save_first_step": False,
    "save_only_model": False,
    "checkpoint_dir": None,
    "resume_from_checkpoint": True,
    "device": "auto",
    "device_memory": None,
    "host_memory": None,
    "ssd": (),
    "ssd_endurance_tbw": None,
    "dtype": "bf16",
    "store": "auto",
    "placement": "auto",
    "slice_rows": 0,
    "loss_tile": 4096,
    "measure_lanes": True,
}


def test_options_and_defaults_stay() -> None:
    assert {field.name: field.default for field in fields(TrainingConfig)} == OPTIONS


def test_commands_stay() -> None:
    assert [*COMMANDS] == ["train", "generate", "export", "store", "report", "doctor"]


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], []])
def test_help_is_there(words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["lohan"])
    assert main(words or None) == 0
    assert "usage: lohan" in capsys.readouterr().out


def test_an_unknown_command_offers_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trian"]) == 2
    assert "Did you mean 'train'?" in capsys.readouterr().err
