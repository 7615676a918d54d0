"""Random models of many architectures, small enough for a test, and the configurations they are made from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedConfig, PreTrainedModel

Model = TypeVar("Model", bound=nn.Module)
VOCABULARY = 300
LLAMA_LIKE = {"intermediate_size": 96, "num_key_value_heads": 2}
COMMON = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 8}

TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DEEPSEEK = {
    **LLAMA_LIKE,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 48,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}

CAUSAL: dict[str, Callable[[], PreTrainedConfig]] = {
    name: partial(AutoConfig.for_model, model_type, vocab_size=VOCABULARY, **TOKENS, **fields)
    for name, (model_type, fields) in {
        "llama": ("llama", {**COMMON, **LLAMA_LIKE}),
        "llama-tied": ("llama", {**COMMON, **LLAMA_LIKE, "tie_word_embeddings": True}),
        "qwen3": ("qwen3", {**COMMON, **LLAMA_LIKE, "head_dim": 8}),
        "qwen3-moe": ("qwen3_moe", {**COMMON, **LLAMA_LIKE, **MOE}),
        "mistral": ("mistral", {**COMMON, **LLAMA_LIKE}),
        "mixtral": ("mixtral", {**COMMON, **LLAMA_LIKE, "num_local_experts": 4}),
        "gemma": ("gemma", {**COMMON, **LLAMA_LIKE, "head_dim": 8}),
        "gemma2": ("gemma2", {**COMMON, **LLAMA_LIKE, "head_dim": 8}),
        "gemma3": ("gemma3_text", {**COMMON, **LLAMA_LIKE, "head_dim": 8}),
        "phi": ("phi", {**COMMON, **LLAMA_LIKE}),
        "phi3": ("phi3", {**COMMON, **LLAMA_LIKE}),
        "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}),
        "gptj": ("gptj", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 8}),
        "bert": ("bert", {**COMMON, "intermediate_size": 96, "is_decoder": True}),
        "gpt-neox": ("gpt_neox", {**COMMON, "intermediate_size": 96}),
        "opt": ("opt", {**COMMON, "ffn_dim": 96, "word_embed_proj_dim": 16}),
        "falcon": ("falcon", {**COMMON, "new_decoder_architecture": True, "num_kv_heads": 2}),
        "deepseek": ("deepseek_v3", {**COMMON, **DEEPSEEK}),
        "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    }.items()
}
"""configurations of causal language models by name"""


def causal_model(name: str, dtype: torch.dtype = torch.float32, **fields: Any) -> PreTrainedModel:
    """A random model; every parameter differs from the others and from what a constructor would leave in it."""
    config = CAUSAL[name]()
    for field, value in fields.items():
        setattr(config, field, value)
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
    return shaken(model)


def t5_model() -> PreTrainedModel:
    config = AutoConfig.for_model("t5", vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForSeq2SeqLM.from_config(config)  # type: ignore[no-untyped-call]
    return shaken(model)


def shaken(model: Model) -> Model:
    """The model, to be evaluated, with noise on every parameter: no two norms are the same ones and zeros."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.eval()
    return model


class Perceptrons(nn.Module):
    """A model that Transformers knows nothing of: an edge that runs as a whole, blocks, and a plain head."""

    def __init__(self) -> None:
        super().__init__()
        self.entry = Entry()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()) for _ in range(3))
        self.exit = nn.Linear(16, 4)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        hidden = self.entry(values)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: torch.Tensor = self.exit(hidden * self.scale)
        return logits


class Entry(nn.Module):
    """A parameter of its own beside a child's."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(8))
        self.project = nn.Linear(8, 16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.project(values + self.shift)
        return projected
