"""Row 7, in the kernel: every single `mmap` from the opening of the engine through two steps and their commits, refused.

Stacks of threads, frames of Python, buffers, what libraries compile: whoever asked hears ENOMEM. Some can do without, and
the run goes on with the same bits. Otherwise it ends soon, with words, and a new one goes on from the last commit.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from lohan.host import threads
from tests.faults.conftest import Begun, Tally
from tests.faults.harness import FIRST_STEP, KINDS, SCALE, Kind, drives, recover
from tests.faults.mappings import Answers, needs_seccomp, next_number, report
from tests.faults.processes import Fault, Tell, launch, nothing, train

pytestmark = [pytest.mark.faults, pytest.mark.row("7 allocation or mlock fails"), needs_seccomp]
NUM_STEPS = 2
HANG_S = 30.0
STRIDE = max(1, round(10 / SCALE))
"""one of so many is tried: all of them where FAULTS=10"""
NUM_PARTS = 2
MOST = 5000
"""far beyond what a run asks for"""
WORDS = (
    r"ThreadError: the system does not let the thread '.+' begin \(.+\)\. Free memory, or raise the limits"
    r"|OptionError: host_memory=.*the system has no memory for .*\. Lower it, or free memory"
    r"|MemoryError: "
    r"|RuntimeError: could not create a primitive"  # oneDNN's words for it, when it has no page for the code that it makes
)


def train_reporting(tell: Tell, folders: list[Path], kind: Kind, fault: Fault, upto: int) -> None:
    """The run, with a kernel that asks the test about every mmap."""
    threads.NUM_CHECKS = 10  # a fifth of all mappings are for the first line of a thread
    fault()
    tell("listener", next_number())
    report()
    train(tell, folders, kind, upto=upto)


def check(folders: list[Path], kind: Kind, upto: int, number: int, mutant: Fault = nothing, patience_s: float = HANG_S) -> bool:
    """Whether there was such a number to refuse."""
    child = launch(train_reporting, folders, kind, mutant, upto).go()
    answers = Answers(child, child.wait_for("listener"), number)
    child.process.join(patience_s)
    hangs = child.process.is_alive()
    child.send(signal.SIGKILL)
    code = child.finish()
    answers.wait()
    assert not hangs, f"number {number}"
    assert code == 0 or (code == 1 and answers.has_fired and re.match(WORDS, child.error)), f"number {number}: {child.error}"
    step = recover(folders, kind, child.acknowledged)
    assert code != 0 or step == upto
    return answers.has_fired


def sweep(begin: Begun, kind: Kind, upto: int, part: int) -> int:
    """Refuse all that this part is to refuse; how many."""
    for count, number in enumerate(range(part * STRIDE, MOST, NUM_PARTS * STRIDE)):
        if not check(begin(kind), kind, upto, number):
            return count
    raise AssertionError("there is no end to it")


everywhere = pytest.mark.parametrize("part", range(NUM_PARTS))


@everywhere
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_any_mapping_refused(kind: Kind, part: int, begun: Begun, tally: Tally) -> None:
    number = sweep(begun, kind, FIRST_STEP + NUM_STEPS, part)
    assert number * NUM_PARTS * STRIDE > 100
    tally(injected=number, fired=number)


@everywhere
def test_any_mapping_refused_to_a_new_run(part: int, drive: Path, tally: Tally) -> None:
    numbers = iter(range(MOST))
    number = sweep(lambda kind: drives(drive / str(next(numbers))), KINDS[0], NUM_STEPS, part)
    assert number * NUM_PARTS * STRIDE > 100
    tally(injected=number, fired=number)


def wait_for_ever() -> None:
    """CPython's own way to begin a thread."""
    threads._Beginning.wait = threading.Event.wait  # type: ignore[method-assign]


def test_refusals_find_a_mutant_out(begun: Begun, tally: Tally) -> None:
    with pytest.raises(AssertionError, match="number 0"):
        check(begun(KINDS[0]), KINDS[0], FIRST_STEP + 1, 0, wait_for_ever, 5.0)
    tally(mutants=1, caught=1)


# ---------------------------------------------------------------- a library that ends the process


def compute_together(said: Path) -> None:
    """Torch begins OpenMP's threads where it first has much to do; what they say about it goes to a file."""
    os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT, 0o600), 2)
    torch.set_num_threads(16)  # more than glibc has stacks left over for


def test_openmp_ends_the_process(begun: Begun, tally: Tally) -> None:
    """Without a thread libgomp leaves on its own: a death like any other."""
    kind = KINDS[0]
    for number in range(MOST):
        folders = begun(kind)
        said_in = folders[0] / "said"
        child = launch(train_reporting, folders, kind, partial(compute_together, said_in), FIRST_STEP + 1).go()
        answers = Answers(child, child.wait_for("listener"), number)
        child.process.join(HANG_S)
        assert not child.process.is_alive()
        code = child.finish()
        answers.wait()
        said = said_in.read_text()
        if "libgomp" in said:
            assert code == 1 and "Thread creation failed" in said
            said_in.unlink()
            assert recover(folders, kind, FIRST_STEP, go_on=True) == FIRST_STEP
            tally(injected=1, fired=1)
            return
        assert answers.has_fired, "no thread of OpenMP was refused"
