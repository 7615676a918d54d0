"""Where the bytes of a store lie, and how fast they may move."""

from __future__ import annotations

import pytest

from lohan.ssd.base import BLOCK_BYTES
from lohan.ssd.stripes import Stripes
from lohan.ssd.throttle import Pacer

STRIPE_BYTES, CHUNK_BYTES = 4 * BLOCK_BYTES, 3 * BLOCK_BYTES


def test_a_pacer_hands_out_turns_back_to_back_and_saves_none_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr("lohan.ssd.throttle.time.perf_counter", lambda: now_s)
    pacer = Pacer(2.0)
    assert [pacer.reserve(10**9) for _ in range(2)] == [100.5, 101.0]
    now_s = 200.0
    assert pacer.reserve(10**9) == 200.5
    assert Pacer(None).reserve(10**9) == now_s


@pytest.mark.parametrize("num_files", [1, 2, 3])
def test_stripes_place_every_byte_once(num_files: int) -> None:
    stripes = Stripes(num_files, STRIPE_BYTES, CHUNK_BYTES)
    nbytes = 50 * BLOCK_BYTES
    places: set[tuple[int, int]] = set()
    end = 0
    for span in stripes.split(0, nbytes):
        assert span.start == end and 0 < span.nbytes <= CHUNK_BYTES
        assert span.offset + span.nbytes <= stripes.file_bytes(nbytes)
        places |= {(span.file, at) for at in range(span.offset, span.offset + span.nbytes, BLOCK_BYTES)}
        end += span.nbytes
    assert end == nbytes and len(places) == 50
    assert {file for file, _ in places} == set(range(num_files))
