"""A run that goes on from a checkpoint has the bits of one that was never left, whatever the plan and the drives are then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lohan import AdamW, Engine
from lohan.errors import OptionError
from lohan.keep import planes
from lohan.keep.manifest import CheckpointError, read_manifest
from tests.parity.harness import OPTIMIZER, TILE, in_memory, limit_of, outcome_of, steps, tiny_model
from tests.parity.test_placements import make_plan
from tests.parity.test_resume import SETTINGS

SAVED_AT = 7
IN_MEMORY = {"weights": "host", "state": "host", "gradient": "host", "boundaries": "host", "update": "defer"}


def settings_of(kind: str, folder: Path) -> dict[str, Any]:
    """Of a run that keeps its state in some way."""
    if kind == "memory":
        return {"placement": "memory"}
    if kind == "memory in chunks":
        return {"placement": replace(make_plan({**SETTINGS, **IN_MEMORY}), use_ssd=False)}
    update, num_drives = kind.split()
    plan = make_plan({**SETTINGS, "update": update})
    return {"placement": plan, "ssd": [folder / f"drive {n}" for n in range(int(num_drives))], "resume": True}


def open_run(kind: str, folder: Path, **options: Any) -> Engine:
    fixed: dict[str, Any] = {"device": "cpu", "host_memory": "1GiB", "optimizer": OPTIMIZER, "loss_tile": TILE, "seed": 3}
    return Engine(tiny_model("llama"), **{**fixed, "max_grad_norm": limit_of("llama"), **settings_of(kind, folder), **options})


def save_one(kind: str, folder: Path, at: int = SAVED_AT) -> Path:
    with open_run(kind, folder) as engine:
        for one in steps()[:at]:
            engine.step(one)
        engine.save_state(folder / "kept", notes={"by": kind})
        for one in steps()[at : at + 2]:
            engine.step(one)
    return folder / "kept"


WAYS = [
    ("speculate 1", "speculate 1"),
    ("defer 2", "memory"),
    ("memory", "mixed 3"),
    ("mixed 1", "memory in chunks"),
    ("memory in chunks", "defer 1"),
]


@pytest.mark.parametrize("before, after", WAYS, ids=lambda kind: kind.replace(" ", "-"))
def test_a_run_goes_on_from_a_checkpoint_with_the_same_bits(before: str, after: str, tmp_path: Path) -> None:
    kept = save_one(before, tmp_path / "before")
    assert read_manifest(kept).step == SAVED_AT and read_manifest(kept).notes == {"by": before}
    with open_run(after, tmp_path / "after", checkpoint=kept) as engine:
        assert engine.num_steps == SAVED_AT
        reports = [engine.step(one) for one in steps()[SAVED_AT:]]
        outcome = outcome_of(engine, reports)
    expected = in_memory("llama", "bf16", clips=True)
    assert outcome.losses == expected.losses[SAVED_AT:] and outcome.norms == expected.norms[SAVED_AT:]
    assert any(report.clipped for report in reports) and not all(report.clipped for report in reports)
    assert all(bool((outcome.masters[name] == master).all()) for name, master in expected.masters.items())


def test_the_same_command_continues_behind_the_checkpoint(tmp_path: Path) -> None:
    """Back in the run's own folders; then on, from where the second one was left; and its own checkpoint, too."""
    kept = save_one("mixed 1", tmp_path)
    for expected_step in (SAVED_AT, SAVED_AT + 1):
        with open_run("mixed 1", tmp_path, checkpoint=kept) as engine:
            assert engine.num_steps == expected_step
            engine.step(steps()[expected_step])
    with open_run("mixed 1", tmp_path) as engine:
        assert engine.num_steps == SAVED_AT + 2
        engine.save_state(tmp_path / "later")
    with open_run("mixed 1", tmp_path, checkpoint=kept) as engine:
        assert engine.num_steps == SAVED_AT + 2
    with open_run("mixed 1", tmp_path, checkpoint=tmp_path / "later") as engine:
        assert engine.num_steps == SAVED_AT + 2
        engine.step(steps()[0])
    with open_run("mixed 1", tmp_path, checkpoint=kept) as engine:
        assert engine.num_steps == SAVED_AT


