"""`lohan store`: what a run has on its drives is told truly, damage is found and mended, and nothing else is touched."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest

from lohan import TrainingConfig
from lohan.cli import main
from lohan.errors import OptionError
from lohan.keep.store import StoredRun
from lohan.ssd.durable import find_run
from tests.unit.test_checkpoints import assert_same_run, train
from tests.unit.test_train_trainer import InterruptAfter, config
from tests.unit.training import chats, make_model, on_a_drive, write_jsonl

NUM_STEPS = 7


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A model, data, a whole run, and one that was interrupted after step 5, with a checkpoint of step 3."""
    with on_a_drive() as folder:
        make_model(folder / "model")
        write_jsonl(folder / "data.jsonl", chats(20))
        train(config(folder, folder / "whole", max_steps=NUM_STEPS, save_steps=3))
        train(config(folder, folder / "half", max_steps=NUM_STEPS, save_steps=3), callbacks=[InterruptAfter(5)])
        yield folder


@pytest.fixture
def half(place: Path, request: pytest.FixtureRequest) -> Path:
    """The interrupted run, to do as one likes."""
    out = place / f"out-{request.node.name}"
    shutil.copytree(place / "half", out, copy_function=shutil.copy2)
    for name in ("config.yaml",):
        text = (out / name).read_text().replace(str(place / "half"), str(out))
        (out / name).write_text(text)
    return out


def flip(run: Path, number: int = 0) -> None:
    """A bit of one grain that the commit names."""
    with closing(StoredRun([run / "store"])) as stored:
        grain = list(stored.grains())[number]
        path, offset = stored.store.locate(grain.address)
    with open(path, "r+b") as file:
        file.seek(offset + 100)
        byte = file.read(1)[0]
        file.seek(offset + 100)
        file.write(bytes([byte ^ 2]))


def said(capsys: Any, *words: str | Path, code: int = 0) -> str:
    capsys.readouterr()
    assert main(["store", *map(str, words)]) == code
    captured = capsys.readouterr()
    return str(captured.out + captured.err)


def test_list_tells_modes_steps_and_sizes(half: Path, capsys: Any) -> None:
    told = said(capsys, "list", half)
    assert "store double, after step 5" in told and "checkpoint-3: model and state after step 3" in told
    assert "MB" in told or "MiB" in told


def test_verify_finds_what_is_damaged(half: Path, capsys: Any) -> None:
    assert "are what was written" in said(capsys, "verify", half)
    flip(half, 3)
    told = said(capsys, "verify", half, code=1)
    assert "damaged: " in told and "of " + str(half / "store" / "store") in told and "1 of " in told


def test_repair_from_a_copy_gives_the_bits_back(place: Path, half: Path, capsys: Any) -> None:
    copy = half.with_name(half.name + "-copy")
    shutil.copytree(half / "store", copy)
    copy.chmod(0o700)
    for number in (0, 1, 2, 5):
        flip(half, number)
    assert "4 grains were damaged, 0 are mended" in said(capsys, "repair", half, code=1)  # its checkpoint is of another step
    assert "4 grains were damaged, 4 are mended" in said(capsys, "repair", half, "--from", copy)
    train(config(place, half, max_steps=NUM_STEPS, save_steps=3))
    assert_same_run(half, place / "whole")


def test_repair_from_a_checkpoint_of_the_same_step(place: Path, capsys: Any) -> None:
    out = place / "at-three"
    train(config(place, out, max_steps=NUM_STEPS, save_steps=3), callbacks=[InterruptAfter(3)])
    flip(out, 1)
    assert "1 grains were damaged, 1 are mended" in said(capsys, "repair", out)
    assert "are what was written" in said(capsys, "verify", out)


def test_remove_takes_what_is_named_and_asks(half: Path, capsys: Any) -> None:
    told = said(capsys, "remove", half, "--store", code=2)
    assert "nobody confirmed it" in told and find_run([half / "store"]) is not None
    assert "There are 3" in said(capsys, "remove", half, "--checkpoint", "4", "--yes", code=2)
    assert "removed" in said(capsys, "remove", half, "--checkpoint", "3", "--yes")
    assert not (half / "checkpoint-3").exists() and find_run([half / "store"]) is not None
    assert "store removed" in said(capsys, "remove", half, "--store", "--yes")
    assert not list((half / "store").glob("store*")) and (half / "log.jsonl").exists()
    assert "neither a store nor checkpoints" in said(capsys, "list", half)


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: Any) -> None:
    assert "there is no run in it" in said(capsys, "verify", tmp_path, code=2)


@pytest.mark.parametrize("mode", ["log", "single"])
def test_runs_in_the_other_modes_have_the_same_bits(mode: str, place: Path, capsys: Any) -> None:
    out = place / mode
    train(config(place, out, max_steps=NUM_STEPS, store=mode), callbacks=[InterruptAfter(4)])
    assert f"store {mode}, after step 4" in said(capsys, "list", out)
    assert "are what was written" in said(capsys, "verify", out)
    with pytest.raises(OptionError, match=f"store was '{mode}', is 'double'"):
        train(config(place, out, max_steps=NUM_STEPS, store="double"))
    train(config(place, out, max_steps=NUM_STEPS))  # auto: as it is
    assert_same_run(out, place / "whole")


def test_a_single_store_that_broke_goes_on_from_its_last_checkpoint(place: Path, capsys: Any) -> None:
    out = place / "single-broken"
    settings = config(place, out, max_steps=NUM_STEPS, store="single", save_steps=3)
    process = get_context("spawn").Process(target=train_and_die, args=(settings, 5))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert "left while step 4 was being overwritten" in said(capsys, "list", out)
    train(settings)
    assert_same_run(out, place / "whole")


def train_and_die(settings: TrainingConfig, step: int) -> None:
    train(settings, callbacks=[DieAfter(step)])


class DieAfter(InterruptAfter):
    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
