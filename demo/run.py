"""The demonstration: a model that knows a world but cannot answer is taught to answer, its training state on the SSD.

    before   held-out questions to the base model: what it says, and how many answers are right
    train    `lohan train demo/demo.yaml`, as anybody would type it
    after    the same questions to the model that was written, with plain Transformers; and `lohan generate`
    tell     what was done in how much memory, where everything is, and how to do it with one's own model and data

Ctrl-C during training stops after the step; the same command continues.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten

from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from demo.scoring import Question, ask, read_questions, score
from lohan.config import parse_bytes
from lohan.train.arguments import parse_arguments
from lohan.train.config import TrainingConfig
from lohan.train.log import LOG_NAME, read_log

CONFIG = "demo/demo.yaml"
STATE_BYTES = 12
"""of a parameter: fp32 master and the two means of AdamW"""
NUM_SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = ArgumentParser(description="Fine-tune a small model out of core, and compare what it says before and after.")
    parser.add_argument("config", nargs="?", default=CONFIG)
    options = parser.parse_args(arguments)
    config = parse_arguments([options.config], print)
    logging.disable_progress_bar()
    questions = read_questions(Path(str(config.eval_dataset_name)))

    heading(f"1. Before: {config.model_name_or_path} has read about an invented world, and has never seen a question")
    before, num_parameters = answers_of(Path(str(config.model_name_or_path)), questions)
    show(questions, before)

    heading(f"2. Fine-tuning on {config.dataset_name}: answers about other towns, people and animals")
    if model_dir(config).exists():
        print(f"{config.output_dir} holds a finished run: nothing is left to train. Remove it to start over.")
    if code := lohan("train", options.config):
        return code

    heading("3. After: the same questions, about what only the base model had read of")
    after, _ = answers_of(model_dir(config), questions)
    show(questions, after)
    lohan("generate", config.output_dir, questions[0].text)

    heading("4. What happened")
    tell(config, num_parameters, score(questions, before), score(questions, after), len(questions))
    return 0


def heading(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}", flush=True)


def model_dir(config: TrainingConfig) -> Path:
    return config.folder / "model"


def answers_of(folder: Path, questions: Sequence[Question]) -> tuple[list[str], int]:
    """What the model in this folder says, and how many parameters it has."""
    print(f"asking {len(questions)} held-out questions ...", flush=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
    return ask(model, AutoTokenizer.from_pretrained(folder), questions), model.num_parameters()


def show(questions: Sequence[Question], answers: Sequence[str]) -> None:
    for question, answer in list(zip(questions, answers, strict=True))[:NUM_SHOWN]:
        verdict = "right" if question.is_right(answer) else f"wrong: {question.answer}"
        print(f"  {question.text}\n    -> {shorten(answer, 90, placeholder=' ...')}   [{verdict}]")
    print(f"score: {score(questions, answers):.0%} of {len(questions)} answers are right to the letter", flush=True)


def lohan(*arguments: str) -> int:
    """Run a command as it is shown."""
    print(f"\n$ lohan {shlex.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, "-m", "lohan", *arguments], check=False).returncode


def tell(config: TrainingConfig, num_parameters: int, before: float, after: float, num_questions: int) -> None:
    steps = [record for record in read_log(config.folder / LOG_NAME) if "step_s" in record]
    peak_bytes = max(record["peak_host_bytes"] for record in steps)
    read_bytes, written_bytes = (sum(r[name] for r in steps) for name in ("ssd_read_bytes", "ssd_write_bytes"))
    state_bytes = STATE_BYTES * num_parameters
    budget = parse_bytes("host_memory", config.host_memory) if config.host_memory is not None else peak_bytes
    out = config.output_dir
    print(f"""\
{len(steps)} steps took the score on {num_questions} held-out questions from {before:.0%} to {after:.0%}.
The model has {num_parameters / 1e6:.2f} M parameters. Its training state is {state_bytes / 1e6:.0f} MB, and lay in {out}/store;
with activations and gradients it passed through {peak_bytes / 1e6:.0f} MB of memory, of {budget / 1e6:.0f} MB allowed.
{read_bytes / 1e9:.1f} GB were read, {written_bytes / 1e9:.1f} GB written.

the model          {out}/model, which Transformers and everything else load
what was run       {out}/config.yaml
every step         {out}/log.jsonl;  as one page:  lohan report {out}

With your own model and data (a folder or a hub name; rows of messages, prompt and completion, or text):

    .venv/bin/lohan train --model_name_or_path MODEL --dataset_name DATA.jsonl --output_dir runs/mine --host_memory 24GiB
    .venv/bin/lohan generate runs/mine "a prompt"

{CONFIG} is a file to copy; docs/demo.md says how the demonstration was made.""")


if __name__ == "__main__":
    sys.exit(main())
