"""Runs of the command `lohan train`, in processes of their own: the whole program, with its signals, its screen and its log.

run = TrainRun(folder, place, max_steps=40)
child = run.start()
child.send(SIGTERM)
run.curve              the losses in log.jsonl, which must be those of a run without a fault
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lohan.cli import main
from lohan.train.log import read_log
from tests.faults.processes import PATIENCE_S, Child, Fault, Tell, launch, nothing
from tests.unit.training import SETTINGS, chats, make_model, write_jsonl

CAUGHT = signal.SIGUSR1
"""no other part of Python catches it: who does has lohan's interrupts in place"""
Curve = list[tuple[int, float, float]]
"""step, loss, norm"""


def make_place(folder: Path) -> Path:
    """A model and data."""
    make_model(folder / "model")
    write_jsonl(folder / "data.jsonl", chats(20))
    return folder


class TrainRun:
    """One output folder, and the command that fills it; the same each time."""

    def __init__(self, folder: Path, place: Path, **settings: Any) -> None:
        self.folder, self.screen = folder, folder.with_name(f"{folder.name}.screen")
        data = {"model_name_or_path": str(place / "model"), "dataset_name": str(place / "data.jsonl")}
        self.settings = {**data, **SETTINGS, "measure_lanes": False, **settings, "output_dir": str(folder)}

    @property
    def arguments(self) -> list[str]:
        return ["train", *(f"--{name}={value}" for name, value in self.settings.items())]

    def launch(self, fault: Fault = nothing) -> Child:
        """A process that waits for `go`."""
        return launch(command, self.arguments, self.screen, fault)

    def start(self, fault: Fault = nothing) -> Child:
        """The command, from wherever the run stands, as soon as it takes signals."""
        self.screen.unlink(missing_ok=True)
        child = self.launch(fault).go()
        eventually(lambda: takes_signals(child.pid) or not child.process.is_alive(), "take signals")
        return child

    @property
    def told(self) -> str:
        """What the last process said."""
        return self.screen.read_text(errors="replace") if self.screen.exists() else ""

    @property
    def curve(self) -> Curve:
        return [
            (line["step"], line["loss"], line["grad_norm"]) for line in read_log(self.folder / "log.jsonl") if "loss" in line
        ]

    @property
    def num_steps(self) -> int:
        return len(self.curve)

    def wait_for_steps(self, number: int, child: Child) -> None:
        """Until the log has so many, or the process has ended."""
        eventually(lambda: self.num_steps >= number or not child.process.is_alive(), f"make {number} steps")


def command(tell: Tell, arguments: Sequence[str], screen: Path, fault: Fault) -> None:
    """What the console script does; its exit code is the process's."""
    fault()
    file = os.open(screen, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(file, stream)
    code = main(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def takes_signals(pid: int) -> bool:
    try:
        match = re.search(r"SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text())
    except (FileNotFoundError, ProcessLookupError):
        return False
    return match is not None and bool(int(match[1], 16) >> CAUGHT - 1 & 1)


def eventually(holds: Callable[[], bool], what: str, within_s: float = PATIENCE_S) -> None:
    until_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until_s:
            raise TimeoutError(f"a run did not {what} within {within_s:g} s")
        time.sleep(0.005)
