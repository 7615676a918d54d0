"""The page of a report: HTML made of a run, its numbers as JSON for the charts, and the script that draws them.

The page asks for nothing outside itself, and its content security policy allows nothing: only the style and the script that are
in it, known by their hashes. What comes from a run is escaped where it is text, and cannot end the block where it is JSON; were
that to fail, a script among it would still not run.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from lohan.schedule.ops import Lane
from lohan.train.config import TrainingConfig
from lohan.train.report_log import Evaluation, Sample
from lohan.train.report_numbers import Tile, binary_bytes, budget, clip_norm, decimal_bytes, duration, tiles
from lohan.train.report_run import Run
from lohan.train.report_trace import Lanes

MAX_SAMPLES, MAX_SAMPLE_CHARS, MAX_EVALUATIONS = 24, 2000, 200
NUMBER = re.compile(r"\d+")
LANE_NAMES = {lane: lane.value.replace("_", " ").replace("ssd", "SSD") for lane in Lane}


def render(run: Run) -> str:
    """The whole page."""
    style, script = _part("report_page.css"), _part("report_charts.js") + _part("report_timeline.js")
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    name = str(run.settings.get("run_name") or run.folder.resolve().name)
    body = "\n".join(
        [
            f'<header><h1>{_text(name)}</h1><p class="quiet">{_text(_subtitle(run))}</p></header>',
            *(f'<p class="note">{_text(note)}</p>' for note in run.notes),
            _tiles(tiles(run.history, run.settings)),
            '<noscript><p class="note">The charts need JavaScript, which this page brings along.</p></noscript>',
            '<div id="charts"></div>',
            _timeline(run.timelines),
            _section("Samples", _samples(run.history.samples)),
            _section("Evaluation", _evaluations(run.history.evaluations)),
            _section("Settings", _settings(run.settings)),
            f'<footer class="quiet">Written by lohan {_text(version("lohan"))}. This page needs no network.</footer>',
        ]
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<title>{_text(name)} · lohan report</title>
<style>{style}</style>
</head>
<body>
{body}
<script type="application/json" id="data">{embedded(page_data(run))}</script>
<script>{script}</script>
</body>
</html>
"""


