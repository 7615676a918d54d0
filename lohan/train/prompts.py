"""A prompt as the model was trained to see it: in the tokenizer's chat template, if it has one."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def encode_prompt(tokenizer: Any, prompt: str, *, raw: bool = False) -> dict[str, Tensor]:
    """What `generate` takes. `raw`: the text alone, whatever the tokenizer has."""
    if raw or not getattr(tokenizer, "chat_template", None):
        text: dict[str, Tensor] = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
        return dict(text)
    messages = [{"role": "user", "content": prompt}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    return dict(chat)
