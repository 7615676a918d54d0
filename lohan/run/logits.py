"""Whether a model's loss can be computed in tiles of the vocabulary, and what it does to its logits before.

Found out by computing both from the same hidden states, once, at the start. The logits are stretched for it: a soft-cap does
nothing to the small logits of a model with random weights, and would be taken for none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Transform = Callable[[Tensor], Tensor]
"""what a model does to its logits: soft-cap, scale"""

SPREAD = 20.0
"""standard deviation of the logits during the comparison; soft-caps are at 30 and more"""
TOLERANCE = 2e-6
"""relative, between the model's own loss and the loss in tiles, in fp32"""


@dataclass(slots=True)
class HeadWatch:
    """What went into the head and came out of it, in one pass."""

    hidden: Tensor | None = None
    logits: Tensor | None = None


@contextmanager
def watching(head: nn.Module | None) -> Iterator[HeadWatch]:
    """Stretch the head's logits, and keep them."""
    watch = HeadWatch()

    def hook(module: nn.Module, args: tuple[Any, ...], logits: Tensor) -> Tensor:
        stretched = logits * (SPREAD / logits.detach().std())
        watch.hidden, watch.logits = args[0].detach(), stretched.detach()
        return stretched

    if head is None:
        yield watch
        return
    handle = head.register_forward_hook(hook)
    try:
        yield watch
    finally:
        handle.remove()


def find_transform(config: Any, watch: HeadWatch, output: Any, ids: Tensor) -> tuple[Transform | None, str]:
    """The change to the logits under which cross-entropy in tiles is the model's own loss; and what to say about it."""
    if watch.hidden is None or watch.logits is None or watch.hidden.shape[:-1] != ids.shape:
        return None, "the model's own loss, on all logits: it has no plain output projection over all tokens"
    if getattr(output, "aux_loss", None) is not None:
        return None, "the model's own loss, on all logits: it has an auxiliary loss"
    own = float(output.loss.detach())
    for name, transform in _transforms(config):
        logits = transform(watch.logits[:, :-1]).float()
        tiled = float(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        if math.isclose(tiled, own, rel_tol=TOLERANCE):
            return transform, f"cross-entropy in tiles of the vocabulary{name}: {tiled:.6f} on trial, the model's own {own:.6f}"
    return None, "the model's own loss, on all logits: it is not plain cross-entropy"


def _identity(logits: Tensor) -> Tensor:
    return logits


def _transforms(config: Any) -> Iterator[tuple[str, Transform]]:
    """What models are known to do to logits, by the names that Transformers gives it."""
    yield "", _identity
    if cap := getattr(config, "final_logit_softcapping", None):
        yield f", soft-capped at {cap}", lambda logits: torch.tanh(logits / cap) * cap
    for attribute in ("logit_scale", "lm_head_multiplier"):
        if factor := getattr(config, attribute, None):
            yield f", scaled by {factor}", lambda logits, factor=factor: logits * factor  # type: ignore[misc]
    if divisor := getattr(config, "logits_scaling", None):
        yield f", divided by {divisor}", lambda logits: logits / divisor
