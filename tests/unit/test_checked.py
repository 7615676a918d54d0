"""What is read from a checked store is what was written to it, or an error that names the place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from torch import Tensor

from lohan.host.pool import HostPool
from lohan.ssd.base import BLOCK_BYTES
from lohan.ssd.checked import CheckedStore, ChecksumError, Extent
from lohan.ssd.memory_store import MemoryStore

GRAIN = 2 * BLOCK_BYTES
EXTENTS = [Extent("a", 0, 5 * BLOCK_BYTES, GRAIN), Extent("b", 5 * BLOCK_BYTES, 4 * BLOCK_BYTES, BLOCK_BYTES)]
NBYTES = 12 * BLOCK_BYTES


@pytest.fixture
def store() -> Iterator[CheckedStore]:
    with closing(CheckedStore(MemoryStore(NBYTES), list(reversed(EXTENTS)))) as opened:
        yield opened


def buffer(num_blocks: int, seed: int | None = None) -> Tensor:
    pool = HostPool(num_blocks * BLOCK_BYTES)
    found = pool.allocate(num_blocks * BLOCK_BYTES, "buffer")
    if seed is not None:
        found.copy_(torch.randint(0, 256, found.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)))
    return found


def test_what_was_written_is_read_and_zeros_before(store: CheckedStore) -> None:
    whole = buffer(9)
    store.submit_read([(0, whole)]).wait()  # both extents at once, never written
    assert not bool(whole.any())
    written = buffer(3, seed=1)
    store.submit_write([(2 * BLOCK_BYTES, written)]).wait()
    store.submit_read([(0, whole)]).wait()
    assert bool((whole[2 * BLOCK_BYTES : 5 * BLOCK_BYTES] == written).all())


@pytest.mark.parametrize("block", range(9))
def test_any_flipped_bit_is_found_and_named(store: CheckedStore, block: int) -> None:
    store.submit_write([(0, buffer(9, seed=2))]).wait()
    flipped = buffer(9)
    store.unchecked.submit_read([(0, flipped)]).wait()
    flipped[block * BLOCK_BYTES + 17] ^= 32
    store.unchecked.submit_write([(0, flipped)]).wait()
    name, number = ("a", block // 2) if block < 5 else ("b", block - 5)
    with pytest.raises(ChecksumError, match=f"read file 0 at byte .*: {name}, grain {number}: .*checksum"):
        store.submit_read([(0, buffer(9))]).wait()


def test_a_write_that_never_arrived_is_found(store: CheckedStore) -> None:
    store.submit_write([(5 * BLOCK_BYTES, buffer(1, seed=1))]).wait()
    lost = buffer(1)
    store.unchecked.submit_write([(5 * BLOCK_BYTES, lost)]).wait()
    with pytest.raises(ChecksumError, match="b, grain 0"):
        store.submit_read([(5 * BLOCK_BYTES, lost)]).wait()


def test_a_table_goes_with_the_bytes_of_its_time(store: CheckedStore) -> None:
    store.submit_write([(0, buffer(2, seed=1))]).wait()
    table = store.table()
    store.submit_write([(0, buffer(2, seed=2))]).wait()
    store.restore(table)
    with pytest.raises(ChecksumError):
        store.submit_read([(0, buffer(2))]).wait()
    with pytest.raises(ValueError, match="no table"):
        store.restore(table[:-8])


@pytest.mark.parametrize("address,blocks", [(1, 1), (3, 2), (0, 1), (0, 3), (9, 1), (8, 2)])
def test_a_range_that_cuts_a_grain_is_refused(store: CheckedStore, address: int, blocks: int) -> None:
    with pytest.raises(ValueError, match="begins no grain|ends no grain"):
        store.submit_write([(address * BLOCK_BYTES, buffer(blocks))])
