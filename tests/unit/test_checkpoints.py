"""Checkpoints of training runs: what is in them, which are kept, and that a run goes on from one as if it had never stopped."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState

from lohan import Trainer, TrainingConfig
from lohan.errors import ModelError, OptionError
from lohan.keep.manifest import read_manifest
from lohan.model import weights_out
from lohan.train.log import read_log
from tests.unit.test_train_trainer import InterruptAfter, config
from tests.unit.training import chats, make_model, on_a_drive, steps_of, write_jsonl

NUM_STEPS = 7


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A model, data, and a whole run with checkpoints of steps 2, 4 and 6."""
    with on_a_drive() as folder:
        make_model(folder / "model")
        write_jsonl(folder / "data.jsonl", chats(20))
        train(config(folder, folder / "whole", max_steps=NUM_STEPS, save_steps=2))
        yield folder


@pytest.fixture
def out(place: Path, request: pytest.FixtureRequest) -> Path:
    return place / f"out-{request.node.name}"


def train(settings: TrainingConfig, **options: Any) -> None:
    Trainer(args=settings, **options).train()


def assert_same_run(one: Path, other: Path) -> None:
    """Logs of the same steps with the same numbers; models with the same bits."""
    lines = [[{k: line[k] for k in ("step", "loss", "grad_norm", "tokens")} for line in steps_of(run)] for run in (one, other)]
    assert lines[0] == lines[1] and len(lines[0]) == NUM_STEPS
    ours, theirs = (AutoModelForCausalLM.from_pretrained(run / "model").state_dict() for run in (one, other))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_checkpoint_is_a_model_with_a_state_beside_it(place: Path) -> None:
    checkpoints = sorted(path.name for path in (place / "whole").glob("checkpoint-*"))
    assert checkpoints == ["checkpoint-2", "checkpoint-4", "checkpoint-6"]
    for name in checkpoints:
        folder, step = place / "whole" / name, int(name.removeprefix("checkpoint-"))
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert AutoTokenizer.from_pretrained(folder).chat_template and model.num_parameters() > 0
        assert TrainerState.load_from_json(str(folder / "trainer_state.json")).global_step == step
        manifest = read_manifest(folder / "state")
        assert manifest.step == step and (folder / "state").stat().st_mode & 0o777 == 0o700
        assert (folder / "state" / "planes").stat().st_mode & 0o777 == 0o600
        assert manifest.notes["tensors"].keys() >= dict(model.named_parameters()).keys() - {"lm_head.weight"}
        assert {"config.json", "trainer_state.json", "state/log.jsonl"} <= manifest.notes["files"].keys()
        assert [line["step"] for line in read_log(folder / "state" / "log.jsonl")] == list(range(1, step + 1))
    assert not list((place / "whole").glob(".checkpoint*"))


@pytest.mark.parametrize("placement", ["auto", "memory"])
def test_a_run_goes_on_from_a_checkpoint_elsewhere(placement: str, place: Path, out: Path) -> None:
    """Another folder, another store: the log comes along."""
    train(
        config(place, out, max_steps=NUM_STEPS, placement=placement, resume_from_checkpoint=str(place / "whole/checkpoint-4"))
    )
    assert_same_run(out, place / "whole")


def test_a_run_goes_back_and_then_continues_by_the_same_command(place: Path, out: Path, capsys: Any) -> None:
    shutil.copytree(place / "whole", out)
    back = config(place, out, max_steps=NUM_STEPS, resume_from_checkpoint=str(out / "checkpoint-2"))
    train(back, callbacks=[InterruptAfter(4)])
    assert "continues after step 2 of 7" in capsys.readouterr().out
    assert [line["step"] for line in read_log(out / "log.before.jsonl")] == list(range(1, 8))
    train(back)
    assert "continues after step 2" not in capsys.readouterr().out
    assert_same_run(out, place / "whole")


def test_an_interrupted_run_in_memory_continues_by_the_same_command(place: Path, out: Path) -> None:
    settings = config(place, out, max_steps=NUM_STEPS, placement="memory")
    train(settings, callbacks=[InterruptAfter(3)])
    assert len(steps_of(out)) in (3, 4)
    train(settings)
    assert_same_run(out, place / "whole")


