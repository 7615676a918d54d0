"""The files of a store: made where the user said, checked before anything depends on them.

    folder   made 0700 if missing; else ours, a real folder, not writable by others
    file     0600, O_DIRECT, not a link, locked against a second process; or without a name, for what need not outlive the run
    space    allocated at once, so that no write of the run can find the disk full
    trial    one block read with O_DIRECT: some filesystems accept the flag and refuse the transfer

Whatever does not hold is an OptionError for the setting `ssd`, with the folder, the reason and the remedy.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from lohan.errors import OptionError, StoreError
from lohan.ssd.base import BLOCK_BYTES

_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
_NO_SPACE = "Free space there, name a folder on another drive, or name several"
_OPEN_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of a store, open for O_DIRECT."""

    path: Path
    """for a file without a name: what it would be called"""
    fd: int


def create_file(folder: Path, name: str, nbytes: int, *, unlinked: bool) -> OpenFile:
    """Make the file `name` of `nbytes` bytes in `folder`, all zero. What an earlier run left under this name is replaced."""
    _prepare_folder(folder)
    path = folder / name
    fd = _open_unlinked(folder, name) if unlinked else _open_locked(folder, path, os.O_CREAT)
    try:
        allocate(folder, fd, nbytes)
        _try_direct_read(folder, fd)
        sync(path, fd)
        sync_folder(folder)
    except BaseException:
        if not unlinked:
            path.unlink()
        os.close(fd)
        raise
    return OpenFile(path, fd)


def open_file(folder: Path, name: str, nbytes: int) -> OpenFile:
    """The file `name` of `nbytes` bytes that an earlier process made in `folder`, as it left it."""
    _check_folder(folder)
    path = folder / name
    fd = _open_locked(folder, path, 0)
    try:
        found_bytes = os.fstat(fd).st_size
        if found_bytes != nbytes:
            _refuse(
                folder, f"{name} in it has {found_bytes} bytes, not {nbytes}", "Restore it from a copy, or remove the folder"
            )
        _try_direct_read(folder, fd)
    except BaseException:
        os.close(fd)
        raise
    return OpenFile(path, fd)


def _prepare_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        _refuse(folder, f"cannot be made ({error.strerror})", "Name a folder that you may write to", error)
    _check_folder(folder)


def _check_folder(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        _refuse(folder, "is a link, not a folder", "Name the folder that it points to")
    if status.st_uid != os.geteuid():
        _refuse(
            folder,
            f"belongs to user {status.st_uid}, and others must not read weights",
            "Name a folder inside it that does not exist yet",
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        _refuse(folder, "is writable by other users", "Name a folder inside it that does not exist yet, or chmod 700 it")
    if (kind := _MEMORY_FILESYSTEMS.get(_filesystem_magic(folder))) is not None:
        _refuse(folder, f"is on {kind}, which is RAM and no drive", "Name a folder on an SSD")


def _open_locked(folder: Path, path: Path, flags: int) -> int:
    """The file of that name, which no other process has open as a store."""
    fd = _open(folder, path, _OPEN_FLAGS | flags | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.fchmod(fd, 0o600)
    except OSError as error:
        os.close(fd)
        reason = "is in use by another process" if error.errno == errno.EWOULDBLOCK else f"cannot be locked ({error.strerror})"
        _refuse(folder, f"{path.name} in it {reason}", "Wait for that process, or name another folder", error)
    return fd


def _open_unlinked(folder: Path, name: str) -> int:
    """A file that is gone when it is closed, however the process ends."""
    try:
        return os.open(folder, _OPEN_FLAGS | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):  # a filesystem without O_TMPFILE
            _refuse_open(folder, error)
    path = folder / f"{name}.{secrets.token_hex(8)}"
    fd = _open(folder, path, _OPEN_FLAGS | os.O_CREAT | os.O_EXCL)
    path.unlink()
    return fd


def _open(folder: Path, path: Path, flags: int) -> int:
    try:
        return os.open(path, flags, 0o600)
    except OSError as error:
        _refuse_open(folder, error)


def allocate(folder: Path, fd: int, nbytes: int) -> None:
    """An empty file of so many bytes, all of them on the drive; refused where they do not fit."""
    os.ftruncate(fd, 0)
    space = os.fstatvfs(fd)
    free_bytes = space.f_bavail * space.f_frsize
    reason = f"{nbytes} bytes are needed, {free_bytes} are free"
    if free_bytes < nbytes:
        _refuse(folder, reason, _NO_SPACE)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        _refuse(folder, f"{reason} ({error.strerror})", _NO_SPACE, error)


def check_space(folders: Sequence[Path], needed_bytes: Sequence[int]) -> None:
    """There is room for so many bytes in each folder, which need not exist yet; folders on one drive share what is free."""
    needed: dict[int, int] = {}
    for folder, nbytes in zip(folders, needed_bytes, strict=True):
        place = existing(folder)
        drive = place.stat().st_dev
        needed[drive] = needed.get(drive, 0) + nbytes
        space = os.statvfs(place)
        free_bytes = space.f_bavail * space.f_frsize
        if free_bytes < needed[drive]:
            _refuse(folder, f"{needed[drive]} bytes are needed on its drive, {free_bytes} are free", _NO_SPACE)


def existing(folder: Path) -> Path:
    """The folder, or the one above it in which it would be made."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def _try_direct_read(folder: Path, fd: int) -> None:
    try:
        memory = mmap.mmap(-1, BLOCK_BYTES)
    except OSError as error:
        raise MemoryError(f"the system has no memory for a block of {BLOCK_BYTES} bytes ({error.strerror})") from error
    with memory as block:
        try:
            os.preadv(fd, [block], 0)
        except OSError as error:
            _refuse(folder, f"O_DIRECT does not work there ({error.strerror})", "Name a folder on ext4 or XFS", error)


def sync(path: Path, fd: int) -> None:
    """A file's bytes and size survive a power cut; its name does when its folder is synced too."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise StoreError("flush", str(path), 0, 0, 0, error.errno, str(error)) from error


def sync_folder(folder: Path) -> None:
    """Names made or changed in it survive a power cut."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync(folder, fd)
    finally:
        os.close(fd)


def _filesystem_magic(folder: Path) -> int:
    """`f_type` of statfs, its first field, which os.statvfs leaves out."""
    fields = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None, use_errno=True).statfs(os.fsencode(folder), fields) != 0:
        raise OSError(ctypes.get_errno(), "statfs", str(folder))
    return ctypes.c_ulong.from_buffer(fields).value


def _refuse_open(folder: Path, error: OSError) -> NoReturn:
    if error.errno == errno.EINVAL:
        _refuse(folder, "the filesystem there has no O_DIRECT", "Name a folder on ext4 or XFS", error)
    _refuse(folder, f"no file can be opened there ({error.strerror})", "Name a folder that you may write to", error)


def _refuse(folder: Path, reason: str, remedy: str, cause: BaseException | None = None) -> NoReturn:
    raise OptionError("ssd", str(folder), reason, remedy) from cause
