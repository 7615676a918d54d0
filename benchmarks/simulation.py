"""How far the simulated step time is from the real one: six settings, lanes measured alone in the same run.

    python benchmarks/simulation.py                      the bar: within 10% in each
    python benchmarks/simulation.py --shape tiny --rounds 1         the same on another shape: shows that it runs

The settings differ in what limits a step (computing, the drive, both), in when updates run, and in the buffers that the plan
has: less host memory means smaller chunks and fewer weights kept in RAM. `step.py` says how steps and lanes take turns.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

from figures import Figure, publish
from models import SHAPES, add_folders
from quiet import quiet
from step import Setting, counted_steps, show

SETTINGS = (
    Setting("374m", 1, 512, "never", "2GiB"),
    Setting("374m", 1, 512, "always", "2GiB"),
    Setting("374m", 1, 512, "never", "200MiB"),
    Setting("374m", 2, 512, "always", "200MiB"),
    Setting("396m-wide", 1, 512, "never", "600MiB"),
    Setting("396m-wide", 2, 512, "always", "1GiB"),
)
BAR = 0.10


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folders(parser)
    parser.add_argument("--shape", choices=SHAPES, help="instead of the settings' own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="counted in each round")
    options = parser.parse_args()
    figures, settings = [], []
    for setting in SETTINGS:
        setting = replace(setting, shape=options.shape or setting.shape)
        _, details = show(setting, list(counted_steps(setting, options)))
        error = details["simulation_error"]
        assert isinstance(error, float)
        figures.append(Figure(f"simulated against real step, {setting}", abs(error), BAR))
        settings.append(details)
    publish("simulation", figures, settings=settings)


if __name__ == "__main__":
    main()
