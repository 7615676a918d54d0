"""Live bytes are counted by storage, from birth to death, and are the same on meta tensors as for real."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lohan.device.live import LiveBytes

KIB = 1024


def test_views_and_results_in_place_hold_no_bytes_of_their_own() -> None:
    with LiveBytes() as live:
        whole = torch.zeros(KIB, dtype=torch.uint8)
        part = whole[:10].view(2, 5)
        part.add_(1)
        assert live.live_bytes == KIB
        del whole
        assert live.live_bytes == KIB, "the view keeps it"
        del part
        assert live.live_bytes == 0
    assert live.peak_bytes == KIB


def test_what_was_there_before_does_not_count() -> None:
    before = torch.zeros(KIB, dtype=torch.uint8)
    with LiveBytes() as live:
        view = before.view(2, -1)
        copy = view.clone()
        del before, view
    assert (live.live_bytes, copy.numel()) == (KIB, KIB)


def test_the_peak_is_that_of_what_is_alive_together() -> None:
    with LiveBytes() as live:
        for _ in range(5):
            first = torch.zeros(KIB, dtype=torch.uint8)
            second = first + 1
            del first, second
    assert live.peak_bytes == 2 * KIB


@pytest.mark.parametrize("checkpointing", [False, True])
def test_meta_tensors_predict_a_step(checkpointing: bool) -> None:
    def peak(device: str) -> int:
        layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)).to(device) for _ in range(3)]
        x = torch.ones(32, 64, device=device)

        def run(layer: nn.Module, x: Tensor) -> Tensor:
            if checkpointing:
                result: Tensor = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
                return result
            return layer(x)  # type: ignore[no-any-return]

        with LiveBytes() as live:
            for layer in layers:
                x = run(layer, x)
            x.sum().backward()
        return live.peak_bytes

    real = peak("cpu")
    assert real == peak("meta") > 3 * 32 * 64 * 4
