"""What damaged records do to their parser: they are refused with its own error, whatever was done to them."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lohan.ssd import records
from lohan.ssd.records import (
    COMMIT_BYTES,
    HEADER_BYTES,
    Commit,
    RecordError,
    RecordFile,
    Redo,
    decode,
    encode,
    parse_commit,
)
from tests.faults.conftest import Tally
from tests.faults.harness import scaled
from tests.fuzzing import STRANGE, Mutator

pytestmark = [pytest.mark.faults, pytest.mark.row("damaged records")]
PATH = Path("store.meta")
TABLE_BYTES = 5000
PAGE_BYTES = 8192
NUM_PARTS = 2
CONTENT: dict[str, Any] = {
    "step": 7,
    "number": 8,
    "digest": "ab" * 32,
    "whole": True,
    "places": [0, -1, 5, 3],
    "redo": {"lr": 1e-4, "clip": 0.5, "present": {"0": [0, 1], "12": []}},
}
HEADER = {"format": 2, "run": "a", "of": 1, "nbytes": 4096, "drive": 0, "fingerprint": {"seed": 1}, "table_bytes": TABLE_BYTES}
NASTY = [b"[" * 3000, b'{"a":' * 1500, b'{"step": 1' + b"0" * 5000 + b"}", b'{"step": NaN}', b"{}", b"null", b'"\xff"', b""]
NASTY += [
    json.dumps({**CONTENT, "redo": {"lr": 1.0, "clip": 1.0, "present": {digits: []}}}).encode()
    for digits in ("9" * 4500, "٣", "²")
]
"""texts that may be too much for what reads them"""


def signed(text: bytes) -> bytes:
    """A page with a checksum that fits."""
    return records._PREFIX.pack(records.MAGIC, len(text), records._digest(text)) + text


@contextmanager
def files() -> Iterator[list[bytes]]:
    """Whole files as a run leaves them: two commits, one with updates to be made again."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = Path(folder) / "store.meta"
        kept = []
        file = RecordFile.create(path, HEADER, TABLE_BYTES)
        for step, redo in ((0, None), (1, Redo(1e-4, 0.5, {0: (1, 2)})), (2, None)):
            file.write(Commit(step, (0, 1, 2), redo, table=bytes([step]) * TABLE_BYTES))
            kept.append(path.read_bytes())
        file.close()
        yield kept


class Fuzzer:
    """Gives inputs to the parsers, and counts what became of them."""

    def __init__(self, part: int, folder: Path, whole: list[bytes]) -> None:
        self._mutator = Mutator(part)
        self._pages = [encode(CONTENT, PAGE_BYTES).rstrip(b"\0"), encode(HEADER, PAGE_BYTES).rstrip(b"\0")]
        self._path, self._whole = folder / "store.meta", whole
        self._path.write_bytes(whole[-1])
        self._parts = [(0, 400), (HEADER_BYTES, 500), (HEADER_BYTES + COMMIT_BYTES, 500)]
        self.num_refused = self.num_taken = 0

    def _count(self, parse: Callable[[], object]) -> None:
        try:
            parse()
            self.num_taken += 1
        except RecordError:
            self.num_refused += 1

    def page(self) -> None:
        """Bytes, most of which a checksum finds out."""
        page = self._mutator.bytes(self._pages)
        self._count(lambda: parse_commit(PATH, 0, decode(PATH, 0, page)))

    def signed_text(self) -> None:
        """Damaged JSON below a checksum that fits."""
        text = self._mutator.bytes([page[records._PREFIX.size :] for page in self._pages] + NASTY)
        self._count(lambda: parse_commit(PATH, 0, decode(PATH, 0, signed(text))))

    def value(self) -> None:
        """Other values where they are expected."""
        value = self._mutator.value(CONTENT)
        self._count(lambda: parse_commit(PATH, 0, decode(PATH, 0, signed(json.dumps(value).encode()))))

    def file(self) -> None:
        """A page of a whole file is another one."""
        start, used = self._mutator._random.choice(self._parts)
        whole = self._mutator._random.choice(self._whole)
        page = self._mutator.bytes([whole[start : start + used]])[:COMMIT_BYTES]
        if self._mutator._random.random() < 0.5:
            page = signed(json.dumps(self._mutator.value(HEADER if start == 0 else CONTENT)).encode())[:COMMIT_BYTES]
        fd = os.open(self._path, os.O_RDWR)
        try:
            before = os.pread(fd, len(page), start)
            os.pwrite(fd, page, start)
            self._count(lambda: RecordFile.open(self._path).close())
            os.pwrite(fd, before, start)
        finally:
            os.close(fd)

    def cut_file(self) -> None:
        """A file that ends too early."""
        length = self._mutator._random.randrange(len(self._whole[-1]))
        self._path.write_bytes(self._whole[-1][:length])
        self._count(lambda: RecordFile.open(self._path).close())
        self._path.write_bytes(self._whole[-1])


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_damaged_records_are_refused(part: int, tally: Tally) -> None:
    number = scaled(1_000_000) // NUM_PARTS
    with files() as whole, tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        fuzzer = Fuzzer(part, Path(folder), whole)
        for one in range(number):
            if one % 1000 == 0:
                fuzzer.cut_file()
            elif one % 20 == 0:
                fuzzer.file()
            else:
                (fuzzer.page, fuzzer.signed_text, fuzzer.value)[one % 3]()
    assert fuzzer.num_refused > number / 2 and fuzzer.num_taken
    tally(injected=number, fired=fuzzer.num_refused)


@pytest.mark.parametrize("text", NASTY, ids=lambda text: repr(text[:20]))
def test_nasty_texts_are_refused(text: bytes) -> None:
    try:
        parse_commit(PATH, 0, decode(PATH, 0, signed(text)))
    except RecordError:
        pass


@pytest.mark.parametrize("strange", STRANGE, ids=lambda value: repr(value)[:20])
def test_strange_tables_are_refused(strange: Any, tmp_path: Path) -> None:
    """How large they are is in the header."""
    with files() as whole:
        path = tmp_path / "store.meta"
        path.write_bytes(encode({**HEADER, "table_bytes": strange}, HEADER_BYTES) + whole[-1][HEADER_BYTES:])
        with pytest.raises(RecordError):
            RecordFile.open(path)


def test_damage_finds_a_mutant_out(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    """A parser that trusts a checksum."""
    monkeypatch.setattr(records, "_redo", lambda path, offset, redo: Redo(redo["lr"], redo["clip"], redo["present"]))
    with pytest.raises((TypeError, KeyError)), files() as whole, tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(0, Path(folder), whole)
        for _ in range(10_000):
            fuzzer.value()
    tally(mutants=1, caught=1)
