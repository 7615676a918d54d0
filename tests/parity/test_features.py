"""What people do with language models beyond the plain case, bit for bit: against the reference where it covers the case, and
with everything on the SSD against everything in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lohan import SGD, AdamW
from lohan.device.emulated import EmulatedDevice
from lohan.errors import ModelError, OptionError
from tests.parity.harness import (
    OPTIMIZER,
    TILE,
    Batch,
    Outcome,
    assert_close,
    batch,
    groups_of,
    masters_of,
    open_engine,
    outcome_of,
    steps,
    stock,
    tiny_model,
    train,
)
from tests.parity.reference import Reference

Data = Sequence[Sequence[Batch]]
Make = Callable[[], PreTrainedModel]
LIMIT = 2.05


def referred(make: Make, data: Data, lr: Sequence[float] | None = None, **options: Any) -> Outcome:
    """What the reference makes of it, in bf16."""
    optimizer = options.pop("optimizer", AdamW(OPTIMIZER.lr, weight_decay=0.1, kernel="reference"))
    reference = Reference(make(), optimizer, dtype=torch.bfloat16, max_grad_norm=LIMIT, loss_tile=TILE, seed=3, **options)
    results = [reference.step(one, None if lr is None else lr[i]) for i, one in enumerate(data)]
    norms = [norm for _, norm in results]
    return Outcome([loss for loss, _ in results], norms, [norm > LIMIT for norm in norms], reference.masters)


def everywhere(make: Make, data: Data, **options: Any) -> Outcome:
    """In memory, on the SSD, and on the SSD with a device that runs behind: the same."""
    settings: dict[str, Any] = {"max_grad_norm": LIMIT, **options}
    with open_engine(make(), placement="memory", **settings) as engine:
        expected = train(engine, data)
    for device in ("cpu", EmulatedDevice(64 * 2**20, jitter_s=0.0005)):
        with open_engine(make(), device=device, **settings) as engine:
            assert engine.uses_ssd
            train(engine, data).assert_same(expected)
    return expected


# ---------------------------------------------------------------- frozen parameters


def frozen(*names: str) -> Make:
    """A Llama with everything below these names frozen."""

    def make() -> PreTrainedModel:
        model = tiny_model("llama")
        for name, parameter in model.named_parameters():
            if name.startswith(names):
                parameter.requires_grad_(False)
        return model

    return make


BLOCK = "model.layers.1."
FROZEN = {
    "embedding": ["model.embed_tokens"],
    "bottom": ["model.embed_tokens", "model.layers.0."],
    "top": ["lm_head", "model.norm", BLOCK],
    "tensors": [BLOCK + "mlp.up_proj", BLOCK + "input_layernorm", "model.layers.0.self_attn.q_proj"],
    "all but one block": ["model.embed_tokens", "model.layers.0.", "model.norm", "lm_head"],
}


@pytest.mark.parametrize("names", FROZEN.values(), ids=FROZEN)
def test_what_is_frozen_stays(names: list[str]) -> None:
    make, data = frozen(*names), steps(4)
    outcome = everywhere(make, data)
    outcome.assert_same(referred(make, data))
    for name, began in masters_of(make()).items():
        if name.startswith(tuple(names)):
            assert torch.equal(outcome.masters[name], began.bfloat16().float())
        else:
            assert not torch.equal(outcome.masters[name], began)


def test_nothing_to_train_is_refused_and_can_be_evaluated() -> None:
    with open_engine(frozen("model", "lm_head")()) as engine:
        assert engine.evaluate(batch(2, 5, 1)) > 0
        with pytest.raises(ModelError, match="nothing to train"):
            engine.step(batch(2, 5, 1))


# ---------------------------------------------------------------- what a batch may hold


def padded(rows: int, length: int, seed: int) -> Batch:
    """Rows of unequal length, padded on the left, where it matters to a causal model."""
    one = batch(rows, length, seed)
    mask = (torch.arange(length) >= torch.arange(0, 2 * rows, 2)[:, None]).long()
    return {**one, "attention_mask": mask, "labels": one["labels"].masked_fill(mask == 0, -100)}


def positioned(rows: int, length: int, seed: int) -> Batch:
    return {**batch(rows, length, seed), "position_ids": torch.arange(length).flip(0).repeat(rows, 1)}


GROWING = [
    [batch(1, 5, 1)],
    [batch(1, 5, 1), batch(2, 5, 1)],
    [batch(3, 5, 1), batch(2, 15, 1)],
    [batch(1, 4, 2)],
    [batch(1, 9, 3), batch(1, 8, 4), batch(2, 7, 5)],
]


@pytest.mark.parametrize(
    ("architecture", "data"),
    [
        ("llama", [[padded(3, 10, 1), batch(1, 8, 2)]] * 3),
        ("gpt2", [[padded(3, 10, 1), padded(2, 12, 2)]] * 3),
        ("llama", [[positioned(3, 10, 1)]] * 3),
        ("gpt2", GROWING),
        ("llama-tied", GROWING),
        ("gemma2", steps(4)),
    ],
    ids=["padding", "padding-dropout", "positions", "growing-dropout", "growing-tied", "soft-cap"],
)
def test_batches_and_architectures(architecture: str, data: Data) -> None:
    def make() -> PreTrainedModel:
        return tiny_model(architecture)

    everywhere(make, data).assert_same(referred(make, data))


def test_attention_mask_matters() -> None:
    one = padded(3, 10, 1)
    with open_engine(tiny_model("llama")) as engine:
        assert engine.evaluate(one) != engine.evaluate({**one, "attention_mask": torch.ones(3, 10)})


def test_padding_row_is_not_trained() -> None:
    """`padding_idx`, in every piece of the embedding."""
    for index in (5, 700):

        def make(index: int = index) -> PreTrainedModel:
            model = tiny_model("llama")
            model.get_input_embeddings().padding_idx = index
            return model

        data = [[{**batch(2, 9, 1), "input_ids": torch.full((2, 9), index)}]]
        outcome = everywhere(make, data, optimizer=SGD(lr=0.1))
        row = outcome.masters["model.embed_tokens.weight"][index]
        assert torch.equal(row, make().get_input_embeddings().weight[index])


@pytest.mark.parametrize("rows", [1, 2])
def test_slices_have_a_reference_of_their_own(rows: int) -> None:
    data = [[batch(3, 6, 1), batch(2, 9, 2)], [batch(1, 7, 3), batch(3, 5, 4)]]

    def make() -> PreTrainedModel:
        return tiny_model("gpt2")

    everywhere(make, data, slice_rows=rows).assert_same(referred(make, data, slice_rows=rows))


def test_slices_are_close_to_the_whole() -> None:
    outcomes = []
    for rows in (0, 1):
        with open_engine(tiny_model("llama"), dtype="fp32", slice_rows=rows, optimizer=AdamW(lr=2e-5)) as engine:
            outcomes.append(train(engine, steps(4)))
    assert outcomes[0].norms != outcomes[1].norms
    assert_close(outcomes[1], outcomes[0], masters_of(tiny_model("llama")))


def test_batches_without_targets() -> None:
    """Beside others they count nothing; alone they are a step that does not happen, as NaN in stock torch."""
    empty = {**batch(2, 5, 1), "labels": torch.full((2, 5), -100)}
    for tile in (TILE, 0):
        with open_engine(tiny_model("llama"), loss_tile=tile) as engine:
            report = engine.step([empty])
            assert report.skipped and report.step == 0
            beside = engine.step([batch(2, 5, 1), empty])
        with open_engine(tiny_model("llama"), loss_tile=tile) as engine:
            assert engine.step([batch(2, 5, 1)]).loss == beside.loss


def test_a_batch_without_labels_is_refused() -> None:
    with open_engine(tiny_model("llama")) as engine, pytest.raises(OptionError, match="labels"):
        engine.step({"input_ids": batch(2, 5, 1)["input_ids"]})


# ---------------------------------------------------------------- optimizers and losses


def test_sgd_and_a_learning_rate_for_each_step() -> None:
    def make() -> PreTrainedModel:
        return tiny_model("llama")

    rates = [0.1, 0.05, 0.0, 0.2]
    settings = {"momentum": 0.8, "weight_decay": 0.01}
    expected = referred(make, steps(4), rates, optimizer=SGD(1.0, kernel="reference", **settings))
    for placement in ("memory", "auto"):
        with open_engine(make(), placement=placement, optimizer=SGD(1.0, **settings), max_grad_norm=LIMIT) as engine:
            reports = [engine.step(one, lr=rate) for one, rate in zip(steps(4), rates, strict=True)]
            outcome_of(engine, reports).assert_same(expected)


@pytest.mark.parametrize("placement", ["memory", "auto"])
def test_a_step_that_is_not_finite_never_happened(placement: str) -> None:
    def poisoned(model: nn.Module, one: Any) -> Tensor:
        loss: Tensor = model(**one).loss
        return loss * float("inf")

    outcomes = []
    for bad in (False, True):
        with open_engine(tiny_model("gpt2"), placement=placement, max_grad_norm=LIMIT) as engine:
            reports = []
            for one in steps(5):
                reports.append(engine.step(one))
                if bad:
                    skipped = engine.step(one, loss_fn=poisoned)
                    assert skipped.skipped and skipped.step == reports[-1].step
            outcomes.append(outcome_of(engine, reports))
    outcomes[0].assert_same(outcomes[1])


def test_the_models_own_loss_on_all_logits() -> None:
    """`loss_tile=0`: another order of sums, so another loss in the last bits; tied, with a head in pieces."""
    whole = everywhere(lambda: tiny_model("llama-tied"), steps(3), loss_tile=0, dtype="fp32")
    with open_engine(tiny_model("llama-tied"), dtype="fp32", max_grad_norm=LIMIT) as engine:
        in_tiles = train(engine, steps(3))
    assert in_tiles.losses == pytest.approx(whole.losses, rel=1e-5) and in_tiles.norms == pytest.approx(whole.norms, rel=1e-5)


def test_auxiliary_loss_of_experts() -> None:
    """Router logits leave their unit with a gradient: the loss is the model's own, and routers learn from both its parts."""
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
    outcome = everywhere(lambda: tiny_model("mixtral", **fields), steps(4), dtype="fp32", optimizer=AdamW(lr=2e-5))
    model = tiny_model("mixtral", **fields).train()
    began = masters_of(model)
    expected = stock(model, torch.optim.AdamW(groups_of(model), lr=2e-5, weight_decay=0.01), LIMIT, steps(4))
    assert_close(outcome, expected, began)
    with open_engine(tiny_model("mixtral"), dtype="fp32", optimizer=AdamW(lr=2e-5), max_grad_norm=LIMIT) as engine:
        assert train(engine, steps(4)).norms != pytest.approx(outcome.norms, rel=1e-5)


