"""Tokens on disk: plain files that are mapped into memory, so that they may exceed it.

    FOLDER/KEY/    input_ids.bin   int32, all examples one after the other
                   labels.bin      int32, the same length
                   offsets.bin     int64, where each example begins, and where the last one ends
                   about.json      counts, and what the tokens were made from

A cache is written into a folder of another name, made durable, and renamed: a KEY is there whole or not at all. Whoever writes
holds a lock on that folder, so that what a crash left is told from what somebody else is writing, and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from numpy.typing import NDArray

from lohan.errors import OptionError

VERSION = 1
"""of the files, and of how rows become tokens: a cache of another version is made again"""
_TOKENS, _LABELS, _OFFSETS, _ABOUT = "input_ids.bin", "labels.bin", "offsets.bin", "about.json"
_BUILDING = ".building-"


class CacheFiles:
    """A cache that is complete, mapped read-only."""

    def __init__(self, folder: Path, about: Mapping[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.input_ids: NDArray[np.int32] = _mapped(folder / _TOKENS, np.int32)
        self.labels: NDArray[np.int32] = _mapped(folder / _LABELS, np.int32)
        self.offsets: NDArray[np.int64] = _mapped(folder / _OFFSETS, np.int64)


def open_cache(folder: Path, key: str) -> CacheFiles | None:
    """What an earlier call published under that key; None if there is nothing, or not what it should be."""
    place = folder / key
    try:
        about = json.loads((place / _ABOUT).read_text())
        sizes = {name: (place / name).stat().st_size for name in (_TOKENS, _LABELS, _OFFSETS)}
        wanted = {_TOKENS: 4 * about["tokens"], _LABELS: 4 * about["tokens"], _OFFSETS: 8 * (about["examples"] + 1)}
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return CacheFiles(place, about) if sizes == wanted and about["key"] == key else None


class CacheWriter:
    """A cache on its way. `publish` makes it one; otherwise nothing of it stays."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._files: dict[str, BinaryIO] = {}
        for name in (_TOKENS, _LABELS, _OFFSETS):
            self._files[name] = os.fdopen(
                os.open(place / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb"
            )
        self._end = 0
        self._files[_OFFSETS].write(np.int64(0).tobytes())

    def append(self, input_ids: NDArray[np.int32], labels: NDArray[np.int32]) -> None:
        self._end += len(input_ids)
        for name, values in ((_TOKENS, input_ids), (_LABELS, labels), (_OFFSETS, np.array([self._end], np.int64))):
            self._files[name].write(values.tobytes())

    def publish(self, folder: Path, key: str, about: Mapping[str, Any]) -> CacheFiles:
        """Durable first, then under its name. Whoever was faster made the same."""
        about = {**about, "key": key}
        about_fd = os.open(self._place / _ABOUT, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._files[_ABOUT] = os.fdopen(about_fd, "wb")
        self._files[_ABOUT].write(json.dumps(about, indent=1).encode())
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
        _sync(self._place)
        target = folder / key
        if open_cache(folder, key) is None:
            shutil.rmtree(target, ignore_errors=True)  # of other sizes than it says: not one of ours
        try:
            os.rename(self._place, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _sync(folder)
        return CacheFiles(target, about)

    def close(self) -> None:
        for file in self._files.values():
            with suppress(OSError):  # a full disk was told already; closing writes what is buffered once more
                file.close()


@contextmanager
def writing(folder: Path) -> Iterator[CacheWriter]:
    """A writer, in a folder that is gone afterwards unless it was published."""
    _prepare(folder)
    _remove_abandoned(folder)
    place = folder / f"{_BUILDING}{secrets.token_hex(8)}"
    place.mkdir(mode=0o700)
    lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        writer = CacheWriter(place)
        try:
            yield writer
        finally:
            writer.close()
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _refuse(
            folder,
            f"no space is left there for tokens ({error.strerror})",
            "Free space there, or name a folder on another drive",
            error,
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)
        os.close(lock)


def _prepare(folder: Path) -> None:
    """Made for its owner alone if it is missing; else not to be written by others, who could put tokens there."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        _refuse(folder, f"cannot be made ({error.strerror})", "Name a folder that you may write to", error)
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _refuse(folder, "can be written by other users", "Name a folder inside it that does not exist yet, or chmod 700 it")
    if not os.access(folder, os.W_OK):
        _refuse(folder, "is not writable", "Name a folder that you may write to")


def _remove_abandoned(folder: Path) -> None:
    """What is left of writers that no longer live."""
    for place in folder.glob(f"{_BUILDING}*"):
        try:
            lock = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            continue  # gone in the meantime
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(place, ignore_errors=True)
        except BlockingIOError:
            pass  # somebody is writing it
        finally:
            os.close(lock)


def _mapped(path: Path, dtype: Any) -> NDArray[Any]:
    return np.memmap(path, dtype, mode="r").view(np.ndarray)


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _refuse(folder: Path, reason: str, remedy: str, cause: BaseException | None = None) -> NoReturn:
    raise OptionError("cache_dir", str(folder), reason, remedy) from cause
