"""Runs are the loop that one would write, whole or interrupted; what is logged, evaluated, sampled, saved, told to others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, EarlyStoppingCallback, TrainerCallback

from lohan import AdamW, Engine, Trainer, TrainingConfig
from lohan.cli import main
from lohan.data import BatchPlan, DataSettings, open_rows, tokenize
from lohan.errors import OptionError
from lohan.report import StepReport
from tests.unit.training import SETTINGS, chats, make_model, on_a_drive, read_log, steps_of, write_jsonl

NUM_ROWS = 20


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A model and data."""
    with on_a_drive() as folder:
        make_model(folder / "model")
        write_jsonl(folder / "data.jsonl", chats(NUM_ROWS))
        write_jsonl(folder / "eval.jsonl", chats(5))
        yield folder


@pytest.fixture
def out(place: Path, request: pytest.FixtureRequest) -> Path:
    return place / f"out-{request.node.name}"


def config(place: Path, out: Path, **settings: Any) -> TrainingConfig:
    data = {"model_name_or_path": str(place / "model"), "dataset_name": str(place / "data.jsonl")}
    return TrainingConfig(output_dir=str(out), **{**data, **SETTINGS, "measure_lanes": False, **settings})


class Recorder(TrainerCallback):
    """Every event, with the step at which it came."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.logs: list[dict[str, Any]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def record(args: Any, state: Any, control: Any, **told: Any) -> None:
            self.events.append((name, state.global_step))
            assert told["model"] is not None and told["processing_class"] is not None
            self.logs += [told["logs"]] if "logs" in told else []

        return record


class InterruptAfter(TrainerCallback):
    """Ctrl-C at the end of a step, seen before the next one begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **told: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGINT)


def losses_by_hand(place: Path, drive: Path, num_steps: int) -> list[float]:
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    settings = DataSettings(max_length=SETTINGS["max_length"], seed=42)
    dataset = tokenize(open_rows(str(place / "data.jsonl")), tokenizer, settings, drive / "tokens")
    plan = BatchPlan(dataset, 2, 2, settings, tokenizer.pad_token_id)
    optimizer = AdamW(lr=1e-3, weight_decay=0.0)
    with Engine(
        place / "model", ssd=[drive / "store"], device="cpu", host_memory="64MiB", dtype="fp32", optimizer=optimizer, seed=42
    ) as engine:
        rates = [1e-3 * (num_steps - done) / num_steps for done in range(num_steps)]
        return [engine.step(plan.step(number), lr=lr).loss for number, lr in enumerate(rates)]


# -------------------------------------------------------------------- steps


def test_a_run_is_the_loop_that_one_would_write(place: Path, out: Path) -> None:
    """Over the end of an epoch; lanes measured in between change nothing."""
    summary = Trainer(args=config(place, out, max_steps=7, measure_lanes=True)).train()
    steps = steps_of(out)
    assert [step["loss"] for step in steps] == losses_by_hand(place, out / "by-hand", 7)
    assert [step["step"] for step in steps] == list(range(1, 8))
    assert [step["epoch"] for step in steps] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]
    assert [step["speed_of_light"] is not None for step in steps] == [False, False] + [True] * 5
    assert summary.num_steps == 7 and summary.num_tokens == sum(step["tokens"] for step in steps)
    assert {"compute", "ssd_read", "optimizer"} <= steps[2]["lanes"].keys()
    assert (out / "trace.json").is_file()


def test_an_interrupted_run_continues_as_if_nothing_had_happened(place: Path, out: Path, capsys: Any) -> None:
    first = Trainer(args=config(place, out, max_steps=7), callbacks=[InterruptAfter(3)]).train()
    assert first.interrupted and 3 <= first.num_steps <= 4 and first.model_dir is None
    assert "The same command continues" in capsys.readouterr().out
    second = Trainer(args=config(place, out, max_steps=7)).train()
    assert not second.interrupted and second.num_steps == 7
    assert [step["step"] for step in steps_of(out)] == list(range(1, 8))
    assert [step["loss"] for step in steps_of(out)] == losses_by_hand(place, out / "by-hand", 7)
    assert f"continues after step {first.num_steps} of 7" in capsys.readouterr().out


