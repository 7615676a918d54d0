"""A long run of `lohan train` that meets everything: `python -m tests.faults.soak --minutes 30`, as root.

    fault     at a random time, of a random kind: kill -9, the OOM killer, a read error, a drive that is slow for a while
    resume    the same command again, until the time is over; then it is interrupted, as with Ctrl-C
    judge     its losses and norms, step by step, are those of a run without a fault, bit for bit

Prints how often each fault happened. The exit code is 0 if not a step is missing, there twice, or another one.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.faults.harness import on_a_drive
from tests.faults.linux import Disk, cgroup, disk, has_injected, move, num_oom_kills, oom_kill, strace, throttle
from tests.faults.processes import Child
from tests.faults.runs import Curve, TrainRun, eventually, make_place

DISK_BYTES = 64 * 2**20
SETTINGS = {"max_steps": 10**6, "host_memory": "560KiB", "logging_steps": 1000, "lr_scheduler_type": "constant"}
"""little memory, so that every step reads"""
LONGEST_S = 6.0
"""between a start and a fault"""
SLOW_RATES = (20 * 10**6, 10**6, 32 * 2**10)
"""bytes per second"""
SLOW_S = 3.0
AT_LEAST = 5
"""steps that a process must make for the run to have gone on, now and then"""


class Soak:
    """One run, and what happens to it."""

    def __init__(self, run: TrainRun, device: Disk, memory: Path, io: Path, chance: random.Random, folder: Path) -> None:
        self.run, self.device, self.memory, self.io, self.chance, self.folder = run, device, memory, io, chance, folder
        self.counts: Counter[str] = Counter()
        self.faults = {"kill -9": self.kill, "OOM kill": self.oom, "read error": self.fail_read, "slow SSD": self.slow_down}

    def go_on(self, until_s: float) -> None:
        """Start after start, fault after fault."""
        child = self.start()
        while time.monotonic() < until_s:
            time.sleep(self.chance.uniform(0, LONGEST_S))
            name = self.chance.choice(list(self.faults))
            if child.process.is_alive():
                self.faults[name](child)
                self.counts[name] += 1
                print(f"{name}: {self.run.num_steps} steps so far", flush=True)
            if name != "slow SSD":
                child = self.start()
        eventually(lambda: self.is_stepping(child), "make steps")
        child.send(signal.SIGINT)
        self.expect(child, 130)

    def start(self) -> Child:
        self.run.screen.unlink(missing_ok=True)
        child = self.run.launch()
        move(self.memory, child.pid)
        move(self.io, child.pid)
        child.go()
        self.counts["starts"] += 1
        return child

    def expect(self, child: Child, code: int) -> None:
        if (found := child.finish()) != code:
            raise AssertionError(f"the run ended with {found}, not {code}: {self.run.told[-2000:]}")

    # ---------------------------------------------------------------- faults

    def kill(self, child: Child) -> None:
        child.send(signal.SIGKILL)
        self.expect(child, -signal.SIGKILL)

    def oom(self, child: Child) -> None:
        before = num_oom_kills(self.memory)
        oom_kill(self.memory, child.pid)
        self.expect(child, -signal.SIGKILL)
        if num_oom_kills(self.memory) == before:
            raise AssertionError("the OOM killer did nothing")

    def fail_read(self, child: Child) -> None:
        """One read of the store: strace sees those of O_DIRECT by their system call."""
        eventually(lambda: self.is_stepping(child), "make steps")
        log = self.folder / "strace"
        with strace(child.pid, "preadv2,preadv:error=EIO:when=1", log):
            pass
        if not has_injected(log):
            raise AssertionError("no read failed")
        self.expect(child, 2)
        if "Input/output error" not in self.run.told:
            raise AssertionError(f"the run does not say what went wrong: {self.run.told[-2000:]}")

    def is_stepping(self, child: Child) -> bool:
        """Steps are made: an error before them is one of opening the store, which other tests are about."""
        return "step " in self.run.told or not child.process.is_alive()

    def slow_down(self, child: Child) -> None:
        throttle(self.io, self.device.number, self.chance.choice(SLOW_RATES))
        time.sleep(self.chance.uniform(0, SLOW_S))
        throttle(self.io, self.device.number, 0)


def clean_curve(run: TrainRun, num_steps: int) -> Curve:
    """The same, left alone for as many steps."""
    child = run.launch().go()
    eventually(lambda: has_lines(run.folder / "log.jsonl", num_steps) or not child.process.is_alive(), "end", 7200)
    child.send(signal.SIGINT)
    child.finish()
    return run.curve[:num_steps]


def has_lines(path: Path, number: int) -> bool:
    time.sleep(0.5)
    return path.exists() and path.read_bytes().count(b"\n") >= number


def soak(minutes: float, seed: int, store: str) -> bool:
    """Whether the curves are the same."""
    chance, settings = random.Random(seed), {**SETTINGS, "store": store}
    with ExitStack() as stack:
        folder = stack.enter_context(on_a_drive())
        memory, io = stack.enter_context(cgroup("memory", "soak")), stack.enter_context(cgroup("blkio", "soak"))
        device = stack.enter_context(disk(folder, DISK_BYTES))
        place = make_place(folder / "place")
        faulty = TrainRun(folder / "faulty", place, ssd=str(device.at / "store"), **settings)
        one = Soak(faulty, device, memory, io, chance, folder)
        one.go_on(time.monotonic() + 60 * minutes)
        found = faulty.curve
        print(f"{len(found)} steps in {minutes:g} minutes; now without faults", flush=True)
        expected = clean_curve(TrainRun(folder / "clean", place, ssd=str(device.at / "clean"), **settings), len(found))
        for name, number in sorted(one.counts.items()):
            print(f"{name:12} {number}")
        if len(found) < AT_LEAST:
            print("the run did not get anywhere")
            return False
        return compare(found, expected)


def compare(found: Curve, expected: Curve) -> bool:
    different = [(here, there) for here, there in zip(found, expected, strict=False) if here != there]
    if different:
        print(f"{len(different)} steps differ; the first is {different[0][0]} instead of {different[0][1]}")
    if len(found) != len(expected):
        print(f"{len(found)} steps instead of {len(expected)}")
    if not different and len(found) == len(expected):
        print(f"the loss curve is that of a clean run, bit for bit, in all {len(found)} steps; last {found[-1]}")
        return True
    return False


def main(arguments: Sequence[str]) -> int:
    parser = ArgumentParser(prog="python -m tests.faults.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--store", choices=["double", "log"], default="double")
    options = parser.parse_args(arguments)
    if os.geteuid() != 0:
        parser.error("control groups and disks in files need root")
    return 0 if soak(options.minutes, options.seed, options.store) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
