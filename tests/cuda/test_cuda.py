"""What only a GPU shows. The conformance suite runs on it too: `pytest -m cuda`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from lohan.device.cuda import CudaDevice, pieces
from lohan.errors import OptionError
from lohan.schedule.ops import Lane

MEMORY_BYTES = 2**30
needs_gpu = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    opened = CudaDevice("cuda", MEMORY_BYTES)
    yield opened
    opened.close()


def test_a_copy_is_cut_where_registered_pieces_meet() -> None:
    registered = [(1100, 1200), (1000, 1100), (5000, 6000)]
    assert list(pieces(registered, 1000, 100)) == [(0, 100)]
    assert list(pieces(registered, 1050, 150)) == [(0, 50), (50, 150)]
    assert list(pieces(registered, 5999, 1)) == [(0, 1)]


@pytest.mark.parametrize(("address", "nbytes"), [(999, 10), (1150, 51), (4000, 1), (5000, 1001)])
def test_a_copy_of_memory_that_was_not_registered_is_refused(address: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match="not registered"):
        list(pieces([(1000, 1100), (1100, 1200), (5000, 6000)], address, nbytes))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_gpu_the_error_names_the_option() -> None:
    with pytest.raises(OptionError, match="device='cuda': torch finds no CUDA device"):
        CudaDevice("cuda", None)


class TestOnAGpu:
    pytestmark = needs_gpu

    def test_the_host_runs_ahead_of_copies(self, device: CudaDevice) -> None:
        host = torch.ones(2**28, dtype=torch.uint8)
        device.register(host)
        slab = device.allocate(host.numel(), "slab")
        event = device.event(Lane.UPLOAD)
        device.copy(Lane.UPLOAD, slab, host)
        device.record(Lane.UPLOAD, event)
        was_complete = event.is_complete
        device.synchronize(event)
        assert not was_complete and event.is_complete

    def test_the_peak_counts_slabs_and_workspace(self, device: CudaDevice) -> None:
        slab = device.allocate(2**26, "slab")
        device.reset_peak()
        with device.computing():
            torch.ones(2**25, dtype=torch.uint8, device=device.torch_device)
        assert device.peak_bytes >= slab.numel() + 2**25

    def test_more_than_the_gpu_has_is_refused(self) -> None:
        with pytest.raises(OptionError, match="device_memory"):
            CudaDevice("cuda", 2**50)
