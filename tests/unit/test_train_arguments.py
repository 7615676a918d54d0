"""Flags, YAML and Python give the same settings; what is wrong is refused by name; the guide lists every option."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

from lohan.errors import OptionError
from lohan.train.arguments import MAX_YAML_BYTES, from_dict, parse_arguments, read_yaml
from lohan.train.command import help_text
from lohan.train.config import TrainingConfig

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.fixture
def warned() -> list[str]:
    return []


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# -------------------------------------------------------------------- the same everywhere


def test_flags_yaml_and_python_mean_the_same(tmp_path: Path, warned: list[str]) -> None:
    lines = ["output_dir: out", "learning_rate: 1e-3", "ssd: [/a, /b]", "packing: true", "eval_strategy: no"]
    lines += ["max_grad_norm: null", "report_to: wandb"]
    by_file = parse_arguments([write(tmp_path / "run.yaml", "\n".join(lines))], warned.append)
    words = "--output_dir out --learning-rate=1e-3 --ssd /a --ssd /b --packing --eval_strategy no --max_grad_norm none"
    by_flags = parse_arguments([*words.split(), "--report_to", "wandb"], warned.append)
    by_hand = TrainingConfig(
        output_dir="out", learning_rate=1e-3, ssd=["/a", "/b"], packing=True, max_grad_norm=None, report_to="wandb"
    )
    assert by_file == by_flags == by_hand
    assert by_hand.ssd == ("/a", "/b") and by_hand.report_to == ("wandb",) and by_hand.clip_norm is None
    assert warned == []


def test_flags_win_over_the_file_by_old_names_too(tmp_path: Path, warned: list[str]) -> None:
    path = write(tmp_path / "run.yaml", "output_dir: a\nmax_seq_length: 64\nseed: 1\n")
    config = parse_arguments([path, "--output_dir", "b", "--max_length", "32"], warned.append)
    assert (config.output_dir, config.max_length, config.seed) == ("b", 32, 1)
    assert warned == ["max_seq_length is called max_length now"]


def test_what_was_run_can_be_run_again() -> None:
    config = TrainingConfig(output_dir="out", sample_prompts=["a", "b"], warmup_steps=0.1, host_memory="2GiB")
    assert from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "old, new",
    [
        ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch"}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"train_batch_size": 3}, {"per_device_train_batch_size": 3}),
        ({"bf16": True}, {"dtype": "bf16"}),
        ({"torch_dtype": "float32"}, {"dtype": "fp32"}),
        ({"optim": "adamw_torch"}, {"optim": "adamw"}),
        ({"fp16": False}, {}),
        ({"use_cpu": "true"}, {"device": "cpu"}),
        ({"save_strategy": "no"}, {"save_steps": 0}),
        ({"gradient_checkpointing": True}, {}),
    ],
    ids=str,
)
def test_old_names_are_understood_with_a_warning(old: dict[str, Any], new: dict[str, Any], warned: list[str]) -> None:
    assert from_dict({"output_dir": "out", **old}, warned.append) == TrainingConfig(output_dir="out", **new)
    assert next(iter(old)) in warned[0]


# -------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "words, message",
    [
        ("--eval_step 5", "eval_step='5': there is no such option. Did you mean eval_steps?"),
        ("--zzz", "zzz=None: there is no such option. lohan train --help lists all"),
        ("--seed", "seed=None: its value is missing. Write --seed VALUE"),
        ("--seed 1 --seed 2", "seed='2': it was given as '1' before. Give it once"),
        ("--fp16", "fp16='true': lohan has no such thing. Leave it out, and set dtype"),
        ("--save_strategy epoch", "save_strategy='epoch': lohan has no such thing. Leave it out, and set save_steps"),
        ("--max_length 8 --max_seq_length 8", "max_seq_length='8': max_length, which is the same, is set as well"),
        ("nowhere.yaml", "config='nowhere.yaml': it cannot be read"),
        ("--checkpoint_dir other", "checkpoint_dir='other': save_steps is 0, so it has no effect"),
    ],
)
def test_wrong_words_are_refused(words: str, message: str) -> None:
    with pytest.raises(OptionError) as refused:
        parse_arguments(["--output_dir", "out", *words.split()], lambda text: None)
    assert message in str(refused.value)


def test_a_run_needs_a_folder() -> None:
    with pytest.raises(OptionError, match="output_dir=None"):
        parse_arguments(["--seed", "1"])


@pytest.mark.parametrize(
    "name, value",
    [
        ("learning_rate", "fast"),
        ("learning_rate", -1),
        ("learning_rate", float("nan")),
        ("num_train_epochs", 0),
        ("max_steps", 0),
        ("max_steps", 1.5),
        ("max_length", 1),
        ("gradient_accumulation_steps", 0),
        ("packing", "maybe"),
        ("packing", 1),
        ("optim", "lion"),
        ("placement", "disk"),
        ("dtype", "fp16"),
        ("eval_strategy", "always"),
        ("eval_steps", 5),
        ("save_total_limit", 2),
        ("adam_beta2", 1.0),
        ("warmup_steps", -0.5),
        ("lr_scheduler_type", "polynomial"),
        ("too_long", "cut"),
        ("report_to", "comet"),
        ("host_memory", "lots"),
        ("device_memory", 0),
        ("loss_tile", 100),
        ("slice_rows", -1),
        ("seed", None),
        ("model_name_or_path", 3),
        ("ssd", [1]),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_its_name(name: str, value: object) -> None:
    with pytest.raises(OptionError) as refused:
        TrainingConfig(**{"output_dir": "out", name: value})  # type: ignore[arg-type]
    assert refused.value.option == name and refused.value.remedy


def test_a_drive_without_a_store_on_it_is_refused() -> None:
    with pytest.raises(OptionError, match="ssd="):
        TrainingConfig(output_dir="out", placement="memory", ssd=["/nvme"])


@pytest.mark.parametrize(
    "text, message",
    [
        ("a: &x 1\nb: *x\n", "line 2 has an alias"),
        ("seed: 1\nseed: 2\n", "seed is set twice"),
        ("seed: !!python/object/apply:os.getcwd []\n", "it is not YAML"),
        ("- seed\n", "does not hold names and values"),
        ("seed: [1\n", "it is not YAML"),
        ("# " + "x" * MAX_YAML_BYTES, f"more than {MAX_YAML_BYTES} bytes"),
    ],
    ids=["alias", "twice", "object", "list", "malformed", "large"],
)
def test_yaml_is_read_strictly(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        read_yaml(Path(write(tmp_path / "run.yaml", text)))


# -------------------------------------------------------------------- recipes, help, guide


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.name)
def test_recipes_are_settings(recipe: Path, warned: list[str]) -> None:
    config = parse_arguments([str(recipe)], warned.append)
    assert warned == [] and config.output_dir.startswith("runs/")
    assert recipe.read_text().startswith("# ")


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 2


def test_the_help_and_the_guide_list_every_option_with_its_default() -> None:
    guide = (ROOT / "docs" / "train.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `?(.+?)`? \| .+ \|$", guide, re.MULTILINE))
    declared = {f.name: "required" if f.default is MISSING else repr(f.default) for f in fields(TrainingConfig)}
    assert rows == declared
    described = re.findall(r"^  --(\w+)  \((.+)\)\n        (\S.+)$", help_text(), re.MULTILINE)
    assert [name for name, _, _ in described] == [*declared]
