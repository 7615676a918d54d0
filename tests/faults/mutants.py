"""Ways to break what keeps a run safe, each put into a process before its run begins. Every row has one that fails it."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lohan.errors import StoreError
from lohan.host.threads import Job
from lohan.run import gate
from lohan.run.commits import Commits
from lohan.ssd import file_store, records
from lohan.ssd.file_store import FileStore
from lohan.ssd.records import Commit

SLOW_S = 0.3
"""makes a window in time wide enough to fall into"""


def commit_before_updates() -> None:
    """The record first, then what it names."""

    def commit(self: Any, before: Job[None] | None, state: Commit, after: Callable[[], None] | None) -> None:
        if before is not None:
            before.wait()
        self._records.write(replace(state, table=self._store.table()))
        self.durable_step = state.step
        if after is not None:
            after()
        self._store.flush()

    Commits._commit = commit  # type: ignore[method-assign]


def commit_without_waiting() -> None:
    """Writes go ahead while the record that still names their place is the durable one."""
    gate.Gate.admit = lambda self, op: None  # type: ignore[method-assign]
    sync = FileStore.sync_file

    def slowly(self: FileStore, file: int) -> None:
        time.sleep(SLOW_S)
        sync(self, file)

    FileStore.sync_file = slowly  # type: ignore[method-assign]


def flush_no_data() -> None:
    FileStore.sync_file = lambda self, file: None  # type: ignore[method-assign]


def buffer_and_flush_no_data() -> None:
    """Through the page cache, which a power cut empties."""
    real: Any = os.open
    os.open = lambda path, flags, *mode: real(path, flags & ~os.O_DIRECT, *mode)
    flush_no_data()


def flush_one_drive() -> None:
    """The flush of one drive says nothing about the other."""
    sync = FileStore.sync_file
    FileStore.sync_file = lambda self, file: sync(self, 0)  # type: ignore[method-assign]


def leave_records_unflushed() -> None:
    real: Any = os.fdatasync
    os.fdatasync = lambda fd: None if _is_meta(fd) else real(fd)


def _is_meta(fd: Any) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".meta")


def write_records_in_one_place() -> None:
    """Each commit over the last one."""
    real = os.pwrite

    def pwrite(fd: int, data: Any, offset: int) -> int:
        return real(fd, data, min(offset, records.HEADER_BYTES) if _is_meta(fd) else offset)

    os.pwrite = pwrite


def leave_names_unflushed() -> None:
    """Files are made and renamed, and their folders are not synced."""
    real: Any = os.fsync
    os.fsync = lambda fd: None if stat.S_ISDIR(os.fstat(fd).st_mode) else real(fd)  # type: ignore[arg-type]


def ignore_read_errors() -> None:
    FileStore.read_piece = _ignoring(FileStore.read_piece)  # type: ignore[method-assign]


def ignore_write_errors() -> None:
    FileStore.write_piece = _ignoring(FileStore.write_piece)  # type: ignore[method-assign]


def ignore_flush_errors() -> None:
    FileStore.sync_file = _ignoring(FileStore.sync_file)  # type: ignore[method-assign]


def _ignoring(method: Callable[..., None]) -> Callable[..., None]:
    def ignoring(*arguments: Any) -> None:
        try:
            method(*arguments)
        except StoreError:
            pass

    return ignoring


def take_short_for_whole() -> None:
    """One system call a transfer, whatever it moved."""

    def transfer(action: str, call: Callable[..., int], file: Any, offset: int, buffer: memoryview) -> None:
        call(file.fd, [buffer], offset)

    file_store.transfer = transfer


OF_ORDER = (
    commit_before_updates,
    commit_without_waiting,
    flush_no_data,
    flush_one_drive,
    leave_records_unflushed,
    write_records_in_one_place,
    leave_names_unflushed,
)
"""of the order of writes"""