def _part(name: str) -> str:
    return (files("lohan.train") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls an inline block."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _text(value: object) -> str:
    return html.escape(str(value))


def _subtitle(run: Run) -> str:
    written_at = datetime.fromtimestamp(run.logged_at_s).astimezone()
    return f"{run.folder} · last logged {written_at:%Y-%m-%d %H:%M}"


# -------------------------------------------------------------------- numbers for the script


def embedded(value: object) -> str:
    """JSON that nothing in it can end, whatever its texts are."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c").replace(">", "\\u003e")


def page_data(run: Run) -> dict[str, Any]:
    """All that the charts show."""
    history, limit = run.history.thinned(), clip_norm(run.settings)
    columns = {name: [_short(value) for value in values] for name, values in history.columns.items()}
    evaluations = [(one.step, _short(one.values.get("eval_loss", math.nan))) for one in history.evaluations]
    return {
        "columns": {name: values for name, values in columns.items() if any(value is not None for value in values)},
        "numSteps": len(run.history),
        "evaluations": evaluations,
        "skippedAt": history.skipped_at[:: len(history.skipped_at) // 2000 + 1],
        "resumedAt": history.resumed_at,
        "clipNorm": limit,
        "budgets": {tier: budget(run.settings, f"{tier}_memory") for tier in ("host", "device")},
        "lanes": [{"key": lane.value, "name": name} for lane, name in LANE_NAMES.items()],
        "timelines": [_timeline_data(timeline) for timeline in run.timelines],
    }


def _short(value: float) -> float | int | None:
    """Whole numbers as they are, others to seven digits; null for what is missing."""
    if not math.isfinite(value):
        return None
    return int(value) if value.is_integer() else float(f"{value:.7g}")


def _timeline_data(timeline: Lanes) -> dict[str, Any]:
    """Bars as numbers: start, end, name, bytes, operations, and the numbers that stand for each # in the name."""
    names: dict[str, int] = {}
    tracks = []
    for track in timeline.tracks:
        bars = []
        for bar in track.bars:
            name = names.setdefault(NUMBER.sub("#", bar.name), len(names))
            place = [_short(round(bar.start_us, 1)), _short(round(bar.end_us, 1))]
            bars.append([*place, name, bar.nbytes, bar.num_ops, *map(int, NUMBER.findall(bar.name))])
        tracks.append({"lane": track.lane.value, "bars": bars})
    return {"name": timeline.name, "endUs": timeline.end_us, "names": list(names), "tracks": tracks}


# -------------------------------------------------------------------- parts


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>\n{content}\n</section>" if content else ""


def _tiles(made: Sequence[Tile]) -> str:
    parts = []
    for tile in made:
        share = "" if tile.share is None else _share(tile.share)
        parts.append(
            f'<div class="tile"><dt>{_text(tile.label)}</dt><dd>{_text(tile.value)}</dd>'
            f"{share}<dd>{_text(tile.detail)}</dd></div>"
        )
    return f'<dl class="tiles">{"".join(parts)}</dl>'


def _share(share: float) -> str:
    """A bar as long as the part of the budget that was used."""
    width = 100 * min(1.0, share)
    bar = f'<rect width="{width:.4g}" height="1"/>'
    return f'<dd><svg class="share" viewBox="0 0 100 1" preserveAspectRatio="none">{bar}</svg></dd>'


def _timeline(timelines: Sequence[Lanes]) -> str:
    if not timelines:
        return ""
    about = "What every lane did in one step. Drag to zoom, double-click for all of it."
    return _section("A step in time", f'<p class="quiet">{about}</p><div id="timeline"></div>\n{_lanes_table(timelines)}')


def _lanes_table(timelines: Sequence[Lanes]) -> str:
    """A row for each lane; the work is the same in all timelines, the time is not."""
    header = ["lane", "operations", "moved"]
    for timeline in timelines:
        header += [f"busy, {timeline.name}", "of the step", "while busy"]
    table = []
    for lane, name in LANE_NAMES.items():
        rows = [next((row for row in timeline.rows if row.lane is lane), None) for timeline in timelines]
        if (one := next((row for row in rows if row is not None), None)) is None:
            continue
        cells = [name, f"{one.num_ops:,}", decimal_bytes(one.nbytes) if one.nbytes else ""]
        for timeline, row in zip(timelines, rows, strict=True):
            if row is None or not row.busy_s:
                cells += ["", "", ""]
                continue
            rate = f"{decimal_bytes(row.nbytes / row.busy_s)}/s" if row.nbytes else ""
            cells += [duration(row.busy_s), f"{row.busy_s * 1e6 / timeline.end_us:.0%}", rate]
        table.append(cells)
    return _table(header, table, "numbers")


def _samples(samples: Sequence[Sample]) -> str:
    """The last ones first: they say what the model has become."""
    shown = [
        f'<article class="sample"><h3>after step {sample.step:,}</h3>'
        f'<pre dir="auto"><b>{_text(_cut(sample.prompt))}</b>\n{_text(_cut(sample.text))}</pre></article>'
        for sample in reversed(spread(samples, MAX_SAMPLES))
    ]
    left_out = len(samples) - len(shown)
    note = f'<p class="quiet">{left_out:,} more are in log.jsonl.</p>' if left_out else ""
    return "\n".join(shown) + note if shown else ""


def _cut(text: str) -> str:
    more = len(text) - MAX_SAMPLE_CHARS
    return text if more <= 0 else f"{text[:MAX_SAMPLE_CHARS]} … ({more:,} more characters are in log.jsonl)"


def _evaluations(evaluations: Sequence[Evaluation]) -> str:
    names = list(dict.fromkeys(name for one in evaluations for name in one.values))
    lowest = {name: min((one.values.get(name, math.inf) for one in evaluations), default=math.inf) for name in names}
    kept = [one for one in evaluations if one.values.get("eval_loss") == lowest.get("eval_loss")][:1]
    shown = sorted({id(one): one for one in [*spread(evaluations, MAX_EVALUATIONS), *kept]}.values(), key=lambda one: one.step)
    rows = [[f"{one.step:,}", *(_plain(one.values.get(name, math.nan)) for name in names)] for one in shown]
    return _table(["after step", *names], rows, "numbers") if rows else ""


def _plain(value: float) -> str:
    return f"{value:.5g}" if math.isfinite(value) else "–"


def spread(items: Sequence[Any], most: int) -> list[Any]:
    """So many of them, evenly, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def _settings(settings: Mapping[str, Any]) -> str:
    """What was set first; what was left at its default behind a click."""
    defaults = {field.name: field.default for field in fields(TrainingConfig)}
    chosen: list[list[str]] = []
    usual: list[list[str]] = []
    for name, value in settings.items():
        is_default = name in defaults and defaults[name] == (tuple(value) if isinstance(value, list) else value)
        (usual if is_default else chosen).append([name, _value(name, value)])
    rest = f"<details><summary>{len(usual)} at their defaults</summary>{_table([], usual)}</details>" if usual else ""
    return (_table([], chosen) if chosen else "") + rest


def _value(name: str, value: object) -> str:
    if isinstance(value, list):
        return "\n".join(map(str, value))
    nbytes = budget({name: value}, name) if name.endswith("_memory") and isinstance(value, int) else None
    return binary_bytes(nbytes) if nbytes else "none" if value is None else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "words") -> str:
    head = f"<thead><tr>{''.join(f'<th>{_text(cell)}</th>' for cell in header)}</tr></thead>" if header else ""
    lines = "\n".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}">{head}<tbody>\n{lines}\n</tbody></table></div>'
