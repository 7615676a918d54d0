"""The file that says which step of a run its store holds: `store.meta`, beside the store's own file on each drive.

    header      whose store this is: run, drive, layout, fingerprint; written once, when the store is made
    commit 0 \\  in turn: number, step, where each unit is, updates to be made again, and the digest of the table that goes with
    commit 1 /  it. The valid one with the higher number is the run's state; the other is the one before, or torn by a crash
    table 0 \\   of each commit: the checksums of all that the store holds (`ssd.checked`)
    table 1 /

A page (header or commit) is a length, a BLAKE2b digest and JSON. A commit overwrites the older one, its table first, and is
durable when `write` returns; until then the newer one stands. What a commit names must be durable before, and must not be
overwritten after.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lohan.errors import StoreError
from lohan.ssd.files import allocate, sync, sync_folder

MAGIC = b"lohan store 2\n\0\0"
HEADER_BYTES = 1024 * 1024
COMMIT_BYTES = 64 * 1024
NUM_COMMITS = 2
TABLES_START = HEADER_BYTES + NUM_COMMITS * COMMIT_BYTES
_GRAIN_BYTES = 4096
_DIGEST_BYTES = 32
_MOST_DIGITS = 9
"""of the number of a unit"""
_PREFIX = struct.Struct(f"<{len(MAGIC)}sI{_DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class Redo:
    """The updates of a step that are still to be made, from gradients that the store holds."""

    lr: float
    clip: float
    """factor on the gradients"""
    present: Mapping[int, tuple[int, ...]]
    """of each unit that waits, the tensors that have a gradient"""


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of a run that a crash comes back to."""

    step: int
    """optimizer steps that all units have seen, those whose updates are still to be made included"""
    places: tuple[int, ...]
    """where each unit is"""
    redo: Redo | None = None
    whole: bool = True
    """False: units are being overwritten, and there is nothing to come back to"""
    number: int = -1
    """counts commits"""
    digest: str = ""
    """of the table"""
    table: bytes = b""
    """the checksums of the store; not in the page"""


class RecordError(StoreError):
    """A page that cannot be what lohan wrote."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        StoreError.__init__(self, "read", str(path), offset, 0, 0, None, reason)


class RecordFile:
    """An open `store.meta`."""

    def __init__(self, path: Path, fd: int, table_bytes: int, last: Commit | None) -> None:
        self.path, self._fd, self._table_bytes, self.last = path, fd, table_bytes, last

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], table_bytes: int) -> RecordFile:
        """A new file for commits with tables of this size, durable with its name; what was there is replaced."""
        partial = path.with_suffix(".partial")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(partial, flags, 0o600)
        try:
            allocate(path.parent, fd, file_bytes(table_bytes))
            _write_all(partial, fd, 0, encode({**header, "table_bytes": table_bytes}, HEADER_BYTES))
            sync(partial, fd)
            os.rename(partial, path)
            sync_folder(path.parent)
        except BaseException:
            os.close(fd)
            partial.unlink(missing_ok=True)
            raise
        return cls(path, fd, table_bytes, None)

    @classmethod
    def open(cls, path: Path) -> RecordFile:
        """An existing file; nothing in it changes."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            table_bytes, found_bytes = read_header(path).get("table_bytes"), os.fstat(fd).st_size
            if type(table_bytes) is not int or table_bytes < 0 or file_bytes(table_bytes) != found_bytes:
                raise RecordError(path, 0, f"its header is not that of a file of {found_bytes} bytes")
            return cls(path, fd, table_bytes, newest_commit(path, fd, table_bytes))
        except BaseException:
            os.close(fd)
            raise

    def write(self, commit: Commit) -> Commit:
        """Replace the older commit; durable on return. After an error the file is not to be written again."""
        if len(commit.table) != self._table_bytes:
            raise ValueError(f"a table of {len(commit.table)} bytes in a file for {self._table_bytes}")
        number = 0 if self.last is None else self.last.number + 1
        commit = replace(commit, number=number, digest=_digest(commit.table).hex())
        offset = TABLES_START + number % NUM_COMMITS * _table_stride(self._table_bytes)
        _write_all(self.path, self._fd, offset, commit.table)
        self._sync(offset, len(commit.table))
        content = {name: value for name, value in asdict(commit).items() if name != "table"}
        offset = HEADER_BYTES + number % NUM_COMMITS * COMMIT_BYTES
        _write_all(self.path, self._fd, offset, encode(content, COMMIT_BYTES))
        self._sync(offset, COMMIT_BYTES)
        self.last = commit
        return commit

    def _sync(self, offset: int, nbytes: int) -> None:
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreError("flush", str(self.path), offset, nbytes, 0, error.errno, str(error)) from error

    def close(self) -> None:
        os.close(self._fd)


