"""`lohan report OUTPUT_DIR`: one page about a run, to open from disk. Imports no torch.

read     log.jsonl, and config.yaml and trace.json where they are; what cannot be read is told on the page
write    OUTPUT_DIR/report.html (or --out), all of it at once: nobody sees half a page
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from lohan.errors import OptionError
from lohan.train.report_page import render
from lohan.train.report_run import Run, read_run

PAGE_NAME = "report.html"


def main(arguments: Sequence[str]) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="lohan report", description="Write one HTML page about a run.")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="the run's folder, output_dir of lohan train")
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"where the page goes; without it OUTPUT_DIR/{PAGE_NAME}")
    options = parser.parse_args(arguments)
    path = options.out or options.output_dir / PAGE_NAME
    print(f"reading {options.output_dir}", flush=True)
    run = read_run(options.output_dir)
    write_report(run, path)
    for note in run.notes:
        print(f"note: {note}")
    print(f"wrote {path}: {path.stat().st_size / 1e3:,.0f} kB, up to step {run.history.columns['step'][-1]:,.0f}")
    print(f"Open it in a browser: {path.resolve().as_uri()}")
    return 0


def write_report(run: Run, path: Path) -> None:
    """The page of a run, as a file."""
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(render(run), encoding="utf-8", errors="replace")
        os.replace(part, path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        reason = f"it cannot be written ({error.strerror})"
        raise OptionError("out", str(path), reason, "Name a file in a folder that you may write to") from error