def test_interrupting_the_command_ends_with_130(place: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(place, out, max_steps=7).to_dict()
    step = Engine.step

    def interrupted(engine: Engine, *arguments: Any, **options: Any) -> StepReport:
        os.kill(os.getpid(), signal.SIGTERM)
        return step(engine, *arguments, **options)

    monkeypatch.setattr(Engine, "step", interrupted)
    flags = [f"--{name}={value}" for name, value in settings.items() if value not in (None, [])]
    assert main(["train", *flags]) == 130
    assert len(steps_of(out)) == 1


def test_memory_placement_saves_what_it_has_when_interrupted(place: Path, out: Path) -> None:
    summary = Trainer(args=config(place, out, max_steps=7, placement="memory"), callbacks=[InterruptAfter(2)]).train()
    assert summary.interrupted and summary.model_dir == out / f"checkpoint-{summary.num_steps}"
    assert AutoModelForCausalLM.from_pretrained(summary.model_dir) is not None


def test_what_is_not_finite_is_passed_over_then_refused(place: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps 2 and 3 of the batches are spoilt; then all of them."""
    num_calls, spoilt = 0, {2, 3}
    step = Engine.step

    def spoil(engine: Engine, batches: Any, **options: Any) -> StepReport:
        nonlocal num_calls
        num_calls += 1
        if num_calls not in spoilt:
            return step(engine, batches, **options)

        def not_finite(model: Any, batch: dict[str, Tensor]) -> Tensor:
            loss: Tensor = model(**batch).loss * float("nan")
            return loss

        return step(engine, batches, loss_fn=not_finite, **options)

    monkeypatch.setattr(Engine, "step", spoil)
    settings = config(place, out, max_steps=4, max_skipped_steps=3)
    Trainer(args=settings).train()
    steps = steps_of(out)
    assert [(line["step"], bool(line.get("skipped"))) for line in steps] == [
        (1, False), (1, True), (1, True), (2, False), (3, False), (4, False),
    ]  # fmt: skip
    assert steps[1]["loss"] is None and steps[3]["epoch"] == 0.8

    num_calls, spoilt = 0, set(range(3, 10))
    with pytest.raises(OptionError, match="max_skipped_steps=3.*3 steps in a row.*step 2"):
        Trainer(args=config(place, out.with_name("out-all"), max_steps=4, max_skipped_steps=3)).train()


# -------------------------------------------------------------------- between steps


def test_evaluation_is_the_mean_over_all_targets(place: Path, out: Path) -> None:
    settings = config(place, out, max_steps=4, eval_strategy="steps", eval_steps=2, eval_dataset_name=str(place / "eval.jsonl"))
    Trainer(args=settings).train()
    evaluations = [line for line in read_log(out) if "eval_loss" in line]
    assert [line["step"] for line in evaluations] == [2, 4]
    model = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    total, num = 0.0, 0
    for row in chats(5):
        ids = tokenizer.apply_chat_template(row["messages"], return_tensors="pt", return_dict=True)["input_ids"]
        total += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        num += ids.shape[1] - 1
    assert evaluations[-1]["eval_targets"] == num
    assert evaluations[-1]["eval_loss"] == pytest.approx(total / num, rel=1e-4)


def test_an_epoch_ends_with_an_evaluation_and_a_sample(place: Path, out: Path) -> None:
    settings = config(
        place, out, num_train_epochs=2, eval_strategy="epoch", sample_prompts=["what is 1 plus 1?"], sample_max_new_tokens=4
    )
    Trainer(args=settings, eval_dataset=chats(3)).train()
    told = [(line["step"], "sample" if "sample" in line else "eval") for line in read_log(out) if "loss" not in line]
    assert told == [(5, "eval"), (5, "sample"), (10, "eval"), (10, "sample")]


def test_samples_are_what_the_model_says(place: Path, out: Path, capfd: Any) -> None:
    prompt = "what is 3 plus 3?"
    settings = config(place, out, max_steps=2, sample_prompts=[prompt], sample_max_new_tokens=6)
    Trainer(args=settings).train()
    (sample,) = [line for line in read_log(out) if "sample" in line]
    capfd.readouterr()
    assert main(["generate", str(out), prompt, "--max_new_tokens", "6"]) == 0
    assert capfd.readouterr().out.rstrip("\n") == sample["sample"].rstrip("\n")


def test_checkpoints_load_and_the_oldest_go(place: Path, out: Path) -> None:
    Trainer(args=config(place, out, max_steps=5, save_steps=1, save_total_limit=2)).train()
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]
    last, final = (AutoModelForCausalLM.from_pretrained(out / name).state_dict() for name in ("checkpoint-5", "model"))
    before = AutoModelForCausalLM.from_pretrained(out / "checkpoint-4").state_dict()
    assert all(torch.equal(last[name], final[name]) for name in final)
    assert not all(torch.equal(before[name], final[name]) for name in final)


# -------------------------------------------------------------------- callbacks


def test_callbacks_are_called_as_by_transformers(place: Path, out: Path) -> None:
    recorder = Recorder()
    settings = config(place, out, num_train_epochs=1, logging_steps=2, save_steps=3, eval_strategy="epoch")
    Trainer(args=settings, eval_dataset=chats(2), callbacks=[recorder]).train()
    expected = [("on_train_begin", 0), ("on_epoch_begin", 0)]
    for step in range(1, 6):
        expected += [("on_step_begin", step - 1), ("on_step_end", step)]
        expected += [("on_log", step)] if step in (1, 2, 4, 5) else []
        expected += [("on_save", step)] if step == 3 else []
    expected += [("on_epoch_end", 5), ("on_log", 5), ("on_evaluate", 5), ("on_train_end", 5)]
    assert recorder.events == expected
    assert {"loss", "grad_norm", "learning_rate", "epoch"} <= recorder.logs[0].keys()
    assert "eval_loss" in recorder.logs[-1]


def test_early_stopping_of_transformers_works(place: Path, out: Path) -> None:
    """With a learning rate of 0 nothing gets better."""
    settings = config(place, out, max_steps=9, learning_rate=0, eval_strategy="steps", eval_steps=1)
    summary = Trainer(args=settings, eval_dataset=chats(2), callbacks=[EarlyStoppingCallback(2)]).train()
    assert summary.num_steps == 3 and summary.model_dir == out / "model"


def test_a_callback_may_ask_for_what_is_not_due(place: Path, out: Path) -> None:
    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **told: Any) -> Any:
            assert args.learning_rate == 1e-3 and args.output_dir == str(out)
            control.should_evaluate = control.should_save = state.global_step == 2
            control.should_training_stop = state.global_step == 3
            return control

    summary = Trainer(args=config(place, out, max_steps=9), eval_dataset=chats(2), callbacks=[Asks()]).train()
    assert summary.num_steps == 3
    assert [line["step"] for line in read_log(out) if "eval_loss" in line] == [2]
    assert (out / "checkpoint-2" / "model.safetensors").is_file()


# -------------------------------------------------------------------- what is given


def test_a_module_and_rows_in_memory_train_alike(place: Path, out: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(place / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(place / "model")
    settings = config(place, out, max_steps=2, model_name_or_path=None, dataset_name=None)
    Trainer(model, settings, train_dataset=chats(NUM_ROWS), processing_class=tokenizer).train()
    assert [step["loss"] for step in steps_of(out)] == losses_by_hand(place, out / "by-hand", 2)
    assert AutoTokenizer.from_pretrained(out / "model").chat_template == tokenizer.chat_template


def test_another_chat_template_trains_and_is_saved(place: Path, out: Path) -> None:
    template = place / "template.jinja"
    template.write_text("{% for message in messages %}[{{ message['content'] }}]{% endfor %}")
    Trainer(args=config(place, out, max_steps=1, chat_template_path=str(template))).train()
    assert AutoTokenizer.from_pretrained(out / "model").chat_template == template.read_text()


def test_debug_data_shows_and_stops(place: Path, out: Path, capsys: Any) -> None:
    Trainer(args=config(place, out, debug_data=True, assistant_only_loss=True)).train()
    assert "«4<|end|>»" in capsys.readouterr().out
    assert not (out / "store").exists() and not (out / "log.jsonl").exists()
