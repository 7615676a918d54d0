"""What a training run is made of, small: a Llama with a tokenizer of its own, conversations, and a folder on a drive."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.tiny import causal_model
from tests.tiny_tokenizer import PLAIN, tiny_tokenizer

SETTINGS: dict[str, Any] = {
    "max_length": 48,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 2,
    "learning_rate": 1e-3,
    "device": "cpu",
    "dtype": "fp32",
    "host_memory": "64MiB",
}
"""of a run that takes a moment"""


def chats(num: int) -> list[dict[str, Any]]:
    return [
        {
            "messages": [
                {"role": "user", "content": f"what is {i} plus {i}?"},
                {"role": "assistant", "content": f"{2 * i}"},
            ]
        }
        for i in range(num)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def make_model(folder: Path) -> Path:
    causal_model("llama").save_pretrained(folder)
    tiny_tokenizer(PLAIN).save_pretrained(folder)
    return folder


@contextmanager
def on_a_drive() -> Iterator[Path]:
    """An empty folder beside the checkout: /tmp may be tmpfs, which is no drive."""
    scratch = Path(__file__).parents[2] / ".bench"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        yield Path(folder)


def read_log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a log that are steps."""
    return [line for line in read_log(folder) if "loss" in line]
