"""Rows 2, 5, 9, 10, 11: a fault at every single system call of opening a store, two steps, their commits and closing.

All numbers of `mixed` are tried, in which some updates wait for the norm and others do not; of the other kinds a part.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from lohan.errors import LohanError
from tests.faults import mutants
from tests.faults.conftest import Begun, Tally
from tests.faults.harness import FIRST_STEP, KINDS, SCALE, Kind, recover
from tests.faults.injection import Action, Injection, both, count_calls, fail, kill, kill_after, kill_halfway, short
from tests.faults.processes import Fault, launch, nothing, train

pytestmark = pytest.mark.faults
LAST_STEP = FIRST_STEP + 2
NUM_PARTS = 4
"""of an exhaustive test, so that two workers share it"""
KILLS = [("pwritev", kill), ("pwritev", kill_halfway), ("pwrite", kill), ("pwrite", kill_halfway), ("pwrite", kill_after)]
KILLS += [("fdatasync", kill), ("fdatasync", kill_after)]
WHERE = r"at byte \d+: wanted \d+ bytes, got \d+ \(errno 5\)"
Check = Callable[[list[Path], Kind, str, int, Fault], None]


def numbers(kind: Kind, call: str, begun: Begun, part: int = 0, num_parts: int = 1) -> list[int]:
    """Which calls of a part are tried."""
    total = count_calls([call], begun(kind), kind, LAST_STEP)[call]
    tried = range(0, total, 1 if kind is KINDS[0] else max(1, round(20 / SCALE)))
    return list(tried[part::num_parts])


def meet(folders: list[Path], kind: Kind, injection: Injection, mutant: Fault = nothing) -> tuple[int, str, int]:
    """A run that must meet the fault: its exit code, its error, and what it acknowledged."""
    child = launch(train, folders, kind, partial(both, mutant, injection), LAST_STEP).go()
    code = child.finish()
    assert injection.has_fired
    return code, child.error, child.acknowledged


def check_kill(action: Action, folders: list[Path], kind: Kind, call: str, number: int, mutant: Fault = nothing) -> None:
    code, _, acknowledged = meet(folders, kind, Injection(call, number, action, folders[0] / "fired"), mutant)
    assert code == -9
    recover(folders, kind, acknowledged)


def check_second_kill(folders: list[Path], kind: Kind, call: str, number: int, mutant: Fault = nothing) -> None:
    """A process is killed in the middle of a step, and the one that goes on is killed as well."""
    check_kill(kill_halfway, folders, kind, "pwritev", 60)
    (folders[0] / "fired").rmdir()
    check_kill(kill, folders, kind, call, number, mutant)


def check_error(folders: list[Path], kind: Kind, call: str, number: int, mutant: Fault = nothing) -> None:
    """The process ends with an error that says what, where and why, and what was committed stays."""
    code, error, acknowledged = meet(folders, kind, Injection(call, number, fail, folders[0] / "fired"), mutant)
    assert code == 1
    assert re.match(rf"StoreError: (read|write|flush) /.* {WHERE}|OptionError: ssd=.*error", error)
    recover(folders, kind, acknowledged)


def check_short(folders: list[Path], kind: Kind, call: str, number: int, mutant: Fault = nothing) -> None:
    """The process goes on, as if nothing had been."""
    code, error, _ = meet(folders, kind, Injection(call, number, short, folders[0] / "fired"), mutant)
    assert code == 0, error
    assert recover(folders, kind, LAST_STEP) == LAST_STEP


def check_all(check: Check, kind: Kind, call: str, part: int, begun: Begun, tally: Tally) -> None:
    tried = numbers(kind, call, begun, part, NUM_PARTS)
    for number in tried:
        check(begun(kind), kind, call, number, nothing)
    tally(injected=len(tried), fired=len(tried))


def assert_caught(check: Check, kind: Kind, call: str, mutant: Fault, begun: Begun, tally: Tally) -> None:
    """At one of these calls at least, the mutated code does not pass."""
    for number in numbers(kind, call, begun):
        try:
            check(begun(kind), kind, call, number, mutant)
        except (AssertionError, LohanError):
            tally(mutants=1, caught=1)
            return
    raise AssertionError("no call finds this mutant out")


everywhere = pytest.mark.parametrize("part", range(NUM_PARTS))
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=str)


@everywhere
@all_kinds
@pytest.mark.parametrize("call, action", KILLS, ids=lambda value: getattr(value, "__name__", value))
@pytest.mark.row("2 kill at every system call")
def test_a_kill_at_every_call(call: str, action: Action, kind: Kind, part: int, begun: Begun, tally: Tally) -> None:
    check_all(partial(check_kill, action), kind, call, part, begun, tally)


@pytest.mark.parametrize("mutant", [mutants.commit_before_updates, mutants.commit_without_waiting], ids=lambda m: m.__name__)
@pytest.mark.row("2 kill at every system call")
def test_kills_find_mutants_out(mutant: Fault, begun: Begun, tally: Tally) -> None:
    assert_caught(partial(check_kill, kill), KINDS[2], "pwritev", mutant, begun, tally)


@everywhere
@pytest.mark.parametrize("call", ["pwritev", "pwrite", "fdatasync"])
@pytest.mark.row("5 crash during recovery")
def test_a_kill_while_resuming(call: str, part: int, begun: Begun, tally: Tally) -> None:
    check_all(check_second_kill, KINDS[1], call, part, begun, tally)


@everywhere
@all_kinds
@pytest.mark.row("9 read error")
def test_a_read_error_at_every_call(kind: Kind, part: int, begun: Begun, tally: Tally) -> None:
    check_all(check_error, kind, "preadv", part, begun, tally)


@everywhere
@all_kinds
@pytest.mark.parametrize("call", ["pwritev", "pwrite", "fdatasync", "fsync"])
@pytest.mark.row("10 write or flush error")
def test_a_write_or_flush_error_at_every_call(call: str, kind: Kind, part: int, begun: Begun, tally: Tally) -> None:
    check_all(check_error, kind, call, part, begun, tally)


@everywhere
@all_kinds
@pytest.mark.parametrize("call", ["preadv", "pwritev", "pwrite"])
@pytest.mark.row("11 short read or write")
def test_a_short_transfer_at_every_call(call: str, kind: Kind, part: int, begun: Begun, tally: Tally) -> None:
    check_all(check_short, kind, call, part, begun, tally)


@pytest.mark.parametrize(
    "check, call, mutant",
    [
        pytest.param(check_error, "preadv", mutants.ignore_read_errors, marks=pytest.mark.row("9 read error")),
        pytest.param(check_error, "pwritev", mutants.ignore_write_errors, marks=pytest.mark.row("10 write or flush error")),
        pytest.param(check_error, "fdatasync", mutants.ignore_flush_errors, marks=pytest.mark.row("10 write or flush error")),
        pytest.param(check_short, "preadv", mutants.take_short_for_whole, marks=pytest.mark.row("11 short read or write")),
        pytest.param(check_short, "pwritev", mutants.take_short_for_whole, marks=pytest.mark.row("11 short read or write")),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_errors_find_mutants_out(check: Check, call: str, mutant: Fault, begun: Begun, tally: Tally) -> None:
    assert_caught(check, KINDS[0], call, mutant, begun, tally)
