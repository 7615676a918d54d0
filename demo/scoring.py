"""What a model answers to questions, with plain Transformers, and how many of the answers are right to the letter."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

ROWS_AT_ONCE = 50
MAX_NEW_TOKENS = 32


@dataclass(frozen=True, slots=True)
class Question:
    """A held-out question and the only answer that counts."""

    text: str
    answer: str

    def is_right(self, answer: str) -> bool:
        return answer.strip() == self.answer


def read_questions(path: Path) -> list[Question]:
    """Rows of `messages`: one of the user, one of the assistant."""
    rows = [json.loads(line)["messages"] for line in path.read_text().splitlines()]
    return [Question(user["content"], assistant["content"]) for user, assistant in rows]


def score(questions: Sequence[Question], answers: Sequence[str]) -> float:
    """The share of answers that are right: the whole sentence, and nothing after it."""
    return sum(question.is_right(answer) for question, answer in zip(questions, answers, strict=True)) / len(questions)


@torch.no_grad()
def ask(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, questions: Sequence[Question]) -> list[str]:
    """What the model says after each question, in the form of the chat template, always its likeliest token."""
    answers: list[str] = []
    for first in range(0, len(questions), ROWS_AT_ONCE):
        chats = [[{"role": "user", "content": q.text}] for q in questions[first : first + ROWS_AT_ONCE]]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
        inputs = tokenizer(
            prompts,
            add_special_tokens=False,
            padding=True,
            padding_side="left",
            return_token_type_ids=False,
            return_tensors="pt",
        ).to(model.device)
        output = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers
