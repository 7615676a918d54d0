"""Ways to break what keeps a run safe, each put into a process before its run begins. Every row has one that fails it."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from lohan.errors import StoreError
from lohan.run import training
from lohan.run.commits import Commits
from lohan.ssd import file_store
from lohan.ssd.file_store import FileStore

SLOW_S = 0.3
"""makes a window in time wide enough to fall into"""


def commit_before_updates() -> None:
    """The record first, then what it names."""

    def commit(self: Any, before: Future[None], step: int, sides: str, after: Callable[[], None] | None) -> None:
        before.result()
        self._durable.records.write(step, sides)
        self.durable_step = step
        if after is not None:
            after()
        self._durable.store.flush()

    Commits._commit = commit  # type: ignore[method-assign]


def commit_without_waiting() -> None:
    """Writes go ahead while the record that still names their place is the durable one."""
    training._Gate.admit = lambda self, op: None  # type: ignore[method-assign]
    sync = FileStore.sync_file

    def slowly(self: FileStore, file: int) -> None:
        time.sleep(SLOW_S)
        sync(self, file)

    FileStore.sync_file = slowly  # type: ignore[method-assign]


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

    file_store._transfer = transfer
