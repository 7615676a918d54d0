"""Whether data, tokenizer and model fit each other. Every check takes a moment, and says what to do."""

from __future__ import annotations

import ast
import inspect
import sys
from types import ModuleType
from typing import Any

from lohan.data.dataset import TokenDataset
from lohan.errors import OptionError

_ATTENTION = {"eager", "sdpa", "flex_attention"}
"""implementations that tell packed examples apart by a mask made from positions, in any number of rows"""
_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


def check_vocabulary(tokenizer: Any, vocab_size: int, dataset: TokenDataset | None = None) -> None:
    """Refuse tokens that the model has no row for: those of the tokenizer's own vocabulary, or those that the data have.

    Tokens that were added to a tokenizer and do not occur are no mistake: some models come with a sister's tokenizer.
    """
    if tokenizer.vocab_size > vocab_size:
        reason = f"its vocabulary has {tokenizer.vocab_size} tokens, the model's {vocab_size}"
        raise OptionError(
            "model_name_or_path", tokenizer.name_or_path, reason, "Use the tokenizer that the model was trained with"
        )
    if dataset is not None and dataset.counts.largest_token >= vocab_size:
        reason = f"token {dataset.counts.largest_token} occurs in the data, and the model has only {vocab_size}"
        raise OptionError("dataset_name", str(dataset.folder), reason, "Use the tokenizer that the model was trained with")


def padding_token(tokenizer: Any, vocab_size: int) -> int:
    """What fills rows up. It is masked everywhere, so any token that the model has will do."""
    wanted = (tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    return next(token for token in wanted if token is not None and token < vocab_size)


def check_packing(model: Any) -> None:
    """Refuse a model in which packed examples would see each other, or of which that is not known. Reads the model's source."""
    config = model.config.get_text_config()
    attention = getattr(config, "_attn_implementation", None)
    layers = set(getattr(config, "layer_types", None) or _LAYERS)
    if "position_ids" not in inspect.signature(model.forward).parameters:
        _refuse(model, "takes no position_ids, which say where an example begins")
    if not _masks_by_position(sys.modules[type(model).__module__]):
        _refuse(model, "does not make its attention mask from position_ids")
    if attention not in _ATTENTION:
        _refuse(model, f"uses the attention {attention!r}")
    if getattr(model, "_is_stateful", False) or not layers <= _LAYERS:
        _refuse(model, "has layers that carry a state from one example to the next")


def _masks_by_position(module: ModuleType) -> bool:
    """Whether a module of Transformers gives positions wherever it has a causal mask made; calls are known by arguments."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except OSError:
        return False
    calls = [{word.arg for word in node.keywords} for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_causal(node)]
    dicts = [{getattr(key, "value", None) for key in node.keys} for node in ast.walk(tree) if isinstance(node, ast.Dict)]
    made = [names for names in (*calls, *dicts) if names >= {"config", "inputs_embeds", "attention_mask"}]
    return bool(made) and all("position_ids" in names for names in made)


def _is_causal(call: ast.Call) -> bool:
    return "bidirectional" not in getattr(call.func, "id", "")


def _refuse(model: Any, reason: str) -> None:
    remedy = "Leave it out; group_by_length also saves padding"
    raise OptionError("packing", True, f"{type(model).__name__} {reason}, so packed examples could see each other", remedy)
