"""Runs with too little of something, and mutants of what keeps them within it: space, memory, time, patience, company."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lohan.host.pool
from lohan import Engine
from lohan.report import StepReport
from lohan.ssd import durable, file_store, run_stores
from lohan.train import interrupts
from lohan.train.log import LOG_NAME
from tests.faults.harness import Kind, open_run
from tests.faults.processes import Fault, Tell, nothing
from tests.parity.harness import OPTIMIZER, TILE, steps

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


def ignore_madvise() -> None:
    """Memory that the system did not populate is taken for populated."""
    advise = lohan.host.pool._Arena._advise

    def ignoring(self: Any, advice: int) -> None:
        try:
            advise(self, advice)
        except OSError:
            pass

    lohan.host.pool._Arena._advise = ignoring  # type: ignore[method-assign]


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


def leave_log_unflushed() -> None:
    """Lines of the log are left to the kernel."""
    real: Any = os.fdatasync
    os.fdatasync = lambda fd: None if os.readlink(f"/proc/self/fd/{fd}").endswith(LOG_NAME) else real(fd)


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


# ---------------------------------------------------------------- memory that the system does not have


@dataclass(frozen=True)
class NoMemory:
    """The system refuses a mapping, or to populate one, at the n-th time; called, it does so from then on."""

    number: int
    mark: Path

    def __call__(self) -> None:
        num_seen, number, mark = 0, self.number, self.mark

        def count() -> None:
            nonlocal num_seen
            num_seen += 1
            if num_seen == number + 1:
                mark.mkdir()
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        class Mapping(mmap.mmap):
            def __new__(cls, *arguments: Any, **options: Any) -> Any:
                count()
                return super().__new__(cls, *arguments, **options)

            def madvise(self, advice: int, *where: int) -> None:
                if advice != mmap.MADV_DONTNEED:  # which gives back, and needs nothing
                    count()
                super().madvise(advice, *where)

        mmap.mmap = Mapping  # type: ignore[misc]

    @property
    def has_fired(self) -> bool:
        return self.mark.exists()


def limit(what: int, nbytes: int) -> None:
    """`partial(limit, resource.RLIMIT_AS, ...)`"""
    resource.setrlimit(what, (nbytes, nbytes))


def end_address_space(more_bytes: int) -> None:
    """The process may map so much more than it has, and no more."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit(resource.RLIMIT_AS, pages * mmap.PAGESIZE + more_bytes)


def take_time(seconds: float) -> None:
    """Each step does."""
    step = Engine.step

    def slowly(self: Engine, *arguments: Any, **options: Any) -> StepReport:
        time.sleep(seconds)
        return step(self, *arguments, **options)

    Engine.step = slowly  # type: ignore[method-assign]


# ---------------------------------------------------------------- large runs

LARGE = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}
"""a model whose units are much larger than what Python takes on the way"""


def train_large(tell: Tell, folders: Sequence[Path], model: Path, host_memory: int, fault: Fault = nothing) -> None:
    """Two steps of a model that a folder holds, within a budget."""
    fault()
    settings: dict[str, Any] = {"device": "cpu", "host_memory": host_memory, "loss_tile": TILE, "room_for": steps()[0]}
    with Engine(model, ssd=folders, optimizer=OPTIMIZER, resume=True, **settings) as engine:
        tell("committed", engine.num_steps)
        for one in steps()[engine.num_steps : 2]:
            report = engine.step(one)
            tell("committed", report.committed_step)
            tell("peak", report.peak_host_bytes)
        engine.drain()
        tell("committed", engine.num_steps)
