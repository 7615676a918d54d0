"""Tokens and labels are those of TRL's SFTTrainer, for the formats that both know."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
from transformers import PreTrainedModel

from lohan.data import DataSettings, open_rows, tokenize
from tests.tiny import causal_model
from tests.tiny_tokenizer import MARKED, tiny_tokenizer

trl = pytest.importorskip("trl")

ANSWER = {"role": "assistant", "content": "the answer is blue"}
CHAT = [{"role": "system", "content": "sky"}, {"role": "user", "content": "hello world"}, ANSWER]
LONGER = [*CHAT, {"role": "user", "content": "\n is?"}, {"role": "assistant", "content": " the\n"}]
TEXTS = [{"text": "hello world"}, {"text": "ends<eos>"}, {"text": "the sky is blue " * 9}]
PROMPTS = [{"prompt": "hello", "completion": " world"}, {"prompt": "hello wor", "completion": "ld<eos>"}]
CHATS = [{"messages": CHAT}, {"messages": LONGER}]
CHAT_PROMPTS = [{"prompt": CHAT[:2], "completion": CHAT[2:]}, {"prompt": LONGER[:3], "completion": LONGER[3:]}]
SHAREGPT = [{"conversations": [{"from": one["role"], "value": one["content"]} for one in row["messages"]]} for row in CHATS]
TOKENS = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": list(range(40)), "labels": list(range(40))}]

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "text": (TEXTS, {}),
    "another column": ([{"story": row["text"]} for row in TEXTS], {"dataset_text_field": "story"}),
    "prompt": (PROMPTS, {}),
    "prompt learnt": (PROMPTS, {"completion_only_loss": False}),
    "messages": (CHATS, {}),
    "messages, assistant": (CHATS, {"assistant_only_loss": True}),
    "prompt of messages": (CHAT_PROMPTS, {}),
    "prompt of messages, assistant": (CHAT_PROMPTS, {"assistant_only_loss": True}),
    "prompt of messages learnt, assistant": (CHAT_PROMPTS, {"assistant_only_loss": True, "completion_only_loss": False}),
    "ShareGPT": (SHAREGPT, {}),
    "tokens": (TOKENS, {}),
    "tokens without labels": ([{"input_ids": row["input_ids"]} for row in TOKENS], {}),
}


@pytest.fixture(scope="module")
def model() -> Iterator[PreTrainedModel]:
    yield causal_model("llama")


@pytest.mark.parametrize("name", CASES)
def test_tokens_and_labels_are_trl_s(tmp_path: Path, model: PreTrainedModel, name: str) -> None:
    rows, options = CASES[name]
    config = trl.SFTConfig(output_dir=str(tmp_path), max_length=24, use_cpu=True, bf16=False, report_to="none", **options)
    trainer = trl.SFTTrainer(
        model, config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tiny_tokenizer(MARKED)
    )
    wanted = [(row["input_ids"], row["labels"]) for row in trainer.train_dataset]

    renamed = {"text_field" if option == "dataset_text_field" else option: value for option, value in options.items()}
    settings = DataSettings(max_length=24, **renamed)
    found = tokenize(open_rows(rows), tiny_tokenizer(MARKED), settings, tmp_path / "tokens")
    assert [(example.input_ids.tolist(), example.labels.tolist()) for example in found] == wanted
    assert len(wanted) == len(rows)
