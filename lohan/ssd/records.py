"""The file that says which step of a run its store holds: `store.meta`, beside the store's own file on each drive.

    header    whose store this is: run, drive, layout, fingerprint; written once, when the store is made
    slot 0 \\  commits, in turn: number, step, and for each unit which of its two places counts. The valid one with the
    slot 1 /  higher number is the run's state; the other is the one before, or torn by a crash

A page (header or slot) is a length, a BLAKE2b digest and JSON. A commit overwrites the older slot and is durable when `write`
returns; until then the newer one stands. What a commit names must be durable before, and must not be overwritten after.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lohan.errors import StoreError
from lohan.ssd.files import sync, sync_folder

MAGIC = b"lohan store 1\n\0\0"
HEADER_BYTES = 64 * 1024
SLOT_BYTES = 16 * 1024
_NUM_SLOTS = 2
_DIGEST_BYTES = 32
_PREFIX = struct.Struct(f"<{len(MAGIC)}sI{_DIGEST_BYTES}s")


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of a run that a crash comes back to."""

    number: int
    """counts commits"""
    step: int
    """optimizer steps that all units have seen"""
    sides: str
    """of each unit, in order, `0` or `1`: which of its two places on the SSD holds that step"""


class RecordError(StoreError):
    """A page that cannot be what lohan wrote."""

    def __init__(self, path: Path, offset: int, reason: str) -> None:
        StoreError.__init__(self, "read", str(path), offset, 0, 0, None, reason)


class RecordFile:
    """An open `store.meta`."""

    def __init__(self, path: Path, fd: int, last: Commit | None) -> None:
        self.path, self._fd, self.last = path, fd, last

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any]) -> RecordFile:
        """A new file, durable with its name; what was there is replaced."""
        partial = path.with_suffix(".partial")
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(partial, flags, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER_BYTES + _NUM_SLOTS * SLOT_BYTES)
            _write_all(partial, fd, 0, encode(header, HEADER_BYTES))
            sync(partial, fd)
            os.rename(partial, path)
            sync_folder(path.parent)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, None)

    @classmethod
    def open(cls, path: Path) -> RecordFile:
        """An existing file; nothing in it changes."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            return cls(path, fd, newest_commit(path, fd))
        except BaseException:
            os.close(fd)
            raise

    def write(self, step: int, sides: str) -> Commit:
        """Replace the older commit; durable on return. After an error the file is not to be written again."""
        number = 0 if self.last is None else self.last.number + 1
        commit = Commit(number, step, sides)
        offset = HEADER_BYTES + number % _NUM_SLOTS * SLOT_BYTES
        _write_all(self.path, self._fd, offset, encode(asdict(commit), SLOT_BYTES))
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            raise StoreError("flush", str(self.path), offset, SLOT_BYTES, 0, error.errno, str(error)) from error
        self.last = commit
        return commit

    def close(self) -> None:
        os.close(self._fd)


def read_header(path: Path) -> dict[str, Any]:
    """Whose store a file belongs to. RecordError if it is not one of lohan's."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return decode(path, 0, os.pread(fd, HEADER_BYTES, 0))
    finally:
        os.close(fd)


def newest_commit(path: Path, fd: int) -> Commit | None:
    """The state that counts; None before the first commit. A slot that a crash tore is passed over."""
    commits = []
    for slot in range(_NUM_SLOTS):
        offset = HEADER_BYTES + slot * SLOT_BYTES
        try:
            commits.append(_commit(path, offset, decode(path, offset, os.pread(fd, SLOT_BYTES, offset))))
        except RecordError:
            continue
    return max(commits, key=lambda commit: commit.number, default=None)


def encode(content: Mapping[str, Any], page_bytes: int) -> bytes:
    """A page."""
    text = json.dumps(content, sort_keys=True).encode()
    page = _PREFIX.pack(MAGIC, len(text), hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest()) + text
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
    if hashlib.blake2b(text, digest_size=_DIGEST_BYTES).digest() != digest:
        raise RecordError(path, offset, "its checksum does not fit: torn or damaged")
    try:
        content = json.loads(text)
    except ValueError as error:
        raise RecordError(path, offset, f"not JSON: {error}") from error
    if not isinstance(content, dict):
        raise RecordError(path, offset, "not a JSON object")
    return content


def _commit(path: Path, offset: int, content: Mapping[str, Any]) -> Commit:
    number, step, sides = content.get("number"), content.get("step"), content.get("sides")
    if type(number) is not int or type(step) is not int or not isinstance(sides, str) or set(sides) - {"0", "1"}:
        raise RecordError(path, offset, "not a commit")
    return Commit(number, step, sides)


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
