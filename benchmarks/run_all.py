"""Every benchmark, one after the other, and a table of all figures against their bars.

    make bench                                     all of it: about an hour
    python benchmarks/run_all.py --quick           one round of each on smaller models: shows that they run, and little else
    python benchmarks/run_all.py --only step ssd   some of them

Each is a process of its own, whose output passes through and whose last line of JSON has its figures. One that fails, or that
lacks something here, is named in the table and ends nothing. What they put below .bench is removed, models excepted.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import Figure
from models import BENCH_DIR
from quiet import quiet

HERE = Path(__file__).resolve().parent
SSD_BAR, MEMCPY_BAR, IMPORT_BAR = 0.95, 1.3, 1.25


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A command, and what it becomes with `--quick`."""

    script: str
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()
    """further arguments, which override earlier ones"""

    @property
    def name(self) -> str:
        return Path(self.script).stem


ROUND = ("--rounds", "1")
BENCHMARKS = (
    Benchmark("ssd.py", (), (*ROUND, "--size-gib", "1")),
    Benchmark("optimizer.py", (), (*ROUND, "--million", "16")),
    Benchmark("import_export.py", (), (*ROUND, "--layers", "4")),
    Benchmark("import_engine.py", (), (*ROUND, "--shape", "tiny")),
    Benchmark("step.py", ("--shape", "374m", "--batch", "1"), (*ROUND, "--shape", "tiny")),
    Benchmark("step.py", ("--shape", "374m", "--batch", "1", "--clipping", "always"), (*ROUND, "--shape", "tiny")),
    Benchmark("step.py", ("--shape", "1.1b", "--batch", "4", "--rounds", "3", "--steps", "1"), (*ROUND, "--shape", "tiny")),
    Benchmark("simulation.py", (), (*ROUND, "--steps", "1", "--shape", "tiny")),
    Benchmark("memory.py", ("smallest",)),
    Benchmark("memory.py", ("limited",), ("--shape", "tiny")),
    Benchmark("durability.py", (), (*ROUND, "--shape", "tiny")),
    Benchmark("durability.py", ("--shape", "1.1b", "--batch", "4", "--rounds", "2"), (*ROUND, "--shape", "tiny")),
    Benchmark("versus_deepspeed.py", (), (*ROUND, "--steps", "3", "--shape", "tiny")),
    Benchmark("versus_deepspeed.py", ("--clip", "0"), (*ROUND, "--steps", "3", "--shape", "tiny")),
    Benchmark("stranger.py"),
)


def run(benchmark: Benchmark, arguments: list[str]) -> list[Figure] | None:
    """Its figures; None if it failed."""
    print(f"\n--- {benchmark.script} {' '.join(arguments)}", flush=True)
    last = ""
    command = [sys.executable, str(HERE / benchmark.script), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = line
            if not line.startswith("{"):
                print(line, end="", flush=True)
    return figures_of(benchmark.name, json.loads(last)) if process.returncode == 0 and last.startswith("{") else None


def figures_of(name: str, report: dict[str, Any]) -> list[Figure]:
    """From a benchmark's last line; the ones below the engine compare with a tool each, in their own words."""
    match name:
        case "ssd":
            ratios = {action: report[action].get("ratio") for action in ("read", "write", "mixed")}
            return [Figure(f"share of fio, {a}", r, SSD_BAR, at_least=True) for a, r in ratios.items() if r is not None]
        case "optimizer":
            rates = [rate for rate in report["rates"] if rate["kernel"] == "AdamW, split master"]
            return [
                Figure(f"AdamW of memcpy's rate, {rate['threads']} threads", rate["of_memcpy"], MEMCPY_BAR, at_least=True)
                for rate in rates
            ]
        case "import_export":
            return [Figure("reading a checkpoint / plain reading", report["ratios"]["import"], IMPORT_BAR)]
    return [Figure(**figure) for figure in report["figures"]]


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", nargs="+", choices=sorted({one.name for one in BENCHMARKS}), help="these benchmarks")
    parser.add_argument("--dir", type=Path, default=BENCH_DIR, help="a folder on the drive to measure (default: .bench)")
    options = parser.parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    lines = []
    for benchmark in BENCHMARKS:
        if options.only and benchmark.name not in options.only:
            continue
        arguments = [*benchmark.arguments, *(benchmark.quick if options.quick else ())]
        if benchmark.name != "optimizer":
            arguments += ["--dir", str(options.dir)]
        began_s = time.perf_counter()
        figures = run(benchmark, arguments)
        took = f"{benchmark.script} {' '.join(arguments)}, {time.perf_counter() - began_s:.0f} s"
        lines += [took + (": FAILED, see above" if figures is None else ""), *(f"    {figure}" for figure in figures or [])]
    print("\n" + "\n".join(lines))


if __name__ == "__main__":
    main()
