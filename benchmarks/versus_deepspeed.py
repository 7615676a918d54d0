"""lohan against DeepSpeed ZeRO-3 with optimizer states on NVMe: the time of a step, and peak memory.

    benchmarks/deepspeed/setup.sh                        once; needs libaio-dev
    python benchmarks/versus_deepspeed.py                374M, 1 x 512 and 4 x 512: bars 1.8 x, 1.2 x, a third of the memory
    python benchmarks/versus_deepspeed.py --rounds 1

The two take turns, each in a fresh process with the machine for itself: a round is one run of lohan (`train.py`) and one of
DeepSpeed (`deepspeed/train.py`). Both train the same weights on the same tokens, in bf16, with AdamW, gradients clipped at 1.0
or, with `--clip 0`, not at all; random weights have large gradients, so at 1.0 every step is clipped, and all updates wait for
the norm. Equal first losses are the proof that both do the same. A run's step time is the median of its steps in the steady
state; reported is the median over rounds, of the ratio too. Memory is VmHWM at the end of a run, summed over its processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from figures import Figure, publish
from models import BENCH_DIR, SHAPES, add_folders, model_folder
from quiet import quiet

HERE = Path(__file__).resolve().parent
SPEED_BARS = {1: 1.8, 4: 1.2}
"""by batch, of 512 tokens each"""
MEMORY_BAR = 1 / 3
SEQ = 512


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one system."""

    first_loss: float
    last_loss: float
    step_s: float
    peak_bytes: int
    clipped_share: float


def run_lohan(batch: int, options: argparse.Namespace) -> Outcome:
    command = [sys.executable, str(HERE / "train.py"), "--shape", options.shape, "--host-memory", options.host_memory]
    command += ["--dir", str(options.dir), "--models", str(options.models), "--clip", str(options.clip)]
    report = run(command, batch, options)
    return Outcome(
        report["losses"][0],
        report["losses"][-1],
        report["step_s"],
        report["peak_bytes"],
        statistics.mean(0 < options.clip < norm for norm in report["grad_norms"]),
    )


def run_deepspeed(batch: int, options: argparse.Namespace) -> Outcome:
    shape = SHAPES[options.shape]
    command = [str(options.deepspeed), str(HERE / "deepspeed" / "train.py"), "--nvme", str(options.dir)]
    command += ["--layers", str(shape.num_layers), "--hidden", str(shape.hidden), "--heads", str(shape.num_heads)]
    command += ["--intermediate", str(shape.intermediate), "--clip", str(options.clip)]
    report = run(command, batch, options)
    steps = report["steps"]
    return Outcome(
        steps[0]["loss"],
        steps[-1]["loss"],
        report["median_s"]["total_s"],
        report["peak_bytes"],
        statistics.mean(0 < options.clip < step["grad_norm"] for step in steps),
    )


def run(command: list[str], batch: int, options: argparse.Namespace) -> Any:
    """The report of one process."""
    with tempfile.NamedTemporaryFile(dir=options.dir, suffix=".json") as report:
        command += ["--batch", str(batch), "--seq", str(SEQ), "--steps", str(options.steps), "--json", report.name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
        return json.loads(Path(report.name).read_text())


def compare(batch: int, options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """All rounds at one batch size."""
    rounds: list[tuple[Outcome, Outcome]] = []
    for number in range(options.rounds):
        rounds.append((run_lohan(batch, options), run_deepspeed(batch, options)))
        for name, one in zip(("lohan", "deepspeed"), rounds[-1], strict=True):
            print(
                f"{options.shape} {batch}x{SEQ}, round {number + 1}, {name:9}: step {one.step_s:6.2f} s, peak "
                f"{one.peak_bytes / 1e9:5.2f} GB, loss {one.first_loss:.3f} -> {one.last_loss:.3f}, "
                f"clipped in {one.clipped_share:.0%} of steps",
                flush=True,
            )
    speed = statistics.median(theirs.step_s / ours.step_s for ours, theirs in rounds)
    memory = statistics.median(ours.peak_bytes / theirs.peak_bytes for ours, theirs in rounds)
    setting = f"{options.shape} {batch}x{SEQ}, " + (f"clipped at {options.clip:g}" if options.clip else "not clipped")
    figures = [
        Figure(f"times as fast as DeepSpeed, {setting}", speed, SPEED_BARS[batch], at_least=True),
        Figure(f"share of DeepSpeed's peak memory, {setting}", memory, MEMORY_BAR),
    ]
    return figures, {"batch": batch, "rounds": [[asdict(one) for one in pair] for pair in rounds]}


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folders(parser)
    parser.add_argument("--shape", choices=SHAPES, default="374m")
    parser.add_argument("--batches", type=int, nargs="+", choices=SPEED_BARS, default=list(SPEED_BARS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6, help="of each run; the first ones are not counted")
    parser.add_argument("--clip", type=float, default=1.0, help="limit of the gradient's norm, for both; 0: none")
    parser.add_argument("--host-memory", default="1GiB", help="lohan's")
    parser.add_argument("--deepspeed", type=Path, default=BENCH_DIR / "deepspeed-venv" / "bin" / "python")
    options = parser.parse_args()
    if not options.deepspeed.exists():
        sys.exit(f"--deepspeed={options.deepspeed}: there is no such Python. Run benchmarks/deepspeed/setup.sh first")
    options.dir.mkdir(parents=True, exist_ok=True)
    model_folder(options.shape, options.models)
    compared = [compare(batch, options) for batch in options.batches]
    publish("versus_deepspeed", [f for figures, _ in compared for f in figures], settings=[details for _, details in compared])


if __name__ == "__main__":
    main()
