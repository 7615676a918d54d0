"""A tokenizer whose every token is written here, so that golden tokens stay what they are: bytes, and words made of them."""

from __future__ import annotations

from itertools import pairwise

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = ["Ġworld", "Ġis", "Ġthe", "Ġblue", "hello", "answer", "sky"]
"""Ġ is a space in front"""
SPECIAL = ["<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}<|assistant|>{OPEN}{{ message.content }}<|end|>{CLOSE}"
    "{% elif message.role in ['system', 'user', 'tool'] %}<|{{ message.role }}|>{{ message.content }}<|end|>"
    "{% else %}{{ raise_exception('nobody is called ' ~ message.role) }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PLAIN = TEMPLATE.replace("{OPEN}", "").replace("{CLOSE}", "")
MARKED = TEMPLATE.replace("{OPEN}", "{% generation %}").replace("{CLOSE}", "{% endgeneration %}")


def tiny_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Bytes are 0 to 255 as sorted characters; then pieces of words, shortest first of each; then the special tokens."""
    vocabulary = {character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges: list[tuple[str, str]] = []
    for word in WORDS:
        for end, _ in pairwise(range(1, len(word) + 1)):
            if word[: end + 1] not in vocabulary:
                merges.append((word[:end], word[end]))
                vocabulary[word[: end + 1]] = len(vocabulary)
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>")
    tokenizer.chat_template = template
    return tokenizer
