"""PCI Express links: what runs, what the card could do, and what the slot above it could do.

A link has a generation (speed of a lane) and a width (lanes); /sys tells both as they are now. A GPU that idles runs its link
slowly to save power, so its generation counts only if it was read while data moved. A width does not change: a card that could
use 16 lanes and has 4 sits in the wrong slot, or shares its lanes with another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lohan.machine.findings import Finding, Level
from lohan.machine.system import System

GENERATIONS = {"2.5": 1, "5": 2, "8": 3, "16": 4, "32": 5, "64": 6}
"""by GT/s"""
LANE_GBPS = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""each way, after the line's own coding"""


@dataclass(frozen=True, slots=True)
class Link:
    """One device's way to the processor."""

    generation: int
    width: int
    max_generation: int
    max_width: int
    slot_generation: int | None = None
    """the most that the port above it can do"""
    under_load: bool = True
    """read while data moved, or of a device that does not slow its link down"""

    @property
    def gbps(self) -> float:
        """Each way, before the protocol's own share of 5 to 15%."""
        return LANE_GBPS[self.generation] * self.width

    @property
    def possible_generation(self) -> int:
        return min(self.max_generation, self.slot_generation or self.max_generation)

    def __str__(self) -> str:
        return f"generation {self.generation} x{self.width}, {self.gbps:.1f} GB/s each way"


def read_link(system: System, address: str, *, under_load: bool = True) -> Link | None:
    """The link of the PCI device 0000:01:00.0; None where the machine does not tell, as virtual ones do not."""
    device = system.path(f"sys/bus/pci/devices/{address}")
    now, most = _speed_and_width(system, device, "current"), _speed_and_width(system, device, "max")
    if now is None or most is None:
        return None
    slot = _speed_and_width(system, device.resolve().parent, "max")
    return Link(*now, *most, slot[0] if slot else None, under_load)


def link_findings(area: str, link: Link | None) -> Iterator[Finding]:
    """What one link is, against what it could be."""
    if link is None:
        yield Finding(area, "link", "not told by this machine")
        return
    value = str(link)
    if link.width < link.max_width:
        yield Finding(
            area,
            "link",
            f"{value} (of x{link.max_width})",
            Level.WARNING,
            f"The device could use {link.max_width} lanes and has {link.width}: every transfer takes "
            f"{link.max_width / link.width:g} times as long as it could.",
            "Put it into a slot that is wired to the processor with all its lanes, seat it anew, and look in the firmware's "
            "setup for lanes shared with an M.2 slot or a second card",
        )
    elif link.generation < link.possible_generation and link.under_load:
        yield Finding(
            area,
            "link",
            f"{value} (of generation {link.possible_generation})",
            Level.WARNING,
            f"Device and slot could run at generation {link.possible_generation}.",
            "Set the slot to its generation (or auto) in the firmware's setup; a riser or adapter may force it down",
        )
    elif link.generation < link.possible_generation:
        wrong = f"It could run at generation {link.possible_generation}; it may rest now, as it was read while nothing moved."
        yield Finding(area, "link", f"{value} while idle", Level.NOTE, wrong)
    elif link.possible_generation < link.max_generation:
        wrong = f"The device could run at generation {link.max_generation}; its slot cannot."
        yield Finding(area, "link", value, Level.NOTE, wrong)
    else:
        yield Finding(area, "link", value)


def _speed_and_width(system: System, device: Path, which: str) -> tuple[int, int] | None:
    speed, width = system.text(device / f"{which}_link_speed") or "", system.number(device / f"{which}_link_width")
    generation = GENERATIONS.get(speed.split(" ")[0].removesuffix(".0"))
    if generation is None or width is None or not 0 < width <= 32:  # a link that is down tells 0 lanes, or 255
        return None
    return generation, width
