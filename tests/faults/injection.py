"""Faults at the n-th system call of a kind, put into a process before its run begins.

The store's system calls are those of Python's `os`: a fault in place of one is what the kernel, or the drive behind it, would
have done. Calls are counted over all threads, from 0. What fires leaves a mark: a fault that never happened proves nothing.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.harness import Kind
from tests.faults.processes import Fault, Tell, launch, train

Call = Callable[..., Any]
Action = Callable[..., Any]
"""`action(call, *arguments)`, instead of `call(*arguments)`"""
BLOCK_BYTES = 4096


@dataclass(frozen=True)
class Injection:
    """A fault that waits for its call. Called, it is in place."""

    call: str
    number: int
    action: Action
    mark: Path

    def __call__(self) -> None:
        real: Call = getattr(os, self.call)
        lock, num_seen = threading.Lock(), 0

        def faulty(*arguments: Any) -> Any:
            nonlocal num_seen
            with lock:
                fires, num_seen = num_seen == self.number, num_seen + 1
            if not fires:
                return real(*arguments)
            os.mkdir(self.mark)
            return self.action(real, *arguments)

        setattr(os, self.call, faulty)

    @property
    def has_fired(self) -> bool:
        return self.mark.exists()


def count_calls(calls: Sequence[str], folders: Sequence[Path], kind: Kind, upto: int) -> dict[str, int]:
    """How often a run without a fault makes each of these calls."""
    child = launch(_counted, calls, folders, kind, upto).go()
    assert child.finish() == 0, child.error
    return dict(next(value for what, value in child.told if what == "calls"))


def _counted(tell: Tell, calls: Sequence[str], folders: Sequence[Path], kind: Kind, upto: int) -> None:
    counts: Counter[str] = Counter()
    for name in calls:
        setattr(os, name, _counting(name, getattr(os, name), counts))
    train(tell, folders, kind, upto=upto)
    tell("calls", dict(counts))


def _counting(name: str, real: Call, counts: Counter[str]) -> Call:
    lock = threading.Lock()

    def counted(*arguments: Any) -> Any:
        with lock:
            counts[name] += 1
        return real(*arguments)

    return counted


# ---------------------------------------------------------------- what happens


def kill(call: Call, *arguments: Any) -> None:
    """The process ends before the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def kill_after(call: Call, *arguments: Any) -> None:
    """The process ends, and the call was made."""
    call(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)


def kill_halfway(call: Call, fd: int, data: Any, offset: int) -> None:
    """The process ends, and one block of a write was made."""
    short(call, fd, data, offset)
    os.kill(os.getpid(), signal.SIGKILL)


def fail(call: Call, *arguments: Any) -> None:
    """EIO, and nothing was done."""
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def short(call: Call, fd: int, data: Any, offset: int) -> Any:
    """One block, and the kernel says so."""
    return call(fd, [memoryview(data[0])[:BLOCK_BYTES]] if isinstance(data, list) else data[:BLOCK_BYTES], offset)


def lose(call: Call, fd: int, data: Any, offset: int) -> int:
    """The drive says that it wrote, and did not."""
    return sum(map(len, data)) if isinstance(data, list) else len(data)


def tear(call: Call, fd: int, data: Any, offset: int) -> Any:
    """The drive says that it wrote all, and wrote the first block."""
    short(call, fd, data, offset)
    return lose(call, fd, data, offset)


def both(*faults: Fault) -> None:
    """Several faults in one process: `partial(both, one, another)`."""
    for fault in faults:
        fault()
