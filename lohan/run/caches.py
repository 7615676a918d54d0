"""Training knows no caches of keys and values: a unit that runs twice on one batch would find its own keys there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils import _pytree as pytree
from transformers import Cache

from lohan.errors import ModelError


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """Models from Transformers make no cache by default."""
    configs: list[Any] = [getattr(module, "config", None) for module in model.modules()]
    caching = list({id(config): config for config in configs if getattr(config, "use_cache", False)}.values())
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


def refuse_cache(name: str, values: Any) -> None:
    """ModelError if a site is given one all the same."""
    if any(isinstance(leaf, Cache) for leaf in pytree.tree_leaves(values, is_leaf=lambda value: isinstance(value, Cache))):
        raise ModelError(f"{name} is given a cache of keys and values. Call the model with use_cache=False in loss_fn")
