"""A step's trace (what `lohan.simulate.trace` wrote) as few numbers: the timelines that a page draws.

    process  ->  timeline   measured, simulated
    thread   ->  track      one of a lane; a lane has several where its operations are in flight at once
    slice    ->  bar        name, start, duration, bytes

Bars too short to be seen are joined with the next ones of their track until no more than `MAX_BARS` are left; a joined bar says
how many operations it is and how long they took together. A queue of hundreds is as many tracks in a trace; of a lane only
`MAX_TRACKS` are drawn, the last with all bars that are left.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lohan.schedule.ops import Lane
from lohan.simulate.timeline import Span, lane_use

MAX_BARS = 8_000
"""of a timeline"""
MAX_TRACKS = 8
"""of a lane: as many operations as are told apart that are in flight at once"""
MAX_TRACE_BYTES = 2**29
"""of a file that is read at all"""


@dataclass(frozen=True, slots=True)
class Bar:
    """One operation, or several short ones of a track."""

    name: str
    start_us: float
    end_us: float
    busy_us: float
    nbytes: int
    num_ops: int = 1

    def joined(self, other: Bar) -> Bar:
        """This one and a later one."""
        name = self.name.partition(" … ")[0]
        return Bar(
            f"{name} … {other.name}",
            self.start_us,
            other.end_us,
            self.busy_us + other.busy_us,
            self.nbytes + other.nbytes,
            self.num_ops + other.num_ops,
        )


@dataclass(frozen=True, slots=True)
class Track:
    lane: Lane
    bars: Sequence[Bar]


@dataclass(frozen=True, slots=True)
class LaneRow:
    """What a lane did in a step."""

    lane: Lane
    busy_s: float
    waiting_s: float
    nbytes: int
    num_ops: int


@dataclass(frozen=True, slots=True)
class Lanes:
    """A step in time, lane by lane."""

    name: str
    tracks: Sequence[Track]
    rows: Sequence[LaneRow]
    end_us: float


def read_trace(path: Path) -> list[Lanes]:
    """The timelines of a trace. ValueError with the reason if it cannot be read; OSError if there is none."""
    if path.stat().st_size > MAX_TRACE_BYTES:
        raise ValueError(f"it has more than {MAX_TRACE_BYTES} bytes")
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return [timeline for timeline in _timelines(events) if timeline.tracks]
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not a whole trace ({type(error).__name__}: {error})") from error


def _timelines(events: Sequence[dict[str, Any]]) -> list[Lanes]:
    names: dict[int, str] = {}
    bars: dict[int, dict[int, list[Bar]]] = {}
    lane_of: dict[int, Lane] = {}
    for event in events:
        if event["ph"] == "M" and event["name"] == "process_name":
            names[event["pid"]] = str(event["args"]["name"])
        elif event["ph"] == "X":
            lane_of[event["tid"]] = Lane(event["cat"])
            start_us, duration_us = float(event["ts"]), float(event["dur"])
            if not (0 <= start_us < math.inf and 0 <= duration_us < math.inf):
                raise ValueError(f"{event['name']!r} is at {start_us} us for {duration_us} us")
            bar = Bar(str(event["name"]), start_us, start_us + duration_us, duration_us, int(event["args"]["bytes"]))
            bars.setdefault(event["pid"], {}).setdefault(event["tid"], []).append(bar)
    return [_lanes(name, [Track(lane_of[tid], track) for tid, track in sorted(bars.get(pid, {}).items())])
            for pid, name in names.items()]  # fmt: skip


def _lanes(name: str, tracks: list[Track]) -> Lanes:
    end_us = max((bar.end_us for track in tracks for bar in track.bars), default=0.0)
    return Lanes(name, _readable(_folded(tracks), end_us), _rows(tracks), end_us)


def _folded(tracks: Sequence[Track], max_tracks: int = MAX_TRACKS) -> list[Track]:
    """The same bars with so many tracks of a lane at most."""
    folded = []
    for lane in dict.fromkeys(track.lane for track in tracks):
        own = [track for track in tracks if track.lane is lane]
        rest = [bar for track in own[max_tracks - 1 :] for bar in track.bars]
        last = [Track(lane, sorted(rest, key=lambda bar: bar.start_us))] if rest else []
        folded += [*own[: max_tracks - 1], *last]
    return folded


def _rows(tracks: Sequence[Track]) -> list[LaneRow]:
    """The use of every lane, from all its operations."""
    spans = [Span(0, track.lane, bar.name, bar.start_us / 1e6, bar.end_us / 1e6, 0.0, bar.nbytes)
             for track in tracks for bar in track.bars]  # fmt: skip
    num_ops = {lane: sum(len(track.bars) for track in tracks if track.lane is lane) for lane in Lane}
    return [LaneRow(lane, use.busy_s, use.waiting_s, use.bytes, num_ops[lane]) for lane, use in lane_use(spans).items()]


def _readable(tracks: list[Track], end_us: float, max_bars: int = MAX_BARS) -> list[Track]:
    """The same tracks with so many bars at most."""
    shortest_us = end_us / max_bars
    while sum(len(track.bars) for track in tracks) > max_bars and shortest_us < end_us:
        tracks = [Track(track.lane, _join(track.bars, shortest_us)) for track in tracks]
        shortest_us *= 2
    return tracks


def _join(bars: Sequence[Bar], shortest_us: float) -> list[Bar]:
    """Each bar shorter than that takes in those that follow, as far as it stays near that length."""
    joined: list[Bar] = []
    for bar in sorted(bars, key=lambda bar: bar.start_us):
        if joined and bar.end_us - joined[-1].start_us <= 2 * shortest_us:
            joined[-1] = joined[-1].joined(bar)
        else:
            joined.append(bar)
    return joined
