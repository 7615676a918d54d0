"""Runs in processes of their own: each tells what it acknowledges, and can be given a fault.

They are forked from a server that has imported everything and has no threads, so that one costs a quarter of a second.

    child = launch(train, folders, kind, fault)
    child.go()                  it waits until then, so that whoever watches it (strace, a cgroup) is in place
    child.let(3, 0.02)          three steps and a bit
    child.send(SIGKILL)
    child.acknowledged          the last step that it called committed
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from tests.faults.harness import NUM_STEPS, Kind, make_small, open_run
from tests.parity.harness import steps

PATIENCE_S = 150.0
"""longer than any run here takes on a busy machine"""
Fault = Callable[[], None]
"""done to a process before its run begins: an injection, or a mutant"""
Tell = Callable[[str, Any], None]


class Child:
    """A run in another process."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(["tests.faults.warm"])
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=_run, args=(theirs, target, args))
        self.process.start()
        theirs.close()
        self.told: list[tuple[str, Any]] = []
        self.wait_for("ready")

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    @property
    def acknowledged(self) -> int:
        """The last step that it called committed; call `finish` before."""
        return max((value for what, value in self.told if what == "committed"), default=-1)

    @property
    def error(self) -> str:
        """What ended it, in its own words."""
        return next((str(value) for what, value in self.told if what == "error"), "")

    def go(self) -> Child:
        self._ours.send("go")
        return self

    def wait_for(self, what: str) -> Any:
        """The next time that the child says `what`."""
        until_s = time.monotonic() + PATIENCE_S
        while self._ours.poll(max(0.0, until_s - time.monotonic())):
            self.told.append(self._ours.recv())
            if self.told[-1][0] == what:
                return self.told[-1][1]
        raise TimeoutError(f"the child did not say {what!r} within {PATIENCE_S:g} s, but {self.told}")

    def let(self, num_steps: int, seconds: float) -> bool:
        """Let it get `num_steps` further, by its own word, and then some time. Whether it still runs."""
        try:
            for _ in range(num_steps):
                self.wait_for("committed")
        except (EOFError, ConnectionResetError):
            return False
        time.sleep(seconds)
        return self.process.is_alive()

    def send(self, number: signal.Signals) -> None:
        """A signal, if it still runs."""
        if self.process.is_alive():
            os.kill(self.pid, number)

    def finish(self) -> int:
        """Its exit code, negative for a signal; all that it said has been heard."""
        try:
            while self._ours.poll(PATIENCE_S):
                self.told.append(self._ours.recv())
            self.process.kill()
            raise TimeoutError(f"a run did not end within {PATIENCE_S:g} s: a deadlock? It said {self.told}")
        except (EOFError, ConnectionResetError):
            pass
        self.process.join()
        assert self.process.exitcode is not None
        self._ours.close()
        return self.process.exitcode


def launch(target: Callable[..., None], *args: Any) -> Child:
    """A process that waits for `go`, then calls `target(tell, *args)`."""
    return Child(target, *args)


def _run(pipe: Connection, target: Callable[..., None], args: Sequence[Any]) -> None:
    make_small(pytest.MonkeyPatch())
    pipe.send(("ready", None))
    pipe.recv()
    try:
        target(lambda what, value: pipe.send((what, value)), *args)
    except BaseException as error:
        pipe.send(("error", f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


def nothing() -> None:
    """No fault."""


def train(tell: Tell, folders: Sequence[Path], kind: Kind, fault: Fault = nothing, upto: int = NUM_STEPS) -> None:
    """The run, from wherever its store stands."""
    fault()
    with open_run(folders, kind) as engine:
        tell("committed", engine.num_steps)
        for one in steps()[engine.num_steps : upto]:
            report = engine.step(one)
            tell("committed", report.committed_step)
    tell("committed", upto)
