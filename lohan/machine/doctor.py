"""`lohan doctor`: what this machine can do, what is wrong with it, and how to mend it.

Exit code 0: no problem; 1: at least one; 2: the command was not understood.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from lohan.errors import OptionError
from lohan.machine.console import Console
from lohan.machine.examination import Examination, Request
from lohan.machine.findings import Level

TB = 10**12
EPILOG = """Each line of the report is ok, a note, a warning or a problem; a warning or a problem says what is wrong, and behind
the arrow how to mend it. Test files have no name and vanish. The exit code is 1 if there is a problem."""


def main(arguments: Sequence[str]) -> int:
    """Examine, print, and say by the exit code whether there is a problem."""
    options = parser().parse_args(arguments)
    request = Request(
        folders=tuple(Path(folder).absolute() for folder in options.ssd),
        rated_bytes=_rated_bytes(options.tbw, len(options.ssd)),
        quick=options.quick,
        selftest=options.selftest,
    )
    with Console(shows=not options.json) as console:
        examination = Examination(request, console)
        examination.run()
    if options.json:
        print(json.dumps(examination.to_dict(), indent=1))
    return 1 if examination.num(Level.PROBLEM) else 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    doctor = argparse.ArgumentParser("lohan doctor", description=(__doc__ or "").partition("\n\n")[0], epilog=EPILOG)
    doctor.add_argument(
        "--ssd",
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="a folder on each drive to use; made and removed if missing. Without it the current folder's drive is looked at, "
        "and its write cache is not filled",
    )
    doctor.add_argument(
        "--quick", action="store_true", help="do not fill the drives' write caches (minutes, and up to 5%% of the free space)"
    )
    doctor.add_argument(
        "--selftest",
        action="store_true",
        help="train a tiny model on every device, in memory and from the SSD, and compare the bits",
    )
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument(
        "--tbw",
        nargs="+",
        action="extend",
        type=float,
        default=[],
        metavar="TB",
        help="terabytes that the maker rates a drive for (TBW on its data sheet): one for all, or one for each --ssd",
    )
    return doctor


def _rated_bytes(tbw: Sequence[float], num_folders: int) -> tuple[int | None, ...]:
    """One for each folder; the current folder is one."""
    num = max(num_folders, 1)
    if any(not rating > 0 for rating in tbw):
        raise OptionError("tbw", list(tbw), "a rating must be positive", "Give terabytes, as on the drive's data sheet")
    if len(tbw) not in (0, 1, num):
        raise OptionError("tbw", list(tbw), f"{len(tbw)} ratings for {num} folders", "Give one for all, or one for each --ssd")
    if not tbw:
        return (None,) * num
    return tuple(int(rating * TB) for rating in (tbw if len(tbw) == num else list(tbw) * num))