def read_header(path: Path) -> dict[str, Any]:
    """Whose store a file belongs to. RecordError if it is not one of lohan's."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return decode(path, 0, os.pread(fd, HEADER_BYTES, 0))
    finally:
        os.close(fd)


def newest_commit(path: Path, fd: int, table_bytes: int) -> Commit | None:
    """The state that counts; None before the first commit. What a crash tore, its table included, is passed over."""
    commits = []
    for slot in range(NUM_COMMITS):
        offset = HEADER_BYTES + slot * COMMIT_BYTES
        try:
            commit = parse_commit(path, offset, decode(path, offset, os.pread(fd, COMMIT_BYTES, offset)))
        except RecordError:
            continue
        table = os.pread(fd, table_bytes, TABLES_START + slot * _table_stride(table_bytes))
        if _digest(table).hex() == commit.digest:
            commits.append(replace(commit, table=table))
    return max(commits, key=lambda commit: commit.number, default=None)


def file_bytes(table_bytes: int) -> int:
    """Of a file for tables of this size."""
    return TABLES_START + NUM_COMMITS * _table_stride(table_bytes)


def _table_stride(table_bytes: int) -> int:
    return -(-table_bytes // _GRAIN_BYTES) * _GRAIN_BYTES


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest()


def encode(content: Mapping[str, Any], page_bytes: int) -> bytes:
    """A page."""
    text = json.dumps(content, sort_keys=True).encode()
    page = _PREFIX.pack(MAGIC, len(text), _digest(text)) + text
    if len(page) > page_bytes:
        raise ValueError(f"{len(page)} bytes do not fit a page of {page_bytes}")
    return page.ljust(page_bytes, b"\0")


def decode(path: Path, offset: int, page: bytes) -> dict[str, Any]:
    """What a page holds; RecordError for anything but what `encode` made."""
    if len(page) < _PREFIX.size:
        raise RecordError(path, offset, "the file ends here")
    magic, length, digest = _PREFIX.unpack_from(page)
    text = page[_PREFIX.size : _PREFIX.size + length]
    if magic != MAGIC or len(text) < length:
        raise RecordError(path, offset, "not a page of a lohan store of this version")
    if _digest(text) != digest:
        raise RecordError(path, offset, "its checksum does not fit: torn or damaged")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(path, offset, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordError(path, offset, "not a JSON object")
    return content


def parse_commit(path: Path, offset: int, content: Mapping[str, Any]) -> Commit:
    """A page's content as a commit; RecordError for anything but one."""
    step, number, digest, whole = (content.get(name) for name in ("step", "number", "digest", "whole"))
    places, redo = content.get("places"), content.get("redo")
    if type(step) is not int or type(number) is not int or not isinstance(digest, str) or type(whole) is not bool:
        raise RecordError(path, offset, "not a commit")
    if not isinstance(places, list) or any(type(place) is not int for place in places):
        raise RecordError(path, offset, "not a commit: it names no places")
    return Commit(step, tuple(places), None if redo is None else _redo(path, offset, redo), whole, number, digest)


def _redo(path: Path, offset: int, content: Any) -> Redo:
    error = RecordError(path, offset, "not a commit: the updates to be made again are not as they are written")
    if not isinstance(content, dict):
        raise error
    lr, clip, present = (content.get(name) for name in ("lr", "clip", "present"))
    if not all(isinstance(value, float) and math.isfinite(value) for value in (lr, clip)) or not isinstance(present, dict):
        raise error
    found: dict[int, tuple[int, ...]] = {}
    for unit, tensors in present.items():
        if (
            not unit.isdecimal()
            or len(unit) > _MOST_DIGITS
            or not isinstance(tensors, list)
            or any(type(tensor) is not int for tensor in tensors)
        ):
            raise error
        found[int(unit)] = tuple(tensors)
    return Redo(lr, clip, found)  # type: ignore[arg-type]


def _write_all(path: Path, fd: int, offset: int, page: bytes) -> None:
    done = 0
    while done < len(page):
        try:
            got = os.pwrite(fd, page[done:], offset + done)
        except OSError as error:
            raise StoreError("write", str(path), offset, len(page), done, error.errno, str(error)) from error
        if got <= 0:
            raise StoreError("write", str(path), offset, len(page), done, None, "nothing was written")
        done += got
