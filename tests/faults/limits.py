"""Runs with too little of something, and mutants of what keeps them within it: space, memory, time, patience, company."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lohan.host.pool
from lohan import Engine
from lohan.report import StepReport
from lohan.ssd import durable, file_store, run_stores
from lohan.ssd.base import BLOCK_BYTES
from lohan.train import interrupts
from tests.faults.harness import Kind, open_run
from tests.faults.processes import Fault, Tell, nothing
from tests.parity.harness import steps

DRAG_S = 20.0
"""of one write"""


def train_foreseen(
    tell: Tell, folders: Sequence[Path], kind: Kind, upto: int, fault: Fault = nothing, store: str | None = None
) -> None:
    """The run, which is told how large its batches will be, as `lohan train` tells it."""
    fault()
    with open_run(folders, kind, room_for=steps()[0], store=store or kind.store) as engine:
        tell("mode", engine.store_mode.value)
        tell("committed", engine.num_steps)
        for one in steps()[engine.num_steps : upto]:
            report = engine.step(one)
            tell("committed", report.committed_step)
            tell("peak", report.peak_host_bytes)
    tell("committed", upto)


# ---------------------------------------------------------------- mutants


def reserve_nothing() -> None:
    """Files grow as they are written, and nobody looks at what is free."""
    run_stores.check_room = lambda *arguments: None

    def allocate(folder: Path, fd: int, nbytes: int) -> None:
        os.ftruncate(fd, nbytes)

    lohan.ssd.files.allocate = allocate
    lohan.ssd.records.allocate = allocate


def leave_files() -> None:
    """A run that is refused does not tidy up."""
    run_stores.check_room = lambda *arguments: None
    Path.unlink = lambda self, missing_ok=False: None  # type: ignore[method-assign]


def take_twice() -> None:
    """Every pool holds what it counts, and as much again."""
    real, held = lohan.host.pool._Arena, []

    def arena(size_bytes: int) -> Any:
        held.append(real(size_bytes))
        return real(size_bytes)

    lohan.host.pool._Arena = arena  # type: ignore[assignment, misc]


def take_what_is_not_there() -> None:
    """Memory that the system refuses is taken for memory."""
    map_pages = lohan.host.pool.mmap.mmap

    def mmap(fd: int, size_bytes: int, **options: Any) -> Any:
        try:
            return map_pages(fd, size_bytes, **options)
        except OSError:
            return map_pages(fd, BLOCK_BYTES, **options)

    lohan.host.pool.mmap.mmap = mmap  # type: ignore[assignment, misc]


def lose_patience() -> None:
    """A slow drive is taken for one that does not answer."""
    for cls in (file_store.FileStore.create, file_store.FileStore.open):
        cls.__func__.__kwdefaults__["stall_s"] = 0.05  # type: ignore[attr-defined]


def let_anybody_in() -> None:
    fcntl.flock = lambda fd, how: None


def compare_nothing() -> None:
    durable.differences = lambda there, here: []


def share_with_children() -> None:
    """Pools are inherited by forks."""
    advise = lohan.host.pool._Arena._advise

    def inherit(self: Any, advice: int) -> None:
        if advice != lohan.host.pool.mmap.MADV_DONTFORK:
            advise(self, advice)

    lohan.host.pool._Arena._advise = inherit  # type: ignore[method-assign]


def never_leave() -> None:
    """The second signal is as patient as the first."""
    drag()
    interrupts.os = SimpleNamespace(write=os.write, _exit=lambda code: None)  # type: ignore[attr-defined, assignment]


def drag() -> None:
    """From the first step on every write to a store takes its time: a step lasts longer than anybody waits."""
    real, step = os.pwritev, Engine.step

    def slowly(*arguments: Any) -> int:
        time.sleep(DRAG_S)
        return real(*arguments)

    def begin(self: Engine, *arguments: Any, **options: Any) -> StepReport:
        os.pwritev = slowly
        return step(self, *arguments, **options)

    Engine.step = begin  # type: ignore[method-assign]
