"""The order in which a model's forward enters its sites, recorded once, before any weight is read.

The unmodified model runs on the CPU, in fp32, on a few rows, with stand-ins for its weights. What comes out:

- the order of the sites, and which of them gradients flow through;
- which of their inputs want a gradient, and how their sizes grow with the batch;
- for a causal language model, whether the loss in tiles is its own loss.

A language model is recorded once, with a batch whose rows and length can be told apart in any shape. For another model with a
`loss_fn` nothing is known of its batches: it is recorded with two numbers of rows of the first one, and again when a batch
comes whose rows are larger than any before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from lohan.errors import ModelError
from lohan.model.shape import SiteShape, UnitKind
from lohan.model.units import ModelMap
from lohan.run.batches import HostSlice
from lohan.run.caches import refuse_cache, without_cache
from lohan.run.logits import Transform, find_transform, watching
from lohan.run.stand_ins import standing_in

ROWS, LENGTH = 3, 7
"""of a language model's recorded batch: primes, so that a dimension of an input tells whether it counts rows, tokens or both"""
FEW_ROWS = 2, 3
"""of other models' recorded batches: more than one, as some modules refuse a single row"""

Fetch = Callable[[Tensor], Tensor]
"""brings a tensor from the device to the host"""
Signature = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
"""of a batch: its tensors' dtypes, and shapes but for the rows"""


@dataclass(frozen=True, slots=True)
class Dimension:
    """A size that depends on the batch: the sum of these, each times what it counts."""

    constant: int = 0
    rows: int = 0
    length: int = 0
    tokens: int = 0

    def size(self, rows: int, length: int) -> int:
        return self.constant + self.rows * rows + self.length * length + self.tokens * rows * length


InputShape = tuple[Dimension, ...]
"""of an input that wants a gradient"""


@dataclass(slots=True)
class Recording:
    """What passes through the model showed."""

    sites: tuple[SiteShape, ...]
    order: list[int]
    """site numbers of the model map"""
    outputs: list[list[bool]]
    """of each site in `order`, for each tensor that it returns, whether it wants a gradient"""
    inputs: list[tuple[Signature, list[list[InputShape]]]]
    """for batches of such rows, or smaller ones: the inputs of each site in `order`"""
    transform: Transform | None = None
    """what the model does to its logits, if the loss in tiles is its own loss"""
    loss_note: str = "the loss function that was passed in"
    """which loss is used, and why"""

    def inputs_of(self, one: HostSlice) -> list[list[tuple[int, ...]]]:
        """The shapes of each site's inputs that want a gradient, for a slice like one that was recorded."""
        inputs = self._find(one)
        assert inputs is not None, "a slice is recorded before it is planned for"
        return [[tuple(d.size(*one.shape) for d in shape) for shape in shapes] for shapes in inputs]

    def covers(self, one: HostSlice) -> bool:
        return self._find(one) is not None

    def _find(self, one: HostSlice) -> list[list[InputShape]] | None:
        signature = _signature(one.inputs)
        return next((inputs for known, inputs in self.inputs if _covers(known, signature)), None)

    def add(self, other: Recording) -> None:
        """Take in what the same model showed for larger rows."""
        if (self.sites, self.order, self.outputs) != (other.sites, other.order, other.outputs):
            before, now = ([site.name for site in recording.sites] for recording in (self, other))
            raise ModelError(f"the model's forward takes another way for another batch: expected {before}, got {now}")
        self.inputs += other.inputs


def _signature(batch: Mapping[str, Any]) -> Signature:
    return {n: (v.dtype, tuple(v.shape[1:])) for n, v in batch.items() if isinstance(v, Tensor)}


def _covers(known: Signature, signature: Signature) -> bool:
    """Whether every tensor was recorded with rows at least as large. Nothing known of a batch covers all."""
    if not known:
        return True
    if known.keys() != signature.keys():
        return False
    pairs = [(known[name], signature[name]) for name in known]
    alike = all(a[0] == b[0] and len(a[1]) == len(b[1]) for a, b in pairs)
    return alike and all(x >= y for a, b in pairs for x, y in zip(a[1], b[1], strict=True))


