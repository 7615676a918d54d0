"""A record is what was written, or an error of its own: never something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.ssd import records
from lohan.ssd.records import HEADER_BYTES, SLOT_BYTES, RecordError, RecordFile, decode, encode, read_header


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.meta"


def test_the_newest_commit_counts(path: Path) -> None:
    file = RecordFile.create(path, {"run": "a"})
    assert file.last is None and read_header(path) == {"run": "a"}
    for step, sides in ((0, "000"), (1, "110"), (2, "011")):
        file.write(step, sides)
        again = RecordFile.open(path)
        assert again.last is not None and (again.last.step, again.last.sides) == (step, sides)
        again.close()
    file.close()


@pytest.mark.parametrize("torn_bytes", [1, 20, 60, 90])
def test_a_torn_commit_leaves_the_one_before(path: Path, torn_bytes: int) -> None:
    file = RecordFile.create(path, {})
    for step in range(3):
        file.write(step, f"{step:03b}")
    before = path.read_bytes()
    file.write(3, "111")
    file.close()
    start = HEADER_BYTES + 3 % 2 * SLOT_BYTES
    after = path.read_bytes()
    path.write_bytes(before[:start] + after[start : start + torn_bytes] + before[start + torn_bytes :])
    again = RecordFile.open(path)
    assert again.last is not None and again.last.step == 2
    again.close()


def test_a_flipped_bit_is_noticed_wherever_it_is(path: Path) -> None:
    file = RecordFile.create(path, {"run": "a"})
    file.write(0, "01")
    file.write(1, "10")
    file.close()
    whole = path.read_bytes()
    start = HEADER_BYTES + SLOT_BYTES
    for place in range(start, start + len(whole[start:].rstrip(b"\0"))):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        again = RecordFile.open(path)
        assert again.last is not None and again.last.step == 0
        again.close()
    path.write_bytes(b"x" + whole[1:])
    with pytest.raises(RecordError, match="not a page of a lohan store"):
        read_header(path)


def test_a_commit_is_durable_when_write_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of the two system calls, and an error of the second, which is not swallowed."""
    calls: list[str] = []
    pwrite, fdatasync = os.pwrite, os.fdatasync
    monkeypatch.setattr(records.os, "pwrite", lambda *a: (calls.append("write"), pwrite(*a))[1])
    monkeypatch.setattr(records.os, "fdatasync", lambda fd: (calls.append("flush"), fdatasync(fd))[1])
    file = RecordFile.create(path, {})
    calls.clear()
    file.write(0, "0")
    assert calls == ["write", "flush"]

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(records.os, "fdatasync", fails)
    with pytest.raises(records.StoreError, match=r"flush .*store\.meta .*errno 5"):
        file.write(1, "1")
    assert file.last is not None and file.last.step == 0
    file.close()


@given(st.binary(max_size=400))
def test_any_bytes_are_a_page_or_a_record_error(page: bytes) -> None:
    with pytest.raises(RecordError):
        decode(Path("store.meta"), 0, page)


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.integers(), st.text(max_size=20), st.booleans())), st.data())
def test_any_change_of_a_page_is_a_record_error(content: dict[str, object], data: st.DataObject) -> None:
    page = encode(content, 4096)
    assert decode(Path("store.meta"), 0, page) == content
    used = len(page.rstrip(b"\0"))
    place = data.draw(st.integers(0, used - 1))
    flipped = page[:place] + bytes([page[place] ^ data.draw(st.integers(1, 255))]) + page[place + 1 :]
    with pytest.raises(RecordError):
        decode(Path("store.meta"), 0, flipped)