def test_checkpoints_on_another_disk(place: Path, out: Path) -> None:
    elsewhere = out.with_name("elsewhere")
    train(config(place, out, max_steps=3, save_first_step=True, checkpoint_dir=str(elsewhere)))
    assert [path.name for path in elsewhere.iterdir()] == ["checkpoint-1"] and not list(out.glob("checkpoint-*"))
    with pytest.raises(OptionError, match="checkpoint_dir=.*checkpoint-1 in it is of another run"):
        train(config(place, out.with_name("other"), max_steps=3, save_steps=1, checkpoint_dir=str(elsewhere)))
    assert [path.name for path in elsewhere.iterdir()] == ["checkpoint-1"]


def test_the_oldest_go_also_when_a_run_went_back(place: Path, out: Path) -> None:
    """Numbers below those of the steps that it left: they are the newest nevertheless."""
    shutil.copytree(place / "whole", out)
    kept = sorted(out.glob("checkpoint-*"))
    for age, path in enumerate(kept):
        for moved in (path, path / "state"):
            os.utime(moved, (age, age))
    train(config(place, out, max_steps=3, save_steps=3, save_total_limit=2, resume_from_checkpoint=str(kept[0])))
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-3", "checkpoint-6"]


def test_only_the_model(place: Path, out: Path) -> None:
    train(config(place, out, max_steps=2, save_steps=2, save_only_model=True))
    assert not (out / "checkpoint-2" / "state").exists()
    with pytest.raises(OptionError, match="holds a model only.*save_only_model"):
        train(config(place, out, max_steps=2, resume_from_checkpoint=str(out / "checkpoint-2")))
    with pytest.raises(OptionError, match="no such folder.*There are checkpoint-2, checkpoint-4, checkpoint-6"):
        train(config(place, out, max_steps=2, resume_from_checkpoint=str(place / "whole" / "checkpoint-3")))


def test_too_little_room_is_told_before_the_first_step(place: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = place / "whole" / "checkpoint-2"
    each = sum(path.stat().st_size for path in (whole / "state" / "planes", whole / "model.safetensors"))
    free = int(each * 2.5)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": free}))
    with pytest.raises(OptionError, match=rf"save_steps=1: 3 checkpoints of \d+ bytes each need .*, {free} are free"):
        train(config(place, out, max_steps=3, save_steps=1))
    assert not steps_of(out)
    train(config(place, out, max_steps=3, save_steps=1, save_total_limit=1))
    assert [path.name for path in out.glob("checkpoint-*")] == ["checkpoint-3"]


def test_a_model_that_cannot_be_read_back_is_no_checkpoint(place: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit changes on its way to the drive, in the second checkpoint: the first one stays, although only one is to be kept."""
    write, num_written = weights_out._write_at, 0

    def flips(path: Path, descriptor: int, offset: int, data: memoryview) -> None:
        nonlocal num_written
        num_written += path.parent.name == ".checkpoint-2.partial" and len(data) > 1000
        write(path, descriptor, offset, memoryview(bytes([data[0] ^ 1]) + bytes(data[1:])) if num_written == 3 else data)

    monkeypatch.setattr(weights_out, "_write_at", flips)
    with pytest.raises(
        ModelError, match=r"checkpoint-2\.partial/model\.safetensors\.partial: \S+ at byte .* is not what was written"
    ):
        train(config(place, out, max_steps=3, save_steps=1, save_total_limit=1))
    assert [path.name for path in out.glob("*checkpoint-*")] == ["checkpoint-1"]


def test_a_manifest_that_was_changed_is_refused(place: Path, out: Path) -> None:
    shutil.copytree(place / "whole" / "checkpoint-2", out)
    path = out / "state" / "manifest.json"
    content = json.loads(path.read_text())
    content["manifest"]["step"] = 3
    path.write_text(json.dumps(content))
    with pytest.raises(OptionError, match="resume_from_checkpoint=.*its digest is another one"):
        train(config(place, out / "run", max_steps=2, resume_from_checkpoint=str(out)))
