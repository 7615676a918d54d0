"""What one pass on stand-in weights finds out about a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lohan.errors import ModelError
from lohan.model.shape import UnitKind
from lohan.model.units import discover
from lohan.run.batches import cut
from lohan.run.logits import find_transform, watching
from lohan.run.record import Recording, record, record_language_model
from lohan.run.stand_ins import stand_ins
from tests.tiny import Perceptrons, causal_model


def recorded(name: str, **fields: Any) -> Recording:
    model = causal_model(name, **fields)
    return record_language_model(model, discover(model))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral", "phi", "falcon"])
def test_sites_follow_the_forward(name: str) -> None:
    """Embeddings, blocks, norm, head; hidden states go from one to the next, in the shape of the batch."""
    recording = recorded(name)
    (one,) = cut({"input_ids": torch.zeros(5, 11, dtype=torch.long)}, 0, is_causal=True)
    inputs = recording.inputs_of(one)
    num_embeddings = 2 if name == "gpt2" else 1
    assert inputs[:num_embeddings] == [[]] * num_embeddings
    assert inputs[num_embeddings:] == [[(5, 11, 32)]] * (len(recording.sites) - num_embeddings)
    assert all(site.needs_backward for site in recording.sites)
    kinds = [site.kind for site in recording.sites]
    assert kinds[0] is UnitKind.EMBEDDING and kinds[-1] is UnitKind.HEAD and kinds[-2] is UnitKind.MODULE


def test_stand_ins_take_no_memory() -> None:
    """However large a matrix: they are windows of two buffers, and a stack of experts takes one expert of them."""
    for name in ("llama", "mixtral"):
        views = stand_ins(discover(causal_model(name)))
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage().nbytes() for view in views.values()}
        matrix = max(view[0].numel() if view.ndim == 3 else sum(view.shape) for view in views.values())
        assert len(storages) == 2 and sum(storages.values()) <= 2 * 4 * (matrix + 4)
        assert all(view.requires_grad and view.isfinite().all() for view in views.values())


@pytest.mark.parametrize(
    ("name", "fields", "note"),
    [
        ("llama", {}, "tiles of the vocabulary:"),
        ("gemma2", {}, "soft-capped at 30"),
        ("gemma2", {"final_logit_softcapping": 300.0}, "soft-capped at 300"),
        ("mixtral", {}, "tiles of the vocabulary:"),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 1e-9}, "auxiliary loss"),
    ],
)
def test_which_loss_is_computed(name: str, fields: dict[str, Any], note: str) -> None:
    recording = recorded(name, **fields)
    assert note in recording.loss_note
    assert (recording.transform is None) == ("own loss, on all" in recording.loss_note)


class _Output:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def test_a_loss_that_is_not_plain_stays_the_models_own() -> None:
    """By one part in a hundred thousand."""
    ids = torch.randint(0, 50, (3, 7))
    head = nn.Linear(8, 50)
    with watching(head) as watch:
        logits = head(torch.randn(3, 7, 8))
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    config = causal_model("llama").config
    assert find_transform(config, watch, _Output(loss), ids)[0] is not None
    assert find_transform(config, watch, _Output(loss * (1 + 1e-5)), ids)[0] is None
    assert find_transform(config, watch, _Output(loss), ids[:, 1:])[0] is None


# ---------------------------------------------------------------- other models


class Branches(nn.Module):
    """A trunk; a branch that leads nowhere; a frozen layer below everything that trains; and sums over rows and pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.trunk = nn.Linear(4, 6)
        self.nowhere = nn.Linear(6, 6)
        self.flat = nn.Linear(6, 5)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1  # type: ignore[operator]
        hidden = self.trunk(self.frozen(x))
        self.nowhere(hidden)
        result: Tensor = self.flat(hidden.flatten(0, 1)).sum()
        return result


def loss_of(model: nn.Module, one: Mapping[str, Any]) -> Tensor:
    loss: Tensor = model(one["x"])
    return loss


def rows_of(rows: int, length: int) -> dict[str, Tensor]:
    return {"x": torch.zeros(rows, length, 4)}


def recorded_branches(length: int = 5) -> tuple[Branches, Recording]:
    model = Branches()
    return model, record(model, discover(model), loss_of, rows_of(1, length), lambda tensor: tensor)


def test_gradients_flow_through_what_the_loss_depends_on() -> None:
    model, recording = recorded_branches()
    flows = {site.name: site.needs_backward for site in recording.sites}
    assert flows == {"frozen": False, "trunk": True, "nowhere": False, "flat": True}
    assert model.calls == 0  # buffers are copies during a recording
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_sizes_grow_with_the_rows() -> None:
    _, recording = recorded_branches()
    for rows, length in ((1, 5), (9, 5), (9, 4)):
        (one,) = cut(rows_of(rows, length), 0, is_causal=False)
        assert recording.covers(one)
        assert recording.inputs_of(one) == [[], [], [], [(rows * 5, 6)]]


def test_larger_rows_are_recorded_again() -> None:
    model, recording = recorded_branches()
    (longer,) = cut(rows_of(2, 8), 0, is_causal=False)
    assert not recording.covers(longer)
    recording.add(record(model, discover(model), loss_of, longer.inputs, lambda tensor: tensor))
    assert recording.inputs_of(longer)[-1] == [(16, 6)]
    (wider,) = cut({**rows_of(2, 5), "more": torch.zeros(2)}, 0, is_causal=False)
    assert not recording.covers(wider)


def test_another_way_through_the_model_is_refused() -> None:
    model, recording = recorded_branches()

    def without_branch(module: nn.Module, one: Mapping[str, Any]) -> Tensor:
        loss: Tensor = model.flat(model.trunk(one["x"])).sum()
        return loss

    other = record(model, discover(model), without_branch, rows_of(1, 9), lambda tensor: tensor)
    with pytest.raises(ModelError, match="another way .* expected .*'frozen'"):
        recording.add(other)


def test_the_loss_function_is_called_in_fp32() -> None:
    seen = []

    def loss_fn(model: nn.Module, one: Mapping[str, Any]) -> Tensor:
        seen.append((one["values"].dtype, one["values"].shape[0], one["scale"]))
        loss: Tensor = model(one["values"]).sum()
        return loss

    model = Perceptrons()
    record(model, discover(model), loss_fn, {"values": torch.zeros(1, 8).bfloat16(), "scale": 2.0}, lambda tensor: tensor)
    assert seen == [(torch.float32, 2, 2.0), (torch.float32, 3, 2.0)]
