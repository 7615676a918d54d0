"""Timelines as a trace that ui.perfetto.dev and chrome://tracing open (the Trace Event Format, JSON).

One process for each timeline, so that measured and simulated lie below each other; one track for each lane, and a further one
for operations that a lane has in flight at once, because slices of one track must not cross; one counter of bytes in flight
for each lane that moves bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from lohan.schedule.ops import Lane
from lohan.simulate.timeline import Span

Event = dict[str, Any]


def write_trace(timelines: Mapping[str, Sequence[Span]], path: Path | str) -> None:
    """Write spans to `path`, by the name of the process that shows them: {"measured": spans, "simulated": spans}."""
    # Viewers take a track that is numbered like a process for its main thread, so no number occurs twice.
    tids = count(len(timelines) + 1)
    events = (event for pid, (name, spans) in enumerate(timelines.items(), 1) for event in _process(pid, tids, name, spans))
    with open(path, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        file.write(",\n".join(json.dumps(event) for event in events))
        file.write("\n]}\n")


def _process(pid: int, tids: Iterator[int], name: str, spans: Sequence[Span]) -> Iterator[Event]:
    """All events of one timeline."""
    yield _label("process_name", pid, 0, {"name": name})
    yield _label("process_sort_index", pid, 0, {"sort_index": pid})
    for lane in Lane:
        in_lane = sorted((span for span in spans if span.lane is lane), key=lambda span: (span.start_s, span.op))
        for row, track in enumerate(_tracks(in_lane), 1):
            tid = next(tids)
            yield _label("thread_name", pid, tid, {"name": lane.value if row == 1 else f"{lane.value} ({row})"})
            yield _label("thread_sort_index", pid, tid, {"sort_index": tid})
            yield from (_slice(pid, tid, span) for span in track)
        yield from _bytes_in_flight(pid, lane, in_lane)


def _tracks(spans: Iterable[Span]) -> list[list[Span]]:
    """Spans of a lane, in the order of their starts, dealt to as few tracks as keep them from crossing."""
    tracks: list[list[Span]] = []
    for span in spans:
        free = next((track for track in tracks if track[-1].end_s <= span.start_s), None)
        if free is None:
            tracks.append([span])
        else:
            free.append(span)
    return tracks


def _label(name: str, pid: int, tid: int, args: Event) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": args}


def _slice(pid: int, tid: int, span: Span) -> Event:
    args = {"op": span.op, "bytes": span.nbytes, "waited_us": _us(span.waited_s)}
    # The end is rounded, not the duration: a slice that ends when the next one starts must not reach into it.
    start_us, end_us = _us(span.start_s), _us(span.end_s)
    return {"ph": "X", "name": span.name, "cat": span.lane.value, "pid": pid, "tid": tid, "ts": start_us,
            "dur": round(end_us - start_us, 3), "args": args}  # fmt: skip


def _bytes_in_flight(pid: int, lane: Lane, spans: Iterable[Span]) -> Iterator[Event]:
    """A counter that rises where an operation starts and falls where it completes."""
    moving = [span for span in spans if span.nbytes > 0]
    changes = sorted([(_us(s.end_s), -s.nbytes) for s in moving] + [(_us(s.start_s), s.nbytes) for s in moving])
    num_bytes = 0
    for at_us, change in changes:
        num_bytes += change
        yield {"ph": "C", "name": f"{lane.value} in flight", "pid": pid, "tid": 0, "ts": at_us, "args": {"bytes": num_bytes}}


def _us(seconds: float) -> float:
    """Microseconds, the unit of the format, to the nanosecond."""
    return round(seconds * 1e6, 3)
