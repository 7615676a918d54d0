"""Every row once an epoch, any step on request; packed examples have the losses that they have alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from lohan.data import (
    BatchPlan,
    DataSettings,
    TokenDataset,
    check_packing,
    check_vocabulary,
    open_rows,
    padding_token,
    tokenize,
)
from lohan.engine import Engine
from lohan.errors import OptionError
from tests.tiny import CAUSAL, VOCABULARY, causal_model
from tests.tiny_tokenizer import tiny_tokenizer

PAD = 9
LENGTHS = [3, 9, 2, 7, 7, 12, 4, 5, 6, 2, 8]
"""of examples that begin with their number: 100, 101, ..."""


def dataset(tmp_path: Path, lengths: list[int] = LENGTHS) -> TokenDataset:
    rows = [
        {"input_ids": [100 + at, *range(20, 19 + num)], "labels": [100 + at, -100, *range(21, 19 + num)] if num > 2 else None}
        for at, num in enumerate(lengths)
    ]
    return tokenize(open_rows(rows), tiny_tokenizer(), DataSettings(), tmp_path / "tokens")


def planned(tmp_path: Path, rows_per_batch: int = 2, batches_per_step: int = 2, **settings: Any) -> BatchPlan:
    return BatchPlan(dataset(tmp_path), rows_per_batch, batches_per_step, DataSettings(max_length=12, **settings), PAD)


def examples_in(batch: dict[str, Tensor]) -> list[int]:
    return [int(token) - 100 for token in batch["input_ids"].flatten() if token >= 100]


MODES = [{}, {"group_by_length": True}, {"packing": True}]


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 4), (20, 1)])
def test_no_step_is_larger_than_the_largest(tmp_path: Path, settings: dict[str, Any], shape: tuple[int, int]) -> None:
    plan = planned(tmp_path, *shape, **settings)
    largest = sorted((tuple(batch["input_ids"].shape) for batch in plan.largest_step()), reverse=True)
    assert all(bool((batch["labels"] != -100).all()) for batch in plan.largest_step())
    reached = 0
    for number in range(8 * plan.steps_per_epoch):
        step = sorted((tuple(batch["input_ids"].shape) for batch in plan.step(number)), reverse=True)
        assert {name for batch in plan.step(number) for name in batch} <= set(plan.largest_step()[0])
        assert len(step) <= len(largest) and all(rows <= largest[0][0] for rows, _ in step)
        lengths = [sorted((length for _, length in shapes), reverse=True) for shapes in (step, largest)]
        assert all(one <= most for one, most in zip(*lengths, strict=False))
        reached = max(reached, lengths[0][0])
    assert reached == largest[0][1], "some step is as long"


@pytest.mark.parametrize("settings", MODES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 2), (3, 2), (4, 1), (20, 1), (1, 20)])
def test_an_epoch_has_every_example_once(tmp_path: Path, settings: dict[str, Any], shape: tuple[int, int]) -> None:
    plan = planned(tmp_path, *shape, **settings)
    steps = [plan.step(number) for number in range(2 * plan.steps_per_epoch)]
    for epoch in (steps[: plan.steps_per_epoch], steps[plan.steps_per_epoch :]):
        assert sorted(one for step in epoch for batch in step for one in examples_in(batch)) == list(range(len(LENGTHS)))
        rows = [len(batch["input_ids"]) for step in epoch for batch in step]
        assert sum(rows) == plan.num_rows and set(rows[:-1]) <= {shape[0]} and 0 < rows[-1] <= shape[0]
        assert all(len(step) == shape[1] for step in epoch[:-1]) and 0 < len(epoch[-1]) <= shape[1]
    order = [examples_in(batch) for step in steps for batch in step]
    assert order[: len(order) // 2] != order[len(order) // 2 :] or shape[0] * shape[1] >= 20


@pytest.mark.parametrize("settings", MODES)
def test_any_step_can_be_asked_for(tmp_path: Path, settings: dict[str, Any]) -> None:
    plan = planned(tmp_path, **settings)
    steps = [plan.step(number) for number in range(9)]
    fresh = planned(tmp_path, **settings)
    for number in (8, 0, 5, 5, 1):
        for batch, again in zip(steps[number], fresh.step(number), strict=True):
            assert batch.keys() == again.keys() and all(torch.equal(batch[name], again[name]) for name in batch)
    other = planned(tmp_path, seed=1, **settings)
    assert [examples_in(batch) for batch in other.step(0)] != [examples_in(batch) for batch in steps[0]]


def test_rows_are_filled_up_on_the_right(tmp_path: Path) -> None:
    plan = planned(tmp_path, 4, 1)
    for batch in (plan.step(0)[0], *plan.evaluation_batches()):
        for at, example in enumerate(examples_in(batch)):
            num = LENGTHS[example]
            assert batch["input_ids"][at].tolist()[num:] == [PAD] * (batch["input_ids"].shape[1] - num)
            assert batch["attention_mask"][at].tolist() == [1] * num + [0] * (batch["input_ids"].shape[1] - num)
            assert batch["labels"][at].tolist()[num:] == [-100] * (batch["input_ids"].shape[1] - num)
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())


def test_a_batch_without_padding_has_no_mask(tmp_path: Path) -> None:
    assert all(batch.keys() == {"input_ids", "labels"} for batch in planned(tmp_path, 1).step(0))


def test_evaluation_is_in_the_order_of_the_data(tmp_path: Path) -> None:
    batches = list(planned(tmp_path, 4).evaluation_batches())
    assert [examples_in(batch) for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_lengths_are_grouped(tmp_path: Path) -> None:
    def num_padded(plan: BatchPlan) -> int:
        return sum(
            int((batch["input_ids"] == PAD).sum()) for number in range(plan.steps_per_epoch) for batch in plan.step(number)
        )

    assert num_padded(planned(tmp_path, group_by_length=True)) < num_padded(planned(tmp_path)) / 2


def test_packed_rows(tmp_path: Path) -> None:
    plan = planned(tmp_path, 2, 2, packing=True)
    assert plan.num_rows < len(LENGTHS) and plan.steps_per_epoch == -(-plan.num_rows // 4)
    source = dataset(tmp_path)
    for batch in (*plan.step(0), *plan.evaluation_batches()):
        assert batch.keys() == {"input_ids", "labels", "position_ids"}
        for ids, labels, positions in zip(batch["input_ids"], batch["labels"], batch["position_ids"], strict=True):
            starts = [at for at, token in enumerate(ids.tolist()) if token >= 100]
            assert starts[0] == 0
            for start in starts:
                example = source[int(ids[start]) - 100]
                part = slice(start, start + len(example.input_ids))
                assert ids[part].tolist() == example.input_ids.tolist()
                assert labels[part].tolist() == [-100, *example.labels[1:].tolist()]
                assert positions[part].tolist() == list(range(len(example.input_ids)))
            rest = slice(start + len(example.input_ids), None)
            assert set(ids[rest].tolist()) <= {PAD} and set(labels[rest].tolist()) <= {-100}
            assert not positions[rest].any()


@pytest.mark.parametrize("shape", [(0, 1), (1, 0)])
def test_a_step_takes_rows(tmp_path: Path, shape: tuple[int, int]) -> None:
    with pytest.raises(OptionError, match="per_device_train_batch_size=0|gradient_accumulation_steps=0"):
        planned(tmp_path, *shape)


# ---------------------------------------------------------------- packed is alone


def losses(model: PreTrainedModel, batch: dict[str, Tensor]) -> Tensor:
    """Of each target, by the token before it; zero elsewhere."""
    inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[:, :-1]
    each = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch["labels"][:, 1:].flatten(), reduction="none")
    return each.view(len(logits), -1)


def is_packed_as_alone(model: PreTrainedModel, plan: BatchPlan, alone: BatchPlan) -> bool:
    """Whether every example has the same loss in its packed row, padded ones among them, as by itself."""
    wanted = {}
    for batch in alone.evaluation_batches():
        wanted[examples_in(batch)[0]] = losses(model, batch).sum()
    found: dict[int, Tensor] = {}
    for batch in plan.evaluation_batches():
        for ids, row in zip(batch["input_ids"], losses(model, batch), strict=True):
            starts = [at for at, token in enumerate(ids.tolist()) if token >= 100]
            for start, stop in zip(starts, [*starts[1:], len(ids)], strict=True):
                found[int(ids[start]) - 100] = row[start:stop].sum()
    return all(torch.allclose(found[example], loss, rtol=1e-4, atol=1e-5) for example, loss in wanted.items())


@torch.no_grad()
@pytest.mark.parametrize("name", CAUSAL)
def test_exactly_those_models_are_packed_that_keep_examples_apart(tmp_path: Path, name: str) -> None:
    model = causal_model(name)
    packed, alone = planned(tmp_path, 3, packing=True), planned(tmp_path, 1)
    try:
        accepted = is_packed_as_alone(model, packed, alone)
    except TypeError:  # a forward without positions
        accepted = False
    if accepted:
        check_packing(model)
    else:
        with pytest.raises(OptionError, match="packing=True: .* could see each other"):
            check_packing(model)
    assert accepted == (name not in ("bert", "bloom", "falcon", "opt"))


def test_attention_that_is_not_known_to_keep_them_apart() -> None:
    model = causal_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(OptionError, match="uses the attention 'flash_attention_2'"):
        check_packing(model)
    model.config._attn_implementation, model.config.layer_types = "sdpa", ["full_attention", "linear_attention"]
    with pytest.raises(OptionError, match="carry a state"):
        check_packing(model)


def test_the_engine_keeps_packed_examples_apart(tmp_path: Path) -> None:
    packed, alone = planned(tmp_path, 3, packing=True), planned(tmp_path, 1)
    with Engine(causal_model("llama"), device="cpu", host_memory="64MiB", dtype="fp32", placement="memory") as engine:
        wanted = engine.evaluate(list(alone.evaluation_batches()))
        assert engine.evaluate(list(packed.evaluation_batches())) == pytest.approx(wanted, rel=1e-5)
        mixed = [{**batch, "position_ids": torch.arange(12)[None].expand(len(batch["labels"]), 12)} for batch in packed.step(0)]
        assert engine.evaluate(mixed) != pytest.approx(engine.evaluate(packed.step(0)), rel=1e-4)


# ---------------------------------------------------------------- fit


def test_a_tokenizer_that_does_not_fit(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    check_vocabulary(tokenizer, VOCABULARY, dataset(tmp_path))
    with pytest.raises(OptionError, match="model_name_or_path.*its vocabulary has 281 tokens, the model's 280"):
        check_vocabulary(tokenizer, 280)
    rows = [{"input_ids": [1, 299]}, {"input_ids": [1, 2], "labels": [1, 300]}]
    larger = tokenize(open_rows(rows), tokenizer, DataSettings(), tmp_path)
    check_vocabulary(tokenizer, 301, larger)
    with pytest.raises(OptionError, match="dataset_name.*token 300 occurs in the data, and the model has only 300"):
        check_vocabulary(tokenizer, 300, larger)


def test_padding_is_a_token_that_the_model_has() -> None:
    tokenizer = tiny_tokenizer()
    assert padding_token(tokenizer, 300) == tokenizer.pad_token_id == 281
    assert padding_token(tokenizer, 281) == 0
    tokenizer.pad_token = None
    assert padding_token(tokenizer, 300) == tokenizer.eos_token_id
