"""How a step's micro-batches become slices, and what each of them counts."""

from __future__ import annotations

import math

import pytest
import torch

from lohan.device import open_device
from lohan.errors import OptionError
from lohan.run.batches import IGNORED, cut, on_device

IDS = torch.arange(12).view(3, 4)


def test_a_causal_batch_knows_its_targets() -> None:
    labels = IDS.clone()
    labels[0, 2] = labels[2, 0] = IGNORED
    (one,) = cut({"input_ids": IDS, "labels": labels, "attention_mask": torch.ones(3, 4)}, 0, is_causal=True)
    assert one.rows is not None and one.targets is not None
    assert one.rows.tolist() == [0, 2, 4, 5, 6, 8, 9, 10]  # a row's last token has none, nor the one before an ignored label
    assert one.targets.tolist() == [1, 3, 5, 6, 7, 9, 10, 11]
    assert (one.num_targets, one.shape, one.num_tokens) == (8, (3, 4), 12)
    assert "attention_mask" not in one.inputs  # it masks nothing


def test_a_mask_that_masks_is_kept() -> None:
    mask = torch.ones(3, 4)
    mask[1, 0] = 0
    (one,) = cut({"input_ids": IDS, "attention_mask": mask}, 0, is_causal=True)
    assert one.inputs["attention_mask"] is not None and one.targets is None


@pytest.mark.parametrize(("rows", "expected"), [(0, [3, 2]), (1, [1, 1, 1, 1, 1]), (2, [2, 1, 2]), (5, [3, 2])])
def test_each_micro_batch_is_cut_for_itself(rows: int, expected: list[int]) -> None:
    slices = cut([{"input_ids": IDS, "flag": True}, {"input_ids": IDS[:2, :3], "flag": False}], rows, is_causal=True)
    assert [one.shape[0] for one in slices] == expected
    assert torch.equal(torch.cat([one.inputs["input_ids"].flatten() for one in slices[: len(expected) // 2 + 1]])[:4], IDS[0])
    assert [one.inputs["flag"] for one in slices][0] is True and slices[-1].inputs["flag"] is False


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": torch.zeros(3, 8), "labels": torch.tensor([1, IGNORED, 2])}, 2),
        ({"x": torch.zeros(3, 8), "labels": torch.zeros(3, 2)}, 3),
        ({"x": torch.zeros(3, 8), "y": torch.zeros(3)}, 3),
        ({"input_ids": IDS, "labels": IDS}, 12),
    ],
    ids=["classes", "values", "none", "sequence"],
)
def test_labels_of_other_models_are_not_shifted(batch: dict[str, torch.Tensor], expected: int) -> None:
    (one,) = cut(batch, 0, is_causal=False)
    assert (one.num_targets, one.targets) == (expected, None)


def test_slices_weigh_by_their_targets() -> None:
    device = open_device("cpu", None)
    one, other = cut([{"input_ids": IDS, "labels": IDS}, {"input_ids": IDS[:1], "labels": IDS[:1]}], 0, is_causal=True)
    whole = on_device([one, other], device, in_tiles=False)
    assert [s.weight for s in whole] == [0.75, 0.25] and all("labels" in s.inputs and s.targets is None for s in whole)
    tiled = on_device([one, other], device, in_tiles=True)
    assert all("labels" not in s.inputs and s.targets is not None for s in tiled)
    empty = cut({"input_ids": IDS, "labels": torch.full((3, 4), IGNORED)}, 0, is_causal=True)
    assert math.isnan(on_device(empty, device, in_tiles=False)[0].weight)  # as the mean over nothing


def test_what_is_no_batch_is_refused() -> None:
    with pytest.raises(OptionError, match="at least one micro-batch"):
        cut([], 0, is_causal=True)
    with pytest.raises(OptionError, match="differ in rows"):
        cut({"input_ids": IDS, "labels": IDS[:2]}, 0, is_causal=True)
