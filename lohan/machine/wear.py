"""How much of a drive's life is used, and how much its maker rated: what `nvme` or `smartctl` tell, if one is installed.

Training from an SSD writes terabytes. NVMe drives count the part of their rated life that is gone (`percentage_used`) and what
was written; the rating itself is in no standard field, so it is worked out from the two, or given with --tbw.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lohan.machine.findings import Finding, Level, gb
from lohan.machine.system import System

UNIT_BYTES = 512_000
"""NVMe counts what is written in thousands of 512-byte sectors"""
OLD = 0.8
"""used part from which a warning is given"""
TELLING = 0.05
"""used part from which the rating can be worked out: the counter has whole percents"""


@dataclass(frozen=True, slots=True)
class Wear:
    """What a drive tells of its age."""

    used: float | None
    """of the rated life; above 1 beyond it"""
    written_bytes: int | None
    is_failing: bool
    """the drive itself raises an alarm"""

    @property
    def rated_bytes(self) -> int | None:
        """Worked out; rough."""
        if self.used is None or self.written_bytes is None or self.used < TELLING:
            return None
        return int(self.written_bytes / self.used)


def read_wear(system: System, device: str) -> Wear | None:
    """What the programs tell of /dev/`device`; None where none is installed or allowed to ask."""
    answer = _json(system.ask(("smartctl", "--json", "--all", f"/dev/{device}")))
    if (log := answer.get("nvme_smart_health_information_log")) is not None:
        return _nvme(log, "data_units_written")
    if "ata_smart_attributes" in answer or "endurance_used" in answer:
        used = answer.get("endurance_used", {}).get("current_percent")
        passed = answer.get("smart_status", {}).get("passed", True)
        return Wear(None if used is None else used / 100, _ata_written(answer), not passed)
    if device.startswith("nvme"):
        log = _json(system.ask(("nvme", "smart-log", "--output-format=json", f"/dev/{device}")))
        return _nvme(log, "data_units_written") if log else None
    return None


def wear_findings(area: str, wear: Wear | None, rated_bytes: int | None, *, is_known: bool) -> Iterator[Finding]:
    """`rated_bytes`: as the user gave it; `is_known`: there is a drive that could tell."""
    if wear is not None and wear.is_failing:
        wrong = "The drive's own self-monitoring raises an alarm: it may fail, or turn read-only, at any time."
        yield Finding(
            area, "health", "failing", Level.PROBLEM, wrong, "Copy what is on it, and replace it (smartctl -a says more)"
        )
    yield _endurance(area, wear, rated_bytes, is_known)


def _endurance(area: str, wear: Wear | None, given_bytes: int | None, is_known: bool) -> Finding:
    rated = given_bytes or (wear.rated_bytes if wear is not None else None)
    words = []
    if wear is not None and wear.written_bytes is not None:
        words.append(f"{gb(wear.written_bytes)} written")
    if wear is not None and wear.used is not None:
        words.append(f"{wear.used:.0%} of its rated life used")
    if rated is not None:
        words.append(f"rated for {'' if given_bytes else 'about '}{gb(rated)}")
    value = ", ".join(words)
    if wear is not None and wear.used is not None and wear.used >= OLD:
        wrong = (
            "Training writes the whole optimizer state once a step; the drive is near, or beyond, what its maker vouches for."
        )
        remedy = "Use another drive, or keep more in RAM (a larger host_memory) so that less is written"
        return Finding(area, "endurance", value, Level.WARNING, wrong, remedy)
    if rated is None:
        give = "--tbw 600 says that its maker rates it for 600 TB written (the data sheet's TBW)."
        ask = "As root, with nvme-cli or smartmontools installed, the drive tells how much of it is used. " if is_known else ""
        return Finding(area, "endurance", value or "unknown", Level.NOTE, ask + give)
    return Finding(area, "endurance", value)


def _nvme(log: Mapping[str, Any], written: str) -> Wear:
    percent = next((log[name] for name in ("percentage_used", "percent_used") if name in log), None)
    units = log.get(written)
    alarm = log.get("critical_warning", 0)
    alarms = alarm.get("value", 0) if isinstance(alarm, dict) else alarm
    return Wear(None if percent is None else percent / 100, None if units is None else int(units) * UNIT_BYTES, bool(alarms))


def _ata_written(answer: Mapping[str, Any]) -> int | None:
    """Attribute 241, in sectors, which most SATA drives have."""
    sector_bytes = int(answer.get("logical_block_size", 512))
    for row in answer.get("ata_smart_attributes", {}).get("table", []):
        if row.get("id") == 241 and row.get("name") == "Total_LBAs_Written":
            return int(row["raw"]["value"]) * sector_bytes
    return None


def _json(text: str | None) -> dict[str, Any]:
    try:
        answer = json.loads(text or "{}")
    except json.JSONDecodeError:
        return {}
    return answer if isinstance(answer, dict) else {}
