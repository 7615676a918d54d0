"""Training as lohan's documentation fixes it, written down plainly: the whole model in memory, one slice after the other.

It shares with the engine how a model is cut into units (the order of the norm's sums), the seeds' formula, the readable
optimizer and the processor's way of bf16 products, and nothing else: no schedule, no slot, no recomputation, no thread.

    slices     rows of each micro-batch, in order; the loss is summed over tokens and divided by the targets of the whole step
    seeds      keyed by (seed, step, slice, place); a place is a module in the order of the forward, or the gap behind it
    gradients  of each module, in fp32 over the slices, rounded once; tied weights: the next module adds to what was rounded
    norm       fp64, tensor by tensor in the layout of the units
    weights    the fp32 master, rounded half up
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lohan.config import keyed_seed
from lohan.device.products import products
from lohan.model.units import discover
from lohan.optim.base import Optimizer, Part
from lohan.optim.norm import clip_coefficient
from lohan.optim.reference import join, split, sum_of_squares

GAP = 1 << 20
"""from a module's place to that of the gap behind it"""


class Reference:
    """A causal language model with its fp32 masters and optimizer state."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        dtype: torch.dtype,
        max_grad_norm: float | None,
        loss_tile: int,
        slice_rows: int = 0,
        seed: int = 0,
    ) -> None:
        self.model, self.optimizer, self.dtype = model.train(), optimizer, dtype
        self.max_grad_norm, self.loss_tile, self.slice_rows, self.seed = max_grad_norm, loss_tile, slice_rows, seed
        self.map = discover(model)
        pieces = self.map.pieces()
        self.frozen = {name for name, parts in pieces.items() if not parts[0][1].trainable}
        parameters = {name: p.detach() for name, p in model.named_parameters() if name in pieces}
        self.masters = {n: (p.to(dtype) if n in self.frozen else p).float().clone() for n, p in parameters.items()}
        self.state = {n: [torch.zeros_like(m).view(-1) for _ in optimizer.planes] for n, m in self.masters.items()}
        self.step_number = self.slice_index = self.place = 0
        self.order: list[int] = []
        self.leaves = self._untie()
        self._write_weights()
        for site in self.map.sites:
            site.module.register_forward_pre_hook(self._enter(site.index))
            site.module.register_forward_hook(self._leave)

    def _untie(self) -> dict[tuple[int, str], nn.Parameter]:
        """A parameter of its own for every module that holds it, by (site, name): tied weights have gradients of their own."""
        leaves: dict[tuple[int, str], nn.Parameter] = {}
        for unit in self.map.units:
            for binding in unit.bindings:
                key = binding.site, binding.tensor.name
                if key not in leaves:
                    empty = torch.empty(self.masters[key[1]].shape, dtype=self.dtype)
                    leaves[key] = nn.Parameter(empty, requires_grad=key[1] not in self.frozen)
                binding.module._parameters[binding.attribute] = leaves[key]
        return leaves

    def _write_weights(self) -> None:
        for (_, name), leaf in self.leaves.items():
            weight = self.masters[name]
            if self.dtype == torch.bfloat16:
                weight = ((weight.view(torch.int32) + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
            leaf.data.copy_(weight)

    # ---------------------------------------------------------------- one step

    def step(self, batches: Sequence[Mapping[str, Any]], lr: float | None = None) -> tuple[float, float]:
        """Loss and norm; weights change unless one of them is not finite."""
        with products():
            return self._step(batches, lr)

    def _step(self, batches: Sequence[Mapping[str, Any]], lr: float | None) -> tuple[float, float]:
        slices = list(self._slices(batches))
        num_targets = sum(int((_targets(one) >= 0).sum()) for one in slices)
        parts: dict[tuple[int, str], list[Tensor]] = {key: [] for key in self.leaves}
        losses = []
        for self.slice_index, one in enumerate(slices):
            losses.append(self._slice(one, 1.0 / num_targets))
            for key, leaf in self.leaves.items():
                if leaf.grad is not None:
                    parts[key].append(leaf.grad)
                    leaf.grad = None
        gradients = self._round(parts)
        loss, norm = sum(losses), self._norm(gradients)
        if all(map(torch.isfinite, torch.tensor([loss, norm]))):
            self._update(gradients, clip_coefficient(norm, self.max_grad_norm), self.optimizer.lr if lr is None else lr)
        return loss, norm

    def _slices(self, batches: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for batch in batches:
            rows = len(batch["input_ids"])
            for first in range(0, rows, self.slice_rows or rows):
                yield {name: value[first : first + (self.slice_rows or rows)] for name, value in batch.items()}

    def _slice(self, one: dict[str, Any], scale: float) -> float:
        """Forward and backward of one slice; returns its share of the loss."""
        self.order = []
        torch.manual_seed(self._seed(GAP - 1))
        inputs = {n: v for n, v in one.items() if n != "labels" and not (n == "attention_mask" and v.all())}
        hidden: Tensor = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        targets = _targets(one)
        tokens = hidden.flatten(0, 1)[targets >= 0]
        site = next(s for s in self.map.sites if s.module is self.model.get_output_embeddings())
        self.order.append(site.index)
        loss, slope = self._head(site.index, tokens.detach(), targets[targets >= 0], scale)
        if tokens.requires_grad:
            tokens.backward(slope)
        return loss

    def _head(self, site: int, tokens: Tensor, targets: Tensor, scale: float) -> tuple[float, Tensor]:
        """Cross-entropy in tiles: its value, and its slope at the hidden states; the weights' gradients stay in the leaves."""
        tiles = list(self._tiles(site))
        largest = torch.full(targets.shape, -torch.inf)
        total, picked = torch.zeros(targets.shape), torch.zeros(targets.shape)
        for rows in tiles:
            logits = self._logits(site, rows, tokens).detach()
            grown = torch.maximum(largest, logits.amax(-1))
            total = total * torch.exp(largest - grown) + torch.exp(logits - grown[:, None]).sum(-1)
            largest = grown
            inside = (targets >= rows.start) & (targets < rows.stop)
            picked[inside] = logits[inside, targets[inside] - rows.start]
        log_total = largest + torch.log(total)
        slope = torch.zeros(tokens.shape)
        for rows in reversed(tiles):
            leaf = tokens.detach().requires_grad_()
            logits = self._logits(site, rows, leaf)
            softmax = torch.exp(logits.detach() - log_total[:, None])
            inside = (targets >= rows.start) & (targets < rows.stop)
            softmax[inside, targets[inside] - rows.start] -= 1.0
            logits.backward(softmax * scale)
            assert leaf.grad is not None
            slope += leaf.grad.float()
        return float((log_total - picked).sum() * scale), slope.to(self.dtype)

    def _tiles(self, site: int) -> Iterator[slice]:
        """Of each piece of the head, `loss_tile` rows at a time."""
        for unit in self.map.sites[site].units:
            piece = self.map.units[unit].shape.tensors[0]
            stop = piece.first_row + piece.shape[0]
            for first in range(piece.first_row, stop, self.loss_tile):
                yield slice(first, min(first + self.loss_tile, stop))

    def _logits(self, site: int, rows: slice, tokens: Tensor) -> Tensor:
        head = self.map.sites[site].module
        bias = head.bias[rows] if head.bias is not None else None
        logits = nn.functional.linear(tokens, head.weight[rows], bias)
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return (torch.tanh(logits / cap) * cap if cap else logits).float()

    # ---------------------------------------------------------------- random numbers

    def _seed(self, place: int) -> int:
        return keyed_seed(self.seed, self.step_number, self.slice_index, place)

    def _enter(self, site: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            torch.manual_seed(self._seed(len(self.order)))
            self.order.append(site)

        return hook

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        torch.manual_seed(self._seed(len(self.order) - 1 + GAP))

    # ---------------------------------------------------------------- gradients, norm, update

    def _round(self, parts: Mapping[tuple[int, str], Sequence[Tensor]]) -> dict[str, Tensor]:
        """Module by module from the end; the slices' gradients are added to what a module before has rounded."""
        gradients: dict[str, Tensor] = {}
        for site in reversed(self.order):
            for (place, name), slices in parts.items():
                if place == site and slices:
                    total = gradients[name].float() if name in gradients else torch.zeros(slices[0].shape)
                    for gradient in slices:
                        total += gradient
                    gradients[name] = total.to(self.dtype)
        return gradients

    def _norm(self, gradients: Mapping[str, Tensor]) -> float:
        total = 0.0
        for unit in self.map.units:
            sums = 0.0
            for tensor in unit.shape.tensors:
                if tensor.name in gradients:
                    rows = gradients[tensor.name]
                    rows = rows[tensor.first_row : tensor.first_row + tensor.shape[0]] if rows.ndim else rows
                    sums += sum_of_squares(rows.reshape(-1))
            total += sums
        return total**0.5

    def _update(self, gradients: Mapping[str, Tensor], clip: float, lr: float) -> None:
        self.step_number += 1
        decay = {tensor.name for unit in self.map.units for tensor in unit.shape.tensors if tensor.decay}
        for name, gradient in gradients.items():
            master = weight = self.masters[name].view(-1)
            rest = None
            if self.dtype == torch.bfloat16:
                weight, rest = torch.empty_like(master, dtype=self.dtype), torch.empty_like(master, dtype=torch.int16)
                split(master, weight, rest)
            whole = Part(0, len(weight), self.optimizer.weight_decay if name in decay else 0.0)
            settings = {"step": self.step_number, "lr": lr, "clip": clip}
            self.optimizer.update(weight, rest, gradient.view(-1), self.state[name], parts=[whole], **settings)
            if rest is not None:
                join(weight, rest, master)
        self._write_weights()


def _targets(one: Mapping[str, Any]) -> Tensor:
    """Of every token of a slice, the token that follows; -100 where none is wanted."""
    return nn.functional.pad(one["labels"], (0, 1), value=-100)[:, 1:].flatten()