def test_another_run_in_the_store_is_not_lost(tmp_path: Path) -> None:
    kept = save_one("defer 1", tmp_path / "one")
    save_one("defer 1", tmp_path / "two")
    before = (tmp_path / "two" / "drive 0" / "store").read_bytes()
    with pytest.raises(OptionError, match="ssd=.*another run than the checkpoint's is there, at step 9, and would be lost"):
        open_run("defer 1", tmp_path / "two", checkpoint=kept)
    assert (tmp_path / "two" / "drive 0" / "store").read_bytes() == before
    with open_run("defer 1", tmp_path / "two") as engine:
        assert engine.num_steps == SAVED_AT + 2


def test_a_store_in_use_does_not_give_way(tmp_path: Path) -> None:
    kept = save_one("defer 1", tmp_path)
    with open_run("defer 1", tmp_path) as engine:
        with pytest.raises(OptionError, match="in use by another process"):
            open_run("defer 1", tmp_path, checkpoint=kept)
        engine.step(steps()[0])
    with open_run("defer 1", tmp_path) as engine:
        assert engine.num_steps == SAVED_AT + 3


def test_a_checkpoint_of_another_run_is_refused_with_what_differs(tmp_path: Path) -> None:
    kept = save_one("memory", tmp_path)
    for options, message in (
        ({"seed": 4}, "resume_from_checkpoint=.*of another run: numerics was .*'seed': 3.*, is .*'seed': 4"),
        ({"optimizer": AdamW(lr=1.0, betas=(0.5, 0.9))}, "of another run: optimizer was"),
        ({"dtype": "fp32"}, "of another run: numerics was"),
    ):
        with pytest.raises(OptionError, match=message):
            open_run("defer 1", tmp_path, checkpoint=kept, **options)
    assert not (tmp_path / "drive 0").exists()


def test_a_flipped_bit_anywhere_is_found_before_the_run_begins(tmp_path: Path) -> None:
    kept = save_one("memory", tmp_path)
    whole, layout = (kept / "planes").read_bytes(), read_manifest(kept).layout
    places = [piece.offset + piece.nbytes // 2 for piece in layout.pieces()]
    assert len(places) > 15 and {piece.plane for piece in layout.pieces()} == {0, 1, 2, 3}
    for place in places[:: len(places) // 7]:
        (kept / "planes").write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        with pytest.raises(CheckpointError, match="planes at byte .* unit .*: not what was written there"):
            open_run("defer 1", tmp_path, checkpoint=kept)
    (kept / "planes").write_bytes(whole[:-4096])
    with pytest.raises(CheckpointError, match=f"it has {len(whole) - 4096} bytes, and should have {len(whole)}"):
        open_run("defer 1", tmp_path, checkpoint=kept)
    (kept / "planes").write_bytes(whole)
    with open_run("defer 1", tmp_path, checkpoint=kept) as engine:
        assert engine.num_steps == SAVED_AT


def test_what_cannot_be_read_back_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drive says that all went well, and it did not: the folder never takes its name, and the one before stays."""
    kept = save_one("memory", tmp_path)
    before = read_manifest(kept)
    transfer = planes.transfer

    def loses(action: str, call: Any, file: Any, offset: int, buffer: memoryview) -> None:
        if action == "read" or offset == 0:
            transfer(action, call, file, offset, buffer)

    with open_run("memory", tmp_path, checkpoint=kept) as engine:
        engine.step(steps()[SAVED_AT])
        monkeypatch.setattr(planes, "transfer", loses)
        with pytest.raises(CheckpointError, match="not what was written there"):
            engine.save_state(kept)
        monkeypatch.undo()
        assert read_manifest(kept).identity == before.identity
        assert [path.name for path in tmp_path.iterdir()] == ["kept"]
        engine.save_state(kept)
    assert read_manifest(kept).step == SAVED_AT + 1
