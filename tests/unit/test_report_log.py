"""A report reads whatever a run has left, and a long run keeps its extremes on the page."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path

import pytest

from lohan.schedule.ops import Lane
from lohan.simulate.timeline import Span
from lohan.simulate.trace import write_trace
from lohan.train.report_log import EXTREMES, MAX_ROWS, NUMBERS, History, read_history, share_of
from lohan.train.report_trace import MAX_TRACKS, read_trace
from tests.unit.runs import spans, step_record, write_log


def history_of(folder: Path, records: list[dict[str, object]], end: str = "") -> History:
    return read_history(write_log(folder, records, end) / "log.jsonl")


def test_columns_are_the_numbers_of_the_lines(tmp_path: Path) -> None:
    records = [step_record(step) for step in range(1, 31)]
    columns = history_of(tmp_path, records).columns
    for name in NUMBERS:
        assert list(columns[name]) == [record[name] for record in records]
    assert columns["total_write_bytes"][-1] == sum(record["ssd_write_bytes"] for record in records)
    assert columns["total_tokens"][9] == sum(record["tokens"] for record in records[:10])
    busy_s = records[4]["lanes"]["ssd_write"]["busy_s"]
    assert columns[share_of(Lane.SSD_WRITE)][4] == busy_s / records[4]["step_s"]


@pytest.mark.parametrize("end", ['{"step": 3, "lo', "{", "\x00\x00\x00", '{"step": 3}]', "[" * 100_000, '"step"', "3\n"])
def test_a_torn_line_is_passed_over(tmp_path: Path, end: str) -> None:
    history = history_of(tmp_path, [step_record(1), step_record(2)], end)
    assert list(history.columns["step"]) == [1, 2]
    assert history.broken_lines == [3]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "much", True, {}, 10**400])
def test_what_is_no_number_is_missing(tmp_path: Path, value: object) -> None:
    changed = {name: value for name in step_record(1) if name not in ("step", "loss")}
    columns = history_of(tmp_path, [{"step": 1, "loss": 2.5}, step_record(2, **changed), step_record(3)]).columns
    assert list(columns["loss"])[:1] == [2.5]
    for name in ("grad_norm", "step_s", "speed_of_light", share_of(Lane.COMPUTE)):
        first, second, third = columns[name]
        assert math.isnan(first) and math.isnan(second) and math.isfinite(third)
    assert list(columns["total_write_bytes"]) == [0, 0, step_record(3)["ssd_write_bytes"]]


def test_a_line_of_another_kind_is_no_step(tmp_path: Path) -> None:
    history = history_of(tmp_path, [{"run": "first"}, {"step": -1, "loss": 1.0}, {"step": 4, "note": "saved"}, step_record(5)])
    assert list(history.columns["step"]) == [5]
    assert history.broken_lines == []


def test_evaluations_and_samples_are_found(tmp_path: Path) -> None:
    records = [step_record(1), {"step": 1, "eval_loss": 3.5, "eval_targets": 7}, {"step": 1, "prompt": "a", "sample": "b"}]
    history = history_of(tmp_path, records)
    (evaluation,), (sample,) = history.evaluations, history.samples
    assert (evaluation.step, evaluation.values) == (1, {"eval_loss": 3.5, "eval_targets": 7.0})
    assert (sample.step, sample.prompt, sample.text) == (1, "a", "b")


def test_a_skipped_step_costs_and_is_no_point_of_a_line(tmp_path: Path) -> None:
    records = [step_record(1), step_record(1, skipped=True, loss=None, grad_norm=None), step_record(2)]
    history = history_of(tmp_path, records)
    assert (list(history.columns["step"]), history.skipped_at, history.resumed_at) == ([1, 2], [1], [])
    assert history.columns["total_read_bytes"][-1] == sum(record["ssd_read_bytes"] for record in records)


def test_a_run_that_went_back_shows_what_it_did_then(tmp_path: Path) -> None:
    lost, kept = [step_record(step, loss=9.0) for step in (3, 4, 5)], [step_record(step) for step in (3, 4)]
    history = history_of(tmp_path, [step_record(1), step_record(2), *lost, *kept])
    assert list(history.columns["step"]) == [1, 2, 3, 4]
    assert 9.0 not in history.columns["loss"]
    assert history.resumed_at == [3]
    assert history.columns["total_tokens"][-1] == sum(step_record(step)["tokens"] for step in (1, 2, 3, 4, 5, 3, 4))


# -------------------------------------------------------------------- long runs


def test_thinning_keeps_steps_whole_and_extremes_all(tmp_path: Path) -> None:
    records = [step_record(step) for step in range(1, 10_001)]
    records[4321]["loss"], records[4322]["loss"], records[7000]["grad_norm"], records[123]["step_s"] = 77.5, -3.25, 1e5, 0.001
    history = history_of(tmp_path, records)
    thin = history.thinned()
    assert MAX_ROWS / 3 < len(thin) <= MAX_ROWS < len(history)
    assert (thin.columns["step"][0], thin.columns["step"][-1]) == (1, 10_000)
    for name in EXTREMES:
        assert min(thin.columns[name]) == min(history.columns[name])
        assert max(thin.columns[name]) == max(history.columns[name])
    for row, step in enumerate(thin.columns["step"]):
        assert {name: thin.columns[name][row] for name in NUMBERS} == {name: records[int(step) - 1][name] for name in NUMBERS}


def test_thinning_looks_at_every_stretch(tmp_path: Path) -> None:
    history = history_of(tmp_path, [step_record(step, loss=8 - step / 1000) for step in range(1, 6001)])
    steps = history.thinned(300).columns["step"]
    assert max(later - earlier for earlier, later in pairwise(steps)) <= 2 * 6000 / 30


def test_a_short_run_is_left_alone(tmp_path: Path) -> None:
    history = history_of(tmp_path, [step_record(step) for step in range(1, 100)])
    assert history.thinned() is history


def test_a_smoothed_loss_lags_neither_behind_nor_ahead(tmp_path: Path) -> None:
    history = history_of(tmp_path, [step_record(step, loss=5 - step / 100) for step in range(1, 201)])
    assert list(history.columns["smooth_loss"])[50:150] == pytest.approx(list(history.columns["loss"])[50:150], abs=1e-3)


# -------------------------------------------------------------------- traces


def test_a_trace_becomes_lanes_with_their_bars(tmp_path: Path) -> None:
    write_trace({"measured": spans(8, 0.01), "simulated": spans(8, 0.008)}, tmp_path / "trace.json")
    measured, simulated = read_trace(tmp_path / "trace.json")
    assert (measured.name, simulated.name) == ("measured", "simulated")
    assert measured.end_us == pytest.approx(85_000)
    assert [track.lane for track in measured.tracks] == [Lane.COMPUTE, Lane.SSD_READ, Lane.SSD_READ]
    bar = measured.tracks[0].bars[3]
    assert (bar.name, bar.start_us, bar.end_us, bar.num_ops) == ("forward unit 3 site 3", 30_000, 39_000, 1)
    reads = next(row for row in measured.rows if row.lane is Lane.SSD_READ)
    assert (reads.num_ops, reads.nbytes, reads.busy_s) == (8, 24_000_000, pytest.approx(0.085))


def test_many_short_bars_are_joined_and_nothing_is_lost(tmp_path: Path) -> None:
    write_trace({"measured": spans(9000, 0.001)}, tmp_path / "trace.json")
    (timeline,) = read_trace(tmp_path / "trace.json")
    bars = [bar for track in timeline.tracks for bar in track.bars]
    assert 1000 < len(bars) < 9000
    assert sum(bar.num_ops for bar in bars) == 18_000
    assert sum(bar.nbytes for bar in bars) == 9000 * 3_000_000
    assert bars[0].name.startswith("forward unit 0 site 0 … forward unit ")
    assert {row.lane: row.num_ops for row in timeline.rows} == {Lane.COMPUTE: 9000, Lane.SSD_READ: 9000}


def test_a_long_queue_is_drawn_in_a_few_tracks_and_nothing_is_lost(tmp_path: Path) -> None:
    queue = [Span(number, Lane.SSD_READ, f"read {number}", 0.0, 0.1 * (number + 1), 0.0, 100) for number in range(30)]
    write_trace({"simulated": queue}, tmp_path / "trace.json")
    (timeline,) = read_trace(tmp_path / "trace.json")
    assert [len(track.bars) for track in timeline.tracks] == [1] * (MAX_TRACKS - 1) + [30 - MAX_TRACKS + 1]
    assert sorted(bar.name for track in timeline.tracks for bar in track.bars) == sorted(span.name for span in queue)
    assert [(row.num_ops, row.nbytes) for row in timeline.rows] == [(30, 3000)]


SLICE = {"ph": "X", "name": "forward", "cat": "compute", "pid": 1, "tid": 2, "ts": 0, "dur": 1, "args": {"bytes": 0}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"traceEvents": [',
        "[]",
        '{"traceEvents": 3}',
        '{"traceEvents": [{"ph": "X"}]}',
        json.dumps({"traceEvents": [SLICE | {"cat": "nothing known"}]}),
        json.dumps({"traceEvents": [SLICE | {"ts": math.nan}]}),
        json.dumps({"traceEvents": [SLICE | {"dur": -1}]}),
    ],
)
def test_a_broken_trace_is_refused_with_a_reason(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ValueError, match="not a whole trace"):
        read_trace(tmp_path / "trace.json")
