"""A record is what was written, or an error of its own: never something else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lohan.ssd import records
from lohan.ssd.records import (
    COMMIT_BYTES,
    HEADER_BYTES,
    TABLES_START,
    Commit,
    RecordError,
    RecordFile,
    Redo,
    decode,
    encode,
    parse_commit,
    read_header,
)

TABLE_BYTES = 5000
REDO = Redo(1e-5, 0.1, {0: (0, 2), 7: ()})


def commit(step: int, redo: Redo | None = None) -> Commit:
    return Commit(step, (step, -1, 5), redo, table=bytes([step]) * TABLE_BYTES)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.meta"


def test_the_newest_commit_counts(path: Path) -> None:
    file = RecordFile.create(path, {"run": "a"}, TABLE_BYTES)
    assert file.last is None and read_header(path) == {"run": "a", "table_bytes": TABLE_BYTES}
    for step, redo in ((0, None), (1, REDO), (2, None)):
        written = file.write(commit(step, redo))
        again = RecordFile.open(path)
        assert again.last == written and (written.step, written.redo, written.number) == (step, redo, step)
        again.close()
    file.close()


@pytest.mark.parametrize("torn_bytes", [1, 20, 60, 90])
@pytest.mark.parametrize("table", [False, True], ids=["commit", "table"])
def test_a_torn_commit_leaves_the_one_before(path: Path, torn_bytes: int, table: bool) -> None:
    file = RecordFile.create(path, {}, TABLE_BYTES)
    for step in range(3):
        file.write(commit(step))
    before = path.read_bytes()
    file.write(commit(3))
    file.close()
    start = TABLES_START + 8192 if table else HEADER_BYTES + COMMIT_BYTES
    after = path.read_bytes()
    torn = before[:start] + after[start : start + torn_bytes] + before[start + torn_bytes :]
    path.write_bytes(torn[:HEADER_BYTES] + after[HEADER_BYTES:TABLES_START] + torn[TABLES_START:] if table else torn)
    again = RecordFile.open(path)
    assert again.last is not None and again.last.step == 2 and again.last.table == commit(2).table
    again.close()


def test_a_flipped_bit_is_noticed_wherever_it_is(path: Path) -> None:
    file = RecordFile.create(path, {"run": "a"}, TABLE_BYTES)
    file.write(commit(0))
    file.write(commit(1, REDO))
    file.close()
    whole = path.read_bytes()
    start = HEADER_BYTES + COMMIT_BYTES
    page = range(start, start + len(whole[start:TABLES_START].rstrip(b"\0")))
    for place in (*page, *range(TABLES_START + 8192, TABLES_START + 8192 + TABLE_BYTES, 97)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        again = RecordFile.open(path)
        assert again.last is not None and again.last.step == 0
        again.close()
    path.write_bytes(b"x" + whole[1:])
    with pytest.raises(RecordError, match="not a page of a lohan store"):
        read_header(path)


def test_a_commit_is_durable_when_write_returns(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table, synced, and only then the commit, synced; and an error of that, which is not swallowed."""
    calls: list[object] = []
    pwrite, fdatasync = os.pwrite, os.fdatasync
    monkeypatch.setattr(records.os, "pwrite", lambda *a: (calls.append(a[2] >= TABLES_START), pwrite(*a))[1])
    monkeypatch.setattr(records.os, "fdatasync", lambda fd: (calls.append("flush"), fdatasync(fd))[1])
    file = RecordFile.create(path, {}, TABLE_BYTES)
    calls.clear()
    file.write(commit(0))
    assert calls == [True, "flush", False, "flush"]

    def fails(fd: int) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(records.os, "fdatasync", fails)
    with pytest.raises(records.StoreError, match=r"flush .*store\.meta .*errno 5"):
        file.write(commit(1))
    assert file.last is not None and file.last.step == 0
    file.close()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ("step", "number", "places", "redo", "whole", "digest", "lr", "clip", "present")


@given(st.dictionaries(st.sampled_from(FIELDS), JSON | st.dictionaries(st.sampled_from(FIELDS), JSON)))
def test_any_content_is_a_commit_or_a_record_error(content: dict[str, object]) -> None:
    try:
        assert parse_commit(Path("store.meta"), 0, content).step == content["step"]
    except RecordError:
        pass


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