def test_experts_without_a_token_are_treated_as_in_torch() -> None:
    """Three tokens reach at most six of sixteen experts."""
    data = [[batch(1, 3, seed)] for seed in (1, 2, 4)]
    data = [[{**one, "labels": one["input_ids"]} for one in step] for step in data]
    fields = {"num_local_experts": 16}
    outcome = everywhere(lambda: tiny_model("mixtral", **fields), data, dtype="fp32", optimizer=AdamW(lr=2e-5))
    model = tiny_model("mixtral", **fields).train()
    began = masters_of(model)
    expected = stock(model, torch.optim.AdamW(groups_of(model), lr=2e-5, weight_decay=0.01), LIMIT, data)
    gradient = model.model.layers[0].mlp.experts.down_proj.grad
    assert gradient is not None and 0 < gradient.flatten(1).any(1).sum() < 16
    assert_close(outcome, expected, began)


# ---------------------------------------------------------------- evaluation and generation


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2", "gemma3", "mixtral"])
def test_evaluation_is_the_models_own(architecture: str) -> None:
    one = padded(3, 10, 5)
    expected = float(tiny_model(architecture).eval()(**one).loss.detach())
    with open_engine(tiny_model(architecture), dtype="fp32") as engine:
        assert engine.evaluate(one) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_evaluation_leaves_no_trace(device: str) -> None:
    """Of another shape, between steps whose updates are pending."""
    outcomes = []
    for evaluates in (False, True):
        where = "cpu" if device == "cpu" else EmulatedDevice(64 * 2**20, jitter_s=0.0005)
        with open_engine(tiny_model("gpt2"), device=where, max_grad_norm=LIMIT) as engine:
            reports = []
            for one in steps(6):
                reports.append(engine.step(one))
                if evaluates:
                    assert engine.evaluate([batch(1, 4, 9), batch(3, 12, 8), batch(2, 3, 7)]) > 0
            outcomes.append(outcome_of(engine, reports))
    outcomes[0].assert_same(outcomes[1])


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3", "mixtral"])
def test_generation_is_that_of_transformers(architecture: str) -> None:
    ids = batch(2, 5, 1)["input_ids"]
    options = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    expected = tiny_model(architecture).eval().generate(ids, **options)  # type: ignore[operator]
    with open_engine(tiny_model(architecture), dtype="fp32") as engine:
        assert torch.equal(engine.generate(ids, **options), expected)
        engine.step(batch(2, 5, 1))
        assert engine.generate(ids, **options).shape[1] > ids.shape[1]
