"""How close a training step comes to its busiest lane, and what the simulator says of it.

    python benchmarks/step.py --shape 374m --batch 1 --seq 512           the bar: 1.15 x the busiest lane
    python benchmarks/step.py --shape 1.1b --batch 4 --seq 512           the bar: 1.10 x
    python benchmarks/step.py --shape 374m --clipping always             every step is clipped: updates wait for the norm

One engine. Lanes alone and steps take turns, so that both see the same machine:

    warm up    two steps: both places of every unit on the drive have been written, as blocks that never were read too fast
    a round    every lane alone; one step that is not counted, as it begins with nothing pending; the counted steps

A ratio is a counted step over the busiest lane's work in that step's own schedule, as measured alone in the same round; ratios
are medians over all counted steps. What each lane did is taken from the trace of a round's last step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from figures import Figure, publish
from models import SHAPES, add_folders, make_tokens, model_folder
from quiet import quiet

from lohan import AdamW, Engine
from lohan.report import StepReport
from lohan.schedule.ops import Lane
from lohan.simulate.timeline import LaneUse, Span, Timeline, lane_use

CLIPPING = {"never": 1e9, "sometimes": 1.0, "always": 1e-3}
"""the limit of the gradient's norm"""
NUM_WARM_UP = 2
BARS = {("374m", 1, 512): 1.15, ("1.1b", 4, 512): 1.10}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is run."""

    shape: str
    batch: int
    seq: int
    clipping: str
    host_memory: str
    device: str = "cpu"
    device_memory: str | None = None

    def __str__(self) -> str:
        device = f", {self.device} with {self.device_memory or 'all it has'}" if self.device != "cpu" else ""
        return f"{self.shape} {self.batch}x{self.seq}, clipping {self.clipping}, {self.host_memory}{device}"


@dataclass(frozen=True, slots=True)
class CountedStep:
    """One step with what the simulator made of it."""

    report: StepReport
    simulated: Timeline
    measured: Mapping[Lane, LaneUse] | None
    """of the whole schedule; known for the last step of a round"""

    @property
    def ratio(self) -> float:
        return self.report.step_s / self.simulated.work_s[self.simulated.busiest_lane]

    @property
    def error(self) -> float:
        """of the simulated step, relative to the real one"""
        return self.simulated.step_s / self.report.step_s - 1


def counted_steps(setting: Setting, options: argparse.Namespace) -> Iterator[CountedStep]:
    """The rounds of one setting."""
    folder = model_folder(setting.shape, options.models)
    tokens = torch.tensor(make_tokens(setting.batch, setting.seq))
    batch = {"input_ids": tokens, "labels": tokens}
    options.dir.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as ssd,
        Engine(
            folder,
            ssd=ssd,
            host_memory=setting.host_memory,
            device=setting.device,
            device_memory=setting.device_memory,
            optimizer=AdamW(lr=1e-5),
            max_grad_norm=CLIPPING[setting.clipping],
        ) as engine,
    ):
        for _ in range(NUM_WARM_UP):
            engine.step(batch)
        for _ in range(options.rounds):
            engine.measure_lanes(batch)
            engine.step(batch)
            for number in range(options.steps):
                report = engine.step(batch)
                assert report.simulated is not None, "the lanes were measured"
                is_last = number == options.steps - 1
                yield CountedStep(report, report.simulated, traced_lanes(engine, Path(ssd)) if is_last else None)


def traced_lanes(engine: Engine, folder: Path) -> Mapping[Lane, LaneUse]:
    """What each lane did in the whole of the last step, its last write included, from its trace."""
    path = folder / "trace.json"
    engine.write_trace(path)
    events = json.loads(path.read_text())["traceEvents"]
    measured = next(e["pid"] for e in events if e["name"] == "process_name" and e["args"]["name"] == "measured")
    return lane_use(
        Span(e["args"]["op"], Lane(e["cat"]), e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, 0.0, e["args"]["bytes"])
        for e in events
        if e["ph"] == "X" and e["pid"] == measured
    )


def lane_medians(steps: list[CountedStep]) -> dict[str, dict[str, float]]:
    """Seconds of each lane over the traced steps: alone, busy in the simulation, busy in fact."""
    lanes: dict[str, dict[str, float]] = {}
    for lane in Lane:
        traced = [(step.simulated, step.measured[lane]) for step in steps if step.measured and lane in step.measured]
        if traced:
            lanes[lane.value] = {
                "alone_s": statistics.median(simulated.work_s[lane] for simulated, _ in traced),
                "simulated_busy_s": statistics.median(simulated.lanes[lane].busy_s for simulated, _ in traced),
                "busy_s": statistics.median(use.busy_s for _, use in traced),
                "gb": statistics.median(use.bytes for _, use in traced) / 1e9,
            }
    return lanes


def show(setting: Setting, steps: list[CountedStep]) -> tuple[list[Figure], dict[str, object]]:
    """Print a setting's medians; its figures and details."""
    ratio = statistics.median(step.ratio for step in steps)
    summary = {
        "step_s": statistics.median(step.report.step_s for step in steps),
        "simulated_s": statistics.median(step.simulated.step_s for step in steps),
        "simulation_error": statistics.median(step.error for step in steps),
        "ratio": ratio,
        "ratios": [round(step.ratio, 3) for step in steps],
        "clipped_share": statistics.mean(step.report.clipped for step in steps),
        "tokens_per_s": statistics.median(step.report.tokens / step.report.step_s for step in steps),
        "peak_host_gib": max(step.report.peak_host_bytes for step in steps) / 2**30,
        "peak_device_gib": max(step.report.peak_device_bytes for step in steps) / 2**30,
    }
    lanes = lane_medians(steps)
    busiest = max(lanes, key=lambda lane: lanes[lane]["alone_s"])
    print(f"{setting}: step {summary['step_s']:.2f} s, simulated {summary['simulated_s']:.2f} s; {ratio:.3f} x {busiest}")
    print(f"    {'lane':10} {'alone s':>8} {'simulated busy s':>17} {'busy s':>7} {'GB':>6}")
    for lane, use in lanes.items():
        print(f"    {lane:10} {use['alone_s']:8.2f} {use['simulated_busy_s']:17.2f} {use['busy_s']:7.2f} {use['gb']:6.2f}")
    peaks = f"host {summary['peak_host_gib']:.2f} GiB, device {summary['peak_device_gib']:.2f} GiB at most"
    print(f"    {summary['tokens_per_s']:.0f} tokens/s; {peaks}")
    bar = BARS.get((setting.shape, setting.batch, setting.seq)) if setting.device == "cpu" else None
    figures = [] if bar is None else [Figure(f"step / busiest lane, {setting}", ratio, bar)]
    return figures, {"setting": asdict(setting), **summary, "lanes": lanes}


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folders(parser)
    parser.add_argument("--shape", choices=SHAPES, default="374m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--clipping", choices=CLIPPING, default="never")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--device-memory")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2, help="counted in each round")
    options = parser.parse_args()
    setting = Setting(
        options.shape,
        options.batch,
        options.seq,
        options.clipping,
        options.host_memory,
        options.device,
        options.device_memory,
    )
    figures, details = show(setting, list(counted_steps(setting, options)))
    publish("step", figures, **details)


if __name__ == "__main__":
    main()
