"""The order in which a model's forward enters its sites, recorded once, before any weight is read.

The unmodified model runs on the CPU, in fp32, on a few tokens, with stand-in weights: windows of one small random buffer, so that
a model of any size takes next to no memory. What comes out:

- the order of the sites, and which of their inputs want a gradient, by shape;
- whether the loss in tiles is the model's own: both are computed from the same hidden states and compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils import _pytree as pytree

from lohan.errors import ModelError
from lohan.model.shape import SiteShape, UnitKind
from lohan.model.units import ModelMap
from lohan.run.edges import Transform
from lohan.run.weights import bound

ROWS, LENGTH = 3, 7
"""of the recorded batch: primes, so that a dimension of an input tells whether it counts rows, tokens or both"""
TOLERANCE = 1e-4
"""relative, between the model's own loss and the loss in tiles, in fp32"""


@dataclass(frozen=True, slots=True)
class InputShape:
    """An input that wants a gradient, with the batch's rows and length left open."""

    dims: tuple[int | str, ...]

    def shape(self, rows: int, length: int) -> tuple[int, ...]:
        known = {"rows": rows, "length": length, "tokens": rows * length}
        return tuple(known[d] if isinstance(d, str) else d for d in self.dims)


@dataclass(slots=True)
class Recording:
    """What one pass through the model showed."""

    order: list[int] = field(default_factory=list)
    """site numbers of the model map"""
    inputs: list[list[InputShape]] = field(default_factory=list)
    """of each site in `order`"""
    sites: tuple[SiteShape, ...] = ()
    transform: Transform | None = None
    """what the model does to its logits, if the loss in tiles is its own loss"""
    loss_note: str = ""
    """which loss is used, and why"""


def stand_ins(model_map: ModelMap) -> dict[str, Tensor]:
    """A weight for every parameter of the units: overlapping windows of one buffer, around 1 for vectors."""
    tensors = {t.name: t for unit in model_map.units for t in unit.shape.tensors}
    whole = {name: tuple(_whole_shape(model_map, name)) for name in tensors}
    strides = {name: _window_strides(shape) for name, shape in whole.items()}
    longest = max(1 + sum((n - 1) * s for n, s in zip(whole[name], strides[name], strict=True)) for name in tensors)
    noise = torch.randn(longest, generator=torch.Generator().manual_seed(0)) * 0.05
    views = {}
    for name, shape in whole.items():
        buffer = noise if len(shape) > 1 else noise + 1.0
        views[name] = buffer.as_strided(shape, strides[name]).requires_grad_(tensors[name].trainable)
    return views


def _window_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Neighbours overlap in all but one element. A stack of matrices overlaps matrix by matrix: kernels that take a stack
    (grouped experts) want rows that do not."""
    return (1,) * len(shape) if len(shape) < 3 else (*(1 for _ in shape[:-2]), shape[-1], 1)


def _whole_shape(model_map: ModelMap, name: str) -> Sequence[int]:
    pieces = [t for unit in model_map.units for t in unit.shape.tensors if t.name == name]
    shape = pieces[0].shape
    return (sum(p.shape[0] for p in pieces), *shape[1:]) if shape else shape


@contextmanager
def standing_in(model_map: ModelMap) -> Iterator[None]:
    """All parameters of the model are stand-ins."""
    weights = stand_ins(model_map)
    seen: set[tuple[int, str]] = set()
    pairs = []
    for unit in model_map.units:
        for binding in unit.bindings:
            if (key := (id(binding.module), binding.attribute)) not in seen:
                seen.add(key)
                pairs.append((binding, weights[binding.tensor.name]))
    with bound(pairs):
        yield


def record(model: nn.Module, model_map: ModelMap, call: Callable[[], Any], *, is_symbolic: bool) -> Recording:
    """Run `call`, which runs the model once; `is_symbolic` if its batch is ROWS x LENGTH."""
    recording = Recording()

    def enter(site: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if site in recording.order:
                raise ModelError(f"{model_map.sites[site].name} runs twice in one forward: lohan moves each unit once per pass")
            wanting = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.requires_grad]
            recording.order.append(site)
            recording.inputs.append([_input_shape(t, is_symbolic) for t in wanting])

        return hook

    with ExitStack() as stack:
        stack.enter_context(standing_in(model_map))
        for site in model_map.sites:
            stack.callback(site.module.register_forward_pre_hook(enter(site.index), with_kwargs=True).remove)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        call()
    recording.sites = _site_shapes(model_map, recording)
    return recording


def _input_shape(tensor: Tensor, is_symbolic: bool) -> InputShape:
    names = {ROWS: "rows", LENGTH: "length", ROWS * LENGTH: "tokens"} if is_symbolic else {}
    return InputShape(tuple(names.get(size, size) for size in tensor.shape))


def _site_shapes(model_map: ModelMap, recording: Recording) -> tuple[SiteShape, ...]:
    """Gradients flow through a site that holds something trainable or gets an input that wants a gradient."""
    shapes = []
    for number, inputs in zip(recording.order, recording.inputs, strict=True):
        site = model_map.sites[number]
        trains = any(model_map.units[unit].shape.trainable_elements for unit in site.units)
        shapes.append(SiteShape(site.name, site.kind, site.units, needs_backward=trains or bool(inputs)))
    return tuple(shapes)


def record_language_model(model: nn.Module, model_map: ModelMap) -> Recording:
    """Record a causal language model from Transformers, and find out whether its loss can be computed in tiles."""
    config: Any = model.config
    text = config.get_text_config()
    ids = torch.randint(0, text.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    captured: dict[str, Any] = {}

    def call() -> None:
        head = next((s.module for s in model_map.sites if s.kind is UnitKind.HEAD), None)
        with ExitStack() as stack:
            if head is not None:
                hook = head.register_forward_hook(
                    lambda m, args, out: captured.update(hidden=args[0].detach(), logits=out.detach())
                )
                stack.callback(hook.remove)
            captured["loss"] = model(input_ids=ids, labels=ids, use_cache=False).loss.detach()

    was_training = model.training
    model.eval()
    try:
        recording = record(model, model_map, call, is_symbolic=True)
    finally:
        model.train(was_training)
    recording.transform, recording.loss_note = _find_transform(text, captured, ids)
    return recording


def _find_transform(config: Any, captured: Mapping[str, Any], ids: Tensor) -> tuple[Transform | None, str]:
    """The change to the logits under which cross-entropy in tiles is the model's own loss."""
    if "logits" not in captured or captured["hidden"].shape[:-1] != ids.shape:
        return None, "the model's own loss, on all logits: it has no plain output projection over all tokens"
    own = float(captured["loss"])
    for name, transform in _transforms(config):
        logits = transform(captured["logits"][:, :-1]).float()
        tiled = float(functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        if math.isclose(tiled, own, rel_tol=TOLERANCE):
            return (
                transform,
                f"cross-entropy in tiles of the vocabulary{name}: {tiled:.6f} at the start, the model's own {own:.6f}",
            )
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
