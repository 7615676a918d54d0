"""One drive from end to end: what the system tells of it, whether a run could use the folder, how fast it is.

A folder that was named is tried as a run would use it. Without one, the current folder only lends its drive: a run would make
a folder of its own there, and nobody asked for minutes of writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from lohan.errors import LohanError, OptionError
from lohan.machine import drive_rates
from lohan.machine.console import Console
from lohan.machine.drives import MEMORY_FILESYSTEMS, Drive, drive_findings, shown
from lohan.machine.findings import Finding, Level, failed, gb
from lohan.machine.machine import DriveRates
from lohan.machine.rate_findings import drive_rate_findings, sustained_findings


@dataclass(frozen=True, slots=True)
class DriveVisit:
    """How a drive is visited."""

    console: Console
    show: Callable[[Iterable[Finding]], None]
    is_named: bool
    """the user named the folder"""
    fills_cache: bool

    def examine(self, drive: Drive, rated_bytes: int | None) -> DriveRates:
        """All findings are shown; returns what is known in numbers."""
        self.show(drive_findings(drive, rated_bytes))
        wears = [disk.wear for disk in drive.disks if disk.wear is not None]
        rated = rated_bytes or next((wear.rated_bytes for wear in wears if wear.rated_bytes), None)
        written = next((wear.written_bytes for wear in wears if wear.written_bytes is not None), None)
        rates = DriveRates(shown(drive.folder), drive.free_bytes, rated_bytes=rated, written_bytes=written)
        if drive.filesystem in MEMORY_FILESYSTEMS:  # told already
            return rates
        try:
            return self._measure(drive, rates)
        except OptionError as error:
            wrong = f"As ssd={shown(drive.folder)} it is refused: {error.reason}."
            self.show([Finding(drive.area, "folder", "refused", Level.PROBLEM, wrong, error.remedy)])
        except (LohanError, OSError) as error:
            remedy = "Name a folder that you may write to; the kernel's log (dmesg) tells of a failing drive"
            self.show([failed(drive.area, "bandwidth", error, remedy)])
        return rates

    def _measure(self, drive: Drive, rates: DriveRates) -> DriveRates:
        area, sizes = drive.area, drive_rates.Sizes()
        if self.is_named:
            drive_rates.try_folder(drive.folder)
        with drive_rates.scratch(drive.folder) as folder, self.console.doing(f"measuring {area}"):

            def tell(what: str) -> None:
                self.console.tell(f"{area}: {what}")

            drive_rates.try_folder(folder)
            self.show([Finding(area, "O_DIRECT", "works")])
            if not (nbytes := sizes.usable(min(drive_rates.FILE_BYTES, drive.free_bytes / 4))):
                wrong = "There is no room for even a small test file."
                self.show([Finding(area, "bandwidth", "not measured", Level.WARNING, wrong, "Free space there")])
                return rates
            now = drive_rates.measure(folder, nbytes, sizes, tell, drive_rates.SECONDS)
            self.show(drive_rate_findings(area, now))
            rates = replace(rates, read_gbps=now.read_gbps, write_gbps=now.write_gbps, mixed_gbps=now.mixed_gbps)
            nbytes = sizes.usable(drive.free_bytes * drive_rates.FREE_PART)
            if self.fills_cache and nbytes:
                limits = f"{gb(nbytes)} ({drive_rates.FREE_PART:.0%} of the free space) and {drive_rates.FILL_S:.0f} s at most"
                self.console.announce(f"{area}: filling its write cache, {limits}; --quick skips this")
                sustained = drive_rates.fill_cache(folder, nbytes, sizes, tell, drive_rates.FILL_S)
                self.show(sustained_findings(area, sustained))
                rates = replace(rates, sustained_write_gbps=sustained.gbps)
            elif not self.is_named:
                how = f"lohan doctor --ssd {shown(drive.folder)} writes until its write cache is full."
                self.show([Finding(area, "steady writing", "not measured", Level.NOTE, how)])
        return rates