def record_language_model(model: nn.Module, model_map: ModelMap) -> Recording:
    """Record a causal language model from Transformers, and find out whether its loss can be computed in tiles."""
    config: Any = model.config
    text = config.get_text_config()
    ids = torch.randint(0, text.vocab_size, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    known = {ROWS: Dimension(rows=1), LENGTH: Dimension(length=1), ROWS * LENGTH: Dimension(tokens=1)}
    head = next((s.module for s in model_map.sites if s.kind is UnitKind.HEAD), None)
    was_training = model.training
    model.eval()
    try:
        with watching(head) as watch, _pass_of(model, model_map, _stays) as seen:
            output = model(input_ids=ids, labels=ids)
            sites = _site_shapes(model_map, seen, output.loss)
    finally:
        model.train(was_training)
    inputs = [[tuple(known.get(n, Dimension(n)) for n in shape) for shape in shapes] for shapes in seen.inputs]
    return Recording(sites, seen.order, seen.outputs, [({}, inputs)], *find_transform(text, watch, output, ids))


def record(
    model: nn.Module,
    model_map: ModelMap,
    loss_fn: Callable[[nn.Module, Mapping[str, Any]], Tensor],
    batch: Mapping[str, Any],
    fetch: Fetch,
) -> Recording:
    """Record any model with a loss function, on rows like those of a batch."""
    passes = []
    for num_rows in FEW_ROWS:
        with _pass_of(model, model_map, fetch) as seen:
            loss = loss_fn(model, {name: _rows(value, num_rows) for name, value in batch.items()})
            passes.append((seen, _site_shapes(model_map, seen, loss)))
    (few, sites), (more, _) = passes
    if few.order != more.order:
        raise ModelError(f"the model's forward takes another way for {FEW_ROWS[1]} rows than for {FEW_ROWS[0]}")
    inputs = [
        [_grow(shape, other) for shape, other in zip(shapes, others, strict=True)]
        for shapes, others in zip(few.inputs, more.inputs, strict=True)
    ]
    return Recording(sites, few.order, few.outputs, [(_signature(batch), inputs)])


def _rows(value: Any, num: int) -> Any:
    """So many rows of a batch's tensor, in fp32 as everything is during a recording."""
    if not isinstance(value, Tensor):
        return value
    value = value.float() if value.is_floating_point() else value
    return value[torch.arange(num) % value.shape[0]] if value.ndim else value


def _grow(few: tuple[int, ...], more: tuple[int, ...]) -> InputShape:
    """How sizes grow from FEW_ROWS[0] rows to one more."""
    slopes = [b - a for a, b in zip(few, more, strict=True)]
    return tuple(Dimension(a - FEW_ROWS[0] * slope, rows=slope) for a, slope in zip(few, slopes, strict=True))


def _stays(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(slots=True)
class _Seen:
    """One pass: the sites in order, their inputs and outputs that want a gradient, and the graph nodes of these."""

    order: list[int] = field(default_factory=list)
    inputs: list[list[tuple[int, ...]]] = field(default_factory=list)
    outputs: list[list[bool]] = field(default_factory=list)
    nodes: list[list[Any]] = field(default_factory=list)


@contextmanager
def _pass_of(model: nn.Module, model_map: ModelMap, fetch: Fetch) -> Iterator[_Seen]:
    """Whatever runs the model inside, once, runs it on stand-ins and is seen."""
    seen = _Seen()

    def enter(site: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if site in seen.order:
                raise ModelError(f"{model_map.sites[site].name} runs twice in one forward: lohan moves each unit once per pass")
            refuse_cache(model_map.sites[site].name, (args, kwargs))
            seen.order.append(site)
            seen.inputs.append([tuple(t.shape) for t in _wanting(model_map.sites[site].name, (args, kwargs))])

        return hook

    def leave(site: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            seen.nodes.append([t.grad_fn for t in _wanting(model_map.sites[site].name, output)])
            seen.outputs.append([t.requires_grad for t in pytree.tree_leaves(output) if isinstance(t, Tensor)])

        return hook

    with ExitStack() as stack:
        # Nobody goes back through this graph: without this it would keep a copy of every weight.
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing))
        stack.enter_context(standing_in(model, model_map, fetch))
        stack.enter_context(without_cache(model))
        for site in model_map.sites:
            stack.callback(site.module.register_forward_pre_hook(enter(site.index), with_kwargs=True).remove)
            stack.callback(site.module.register_forward_hook(leave(site.index)).remove)
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.enable_grad())
        yield seen


def _wanting(name: str, values: Any) -> list[Tensor]:
    """The tensors that want a gradient; none may be out of sight."""
    leaves = pytree.tree_leaves(values)
    for leaf in leaves:
        inside = vars(leaf).values() if hasattr(leaf, "__dict__") and not isinstance(leaf, Tensor | nn.Module) else ()
        if any(isinstance(value, Tensor) and value.requires_grad for value in inside):
            raise ModelError(
                f"{name} passes tensors that want a gradient inside a {type(leaf).__name__}, where lohan does not find them. "
                "Use a tuple, list or dict, or register the type with torch.utils._pytree.register_pytree_node"
            )
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def _site_shapes(model_map: ModelMap, seen: _Seen, loss: Any) -> tuple[SiteShape, ...]:
    """Gradients flow through a site if the loss depends on its outputs, and these on something trainable."""
    reached = _graph(loss.grad_fn) if isinstance(loss, Tensor) else set()
    shapes = []
    for position, number in enumerate(seen.order):
        site = model_map.sites[number]
        flows = any(node in reached for node in seen.nodes[position])
        if not flows:
            seen.inputs[position] = []
        shapes.append(SiteShape(site.name, site.kind, site.units, needs_backward=flows))
    return tuple(shapes)


def _graph(root: Any) -> set[Any]:
    """All nodes of the graph below one."""
    found: set[Any] = set()
    ahead = [root]
    while ahead:
        node = ahead.pop()
        if node is not None and node not in found:
            found.add(node)
            ahead += [below for below, _ in node.next_functions]
    return found
