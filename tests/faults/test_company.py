"""Row 15: a store that another process has, or that belongs to another run, is refused with the reason, and left as it is."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lohan import AdamW
from lohan.engine import Engine
from lohan.errors import LohanError, OptionError
from lohan.ssd.durable import META_NAME
from lohan.ssd.records import HEADER_BYTES, MAGIC, decode, encode
from tests.faults import limits
from tests.faults.conftest import Begun, Tally
from tests.faults.harness import KINDS, NUM_STEPS, Kind, drives, open_run, recover, scaled, seeded
from tests.faults.processes import launch, train
from tests.faults.runs import TrainRun, make_place
from tests.parity.harness import OPTIMIZER, TILE, tiny_model

pytestmark = [pytest.mark.faults, pytest.mark.row("15 two processes, another run")]
IN_USE = "ssd='.*': .* in it is in use by another process. Wait for that process"
LONGEST_S = 0.05


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_second_process_is_refused(kind: Kind, begun: Begun, tally: Tally) -> None:
    """While the first one works, or is stopped; it goes on undisturbed."""
    chance, num_fired = seeded(f"company {kind}"), 0
    while num_fired < scaled(100):
        folders = begun(kind)
        child = launch(train, folders, kind).go()
        child.let(chance.randrange(1, 4), chance.uniform(0, LONGEST_S))
        child.send(signal.SIGSTOP)
        for _ in range(5):
            if child.process.is_alive():
                with pytest.raises(OptionError, match=IN_USE):
                    open_run(folders, kind)
                num_fired += 1
            child.send(signal.SIGCONT)
        try:
            open_run(folders, kind).close()  # while it works, or has ended
            child.process.join(30)
            assert not child.process.is_alive(), "both had it"
        except OptionError:
            num_fired += 1
        assert child.finish() == 0, child.error
        assert recover(folders, kind, NUM_STEPS) == NUM_STEPS
    tally(injected=num_fired, fired=num_fired)


def test_of_two_that_begin_at_once_one_is_refused(drive: Path, tally: Tally) -> None:
    kind, number = KINDS[0], scaled(50)
    for one in range(number):
        folders = drives(drive / str(one))
        both = [launch(train, folders, kind) for _ in range(2)]
        for child in both:
            child.go()
        codes = [child.finish() for child in both]
        errors = [child.error for child in both if child.error]
        assert sorted(codes) in ([0, 1], [0, 0]), errors  # the second may begin when the first has ended
        assert all("in use by another process" in error for error in errors), errors
        assert recover(folders, kind, NUM_STEPS) == NUM_STEPS
    tally(injected=number, fired=number)


def test_a_second_command_is_refused(drive: Path, tally: Tally) -> None:
    """By `lohan train`, in one line."""
    first = TrainRun(drive / "out", make_place(drive / "place"), max_steps=40)
    second = TrainRun(drive / "out", drive / "place", max_steps=40)
    second.screen = drive / "second.screen"
    child = first.start()
    first.wait_for_steps(5, child)
    child.send(signal.SIGSTOP)
    assert second.start().finish() == 2
    assert "lohan train: error: ssd=" in second.told and "is in use by another process" in second.told
    assert "Traceback" not in second.told
    before = first.curve
    child.send(signal.SIGCONT)
    assert child.finish() == 0, first.told
    assert first.num_steps == 40 and first.curve[: len(before)] == before
    tally(injected=1, fired=1)


# ---------------------------------------------------------------- other runs


def another(folders: list[Path], **options: Any) -> Engine:
    """Another model, with settings of its own."""
    settings: dict[str, Any] = {"device": "cpu", "host_memory": "1GiB", "loss_tile": TILE, "seed": 3, "resume": True}
    return Engine(tiny_model("qwen3"), ssd=folders, optimizer=OPTIMIZER, max_grad_norm=2.05, **{**settings, **options})


def set_version(folders: list[Path]) -> None:
    """As a later lohan might write it."""
    for folder in folders:
        with (folder / META_NAME).open("r+b") as file:
            page = file.read(HEADER_BYTES)
            file.seek(0)
            file.write(page.replace(MAGIC, MAGIC.replace(b"2", b"3"), 1))


def set_format(folders: list[Path]) -> None:
    for folder in folders:
        path = folder / META_NAME
        header = decode(path, 0, path.read_bytes()[:HEADER_BYTES])
        with path.open("r+b") as file:
            file.write(encode({**header, "format": 3}, HEADER_BYTES))


def lose_drive(folders: list[Path]) -> None:
    shutil.rmtree(folders[1])


Change = Callable[[list[Path]], None]
OTHERS: list[tuple[str, dict[str, Any], Change | None, str]] = [
    ("seed", {"seed": 4}, None, "the run there is another one: numerics was .*'seed': 3.* is .*'seed': 4"),
    ("dtype", {"dtype": "fp32"}, None, "numerics was .*'bf16'.* is .*'fp32'"),
    ("optimizer", {"optimizer": AdamW(lr=1e-3, weight_decay=0.2)}, None, "optimizer was .*0.1.* is .*0.2"),
    ("clipping", {"max_grad_norm": 3.0}, None, "max_grad_norm was 2.05, is 3.0"),
    ("data", {"identity": {"data": "other"}}, None, "data was None, is 'other'"),
    ("mode log", {"store": "log", "placement": "auto"}, None, "store was 'double', is 'log'"),
    ("mode single", {"store": "single", "placement": "auto"}, None, "store was 'double', is 'single'"),
    ("not resumed", {"resume": False}, None, "a run is there, at step 3, and would be lost"),
    ("version", {}, set_version, "store.meta.*version"),
    ("format", {}, set_format, "format was 3, is 2"),
    ("drive lost", {}, lose_drive, "does not belong to the run in the other folders|the run has 2 folders"),
]


def content(folders: list[Path]) -> dict[Path, str]:
    paths = [path for folder in folders if folder.exists() for path in sorted(folder.iterdir())]
    return {path: hashlib.blake2b(path.read_bytes()).hexdigest() for path in paths}


def check_refused(folders: list[Path], open_other: Callable[[list[Path]], Engine], reason: str) -> None:
    before = content(folders)
    with pytest.raises(LohanError, match=reason):
        open_other(folders).close()
    assert content(folders) == before


@pytest.mark.parametrize("name, options, change, reason", OTHERS, ids=[other[0] for other in OTHERS])
def test_another_run_is_refused(
    name: str, options: dict[str, Any], change: Change | None, reason: str, begun: Begun, tally: Tally
) -> None:
    folders = begun(KINDS[0])
    if change is not None:
        change(folders)
    check_refused(folders, lambda folders: open_run(folders, KINDS[0], **options), reason)
    if change is None:
        recover(folders, KINDS[0], 3)
    tally(injected=1, fired=1)


def test_another_model_is_refused(begun: Begun, tally: Tally) -> None:
    check_refused(begun(KINDS[0]), another, "the run there is another one: .*model was")
    tally(injected=1, fired=1)


@pytest.mark.parametrize("kind", KINDS[:1], ids=str)
def test_a_drive_of_another_run_is_refused(kind: Kind, begun: Begun, drive: Path, tally: Tally) -> None:
    one, other = begun(kind), drives(drive / "other")
    assert launch(train, other, kind, limits.nothing, 3).go().finish() == 0
    check_refused([one[0], other[1]], lambda folders: open_run(folders, kind), "they hold several runs")
    tally(injected=1, fired=1)


def test_another_run_finds_a_mutant_out(begun: Begun, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lohan.ssd.durable.differences", lambda there, here: [])
    other = partial(open_run, kind=KINDS[0], max_grad_norm=3.0)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_refused(begun(KINDS[0]), other, "max_grad_norm was")
    tally(mutants=1, caught=1)


def test_a_second_process_finds_a_mutant_out(begun: Begun, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fcntl.flock", lambda fd, how: None)
    folders = begun(KINDS[0])
    child = launch(train, folders, KINDS[0]).go()
    child.let(1, 0)
    child.send(signal.SIGSTOP)
    assert child.process.is_alive()
    with pytest.raises(pytest.fail.Exception), pytest.raises(OptionError, match=IN_USE):
        open_run(folders, KINDS[0]).close()
    os.kill(child.pid, signal.SIGKILL)
    child.finish()
    tally(mutants=1, caught=1)
