"""What a run writes is counted over its life, and told as a part of the drives': before, at every step, at the end, later."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from lohan import Trainer, TrainingConfig
from lohan.errors import OptionError
from lohan.machine.system import System
from lohan.train.report_log import read_history
from lohan.train.report_numbers import tiles
from lohan.train.run_wear import TB, RunWear, percent, rated_bytes, volume, written_words
from tests.unit.runs import step_record, write_log
from tests.unit.test_train_trainer import InterruptAfter, config
from tests.unit.training import chats, make_model, on_a_drive, steps_of, write_jsonl


@pytest.mark.parametrize(
    "share, text", [(0.5, "50%"), (0.0123, "1.2%"), (0.00034, "0.034%"), (1e-7, "0.00001%"), (0.0, "0%"), (1.504, "150%")]
)
def test_a_share_has_two_digits_that_count(share: float, text: str) -> None:
    assert percent(share) == text


def test_words_before_during_and_after_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    written, clock_s = 0, 1000.0
    monkeypatch.setattr("time.monotonic", lambda: clock_s)
    wear = RunWear(3 * TB, 600 * TB, lambda: written)
    assert wear.forecast(1000, 9 * 10**9) == (
        "SSD: a step writes 9.00 GB at least, 1000 steps 9.00 TB, 1.5% of the 600.00 TB that the drives are rated for"
    )
    written = 10**12  # an import, which no token pays for
    wear.begin_steps()
    written, clock_s = 3 * 10**12, clock_s + 1800
    record = wear.record(4_000_000)
    assert record == {"ssd_total_write_bytes": 6 * TB, "ssd_life_share": 0.01}
    assert written_words(record) == "6.00 TB written (1% of rated life)"
    rates = "4.00 TB an hour and 500.00 GB a million tokens"
    assert wear.summary() == f"6.00 TB written by this run so far, {rates}; 1% of what the drives are rated for"


def test_without_a_rating_the_option_is_named() -> None:
    wear = RunWear(0, None, lambda: 5 * 10**9)
    assert wear.forecast(2, 10**9).endswith("ssd_endurance_tbw says what the drives are rated for")
    assert written_words(wear.record(1)) == "5.00 GB written" and volume(10**13) == "10.00 TB"


# -------------------------------------------------------------------- the rating


def system(root: Path, percent_used: int) -> System:
    """One NVMe drive that tells its age."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text("29 1 259:2 / / rw - ext4 /dev/nvme0n1 rw\n")
    block = root / "sys/block/nvme0n1"
    (block / "queue").mkdir(parents=True)
    (root / "sys/dev/block").mkdir(parents=True)
    (root / "sys/dev/block/259:2").symlink_to(block)
    log = {"nvme_smart_health_information_log": {"percentage_used": percent_used, "data_units_written": 10**8}}

    def ask(command: Sequence[str]) -> str | None:
        return json.dumps(log) if command[0] == "smartctl" else None

    return System(root, ask)


def test_the_rating_is_the_users_or_the_drives(tmp_path: Path) -> None:
    two = TrainingConfig(output_dir="out", ssd=["/a", "/b"], ssd_endurance_tbw=600)
    assert rated_bytes(two) == 2 * 600 * TB
    one = TrainingConfig(output_dir="out")
    assert rated_bytes(one, system(tmp_path / "told", 10)) == 10**8 * 512_000 * 10
    assert rated_bytes(one, system(tmp_path / "young", 0)) is None
    assert rated_bytes(TrainingConfig(output_dir="out", placement="memory", ssd_endurance_tbw=600)) is None
    with pytest.raises(OptionError, match="ssd_endurance_tbw=-1.0"):
        TrainingConfig(output_dir="out", ssd_endurance_tbw=-1)


# -------------------------------------------------------------------- in a run


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    with on_a_drive() as folder:
        make_model(folder / "model")
        write_jsonl(folder / "data.jsonl", chats(20))
        yield folder


def test_a_run_counts_what_all_its_processes_wrote(place: Path, capsys: Any) -> None:
    out = place / "run"
    settings = config(place, out, max_steps=6, ssd_endurance_tbw=0.001, save_steps=3)
    Trainer(args=settings, callbacks=[InterruptAfter(2)]).train()
    told = capsys.readouterr().out
    assert "of the 1.00 GB that the drives are rated for" in told and "% of rated life)" in told
    first = steps_of(out)[-1]["ssd_total_write_bytes"]
    Trainer(args=settings).train()
    assert "SSD        " in capsys.readouterr().out
    lines = steps_of(out)
    totals = [line["ssd_total_write_bytes"] for line in lines]
    assert totals == sorted(totals) and totals[0] > lines[0]["ssd_write_bytes"] > 0
    assert totals[-1] > first + sum(line["ssd_write_bytes"] for line in lines if line["step"] > 4)
    assert all(line["ssd_life_share"] == line["ssd_total_write_bytes"] / 10**9 for line in lines)
    saved = sum(path.stat().st_size for path in (out / "checkpoint-3").rglob("*") if path.is_file())
    by_step = {line["step"]: line["ssd_total_write_bytes"] for line in lines}
    assert by_step[4] - by_step[3] >= saved
    (tile,) = [tile for tile in tiles(read_history(out / "log.jsonl"), {}) if tile.label == "SSD wear"]
    assert tile.value == percent(lines[-1]["ssd_life_share"])


def test_a_report_without_a_rating_has_the_bytes(tmp_path: Path) -> None:
    write_log(tmp_path, [step_record(step, ssd_total_write_bytes=step * 10**9, ssd_life_share=None) for step in (1, 2, 3)])
    (tile,) = [tile for tile in tiles(read_history(tmp_path / "log.jsonl"), {}) if tile.label == "SSD wear"]
    assert tile.value == "3.00 GB" and "an hour" in tile.detail and "ssd_endurance_tbw" in tile.detail
    write_log(tmp_path, [step_record(1, ssd_total_write_bytes=None, ssd_life_share=None)])
    assert "SSD wear" not in [tile.label for tile in tiles(read_history(tmp_path / "log.jsonl"), {})]
