"""What measured rates say of a machine. Bars are low on purpose: what is below them is set up wrong, not merely old."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lohan.machine.findings import Finding, Level, gb
from lohan.machine.machine import GpuRates, HostRates

if TYPE_CHECKING:
    from lohan.machine.drive_rates import Rates, Sustained

AREA = "rates"
BUSY = 0.5
"""programs that want to run, for each core"""
SLOW_MEMORY_GBPS = 8.0
"""moved bytes: one channel of DDR4 has more"""
SLOW_DRIVE_GBPS = 1.0
"""an NVMe drive of any age reads faster; SATA ends at 0.55"""
COLLAPSED = 0.5
"""what a drive keeps of its first rate: below it, it is told"""
SLOW_COPY_GBPS = 3.0
"""four lanes of generation 3"""


def is_busy(load: float | None, cores: int) -> bool:
    """Whether other programs take a part of what is measured; `load`: those that want to run."""
    return load is not None and load > BUSY * cores


def load_findings(load: float | None, cores: int, threads: int) -> Iterator[Finding]:
    """What stands in the way of measuring: other programs, and cores that torch was told not to use."""
    if is_busy(load, cores):
        wrong = "Other programs are at work: rates below are what they leave."
        yield Finding(AREA, "load", f"{load:.1f} on {cores} cores", Level.NOTE, wrong)
    if threads < cores:
        wrong = f"torch computes on {threads} threads, and {cores} cores are usable."
        yield Finding(AREA, "torch's threads", str(threads), Level.WARNING, wrong, "Unset OMP_NUM_THREADS and MKL_NUM_THREADS")


def kernel_finding(sets: Sequence[str]) -> Finding:
    """`sets`: lohan's kernels that this processor runs, the fastest last."""
    if len(sets) > 1:
        return Finding(AREA, "kernels", f"{sets[-1]} (of {', '.join(sets)})")
    wrong = "This processor has no vector instructions that lohan has kernels for: updates run on plain ones."
    return Finding(AREA, "kernels", sets[0], Level.NOTE, wrong)


def host_findings(rates: HostRates, cores: int, *, busy: bool) -> Iterator[Finding]:
    """Memory, updates and matrix products of the host. A busy machine is not called slow."""
    if rates.memory_gbps is not None:
        value = f"{rates.memory_gbps:.1f} GB/s moved by a copy"
        if rates.memory_gbps < SLOW_MEMORY_GBPS and not busy:
            wrong = "That is less than one memory channel: updates, and all that passes through RAM, wait for it."
            remedy = "See that the modules fill more than one channel (sudo dmidecode -t memory lists them)"
            yield Finding(AREA, "memory", value, Level.WARNING, wrong, remedy)
        else:
            yield Finding(AREA, "memory", value)
    if rates.adamw_per_s is not None:
        value = f"{rates.adamw_per_s / 1e6:.0f} million parameters/s on one thread"
        if cores > 1 and rates.adamw_all_per_s is not None:
            value += f", {rates.adamw_all_per_s / 1e6:.0f} on {cores}"
        yield Finding(AREA, "AdamW", value)
    if rates.flops is not None:
        yield Finding(AREA, "matrix products", f"{rates.flops / 1e9:.0f} GFLOP/s in bf16")


def gpu_rate_findings(area: str, rates: GpuRates) -> Iterator[Finding]:
    """Copies and matrix products of one GPU."""
    slowest = min((gbps for gbps in (rates.upload_gbps, rates.download_gbps) if gbps is not None), default=None)
    if slowest is not None:
        value = f"{rates.upload_gbps:.1f} GB/s to it, {rates.download_gbps:.1f} GB/s from it"
        if slowest < SLOW_COPY_GBPS:
            wrong = "Weights, gradients and activations cross this link several times a step; a good slot moves 12 to 50 GB/s."
            remedy = "See the link above; in a virtual machine, pass the card through instead of sharing it"
            yield Finding(area, "copies", value, Level.WARNING, wrong, remedy)
        else:
            yield Finding(area, "copies", value)
    if rates.flops is not None:
        yield Finding(area, "matrix products", f"{rates.flops / 1e12:.1f} TFLOP/s in bf16")


def drive_rate_findings(area: str, rates: Rates) -> Iterator[Finding]:
    """A drive at rest."""
    value = f"read {rates.read_gbps:.2f}, write {rates.write_gbps:.2f}, both at once {rates.mixed_gbps:.2f} GB/s"
    slowest = min(rates.read_gbps, rates.write_gbps)
    if slowest < SLOW_DRIVE_GBPS:
        yield Finding(
            area,
            "bandwidth",
            value,
            Level.WARNING,
            f"Training moves all of its state over the drive once a step; at {slowest:.2f} GB/s, {12 / slowest:.0f} s for each "
            "billion parameters.",
            "Look for other programs that use the drive (iotop), a full drive, or heat; else use an NVMe drive in an M.2 slot "
            "with four lanes, or several drives (--ssd DIR DIR)",
        )
    else:
        yield Finding(area, "bandwidth", value)


def sustained_findings(area: str, found: Sustained) -> Iterator[Finding]:
    """A drive that has been written to for long."""
    amount = f"{gb(found.written_bytes)} in {found.seconds:.0f} s"
    value = f"{found.gbps:.2f} GB/s after {amount}"
    if not found.fell:
        yield Finding(area, "steady writing", f"{value}; its write cache, if it has one, was not full")
    elif found.gbps < COLLAPSED * found.first_gbps:
        wrong = f"It began at {found.first_gbps:.2f} GB/s; once its write cache is full, steps take longer than the first ones."
        remedy = "Plan with the steady rate; free space helps, as the cache is made of it"
        yield Finding(area, "steady writing", value, Level.NOTE, wrong, remedy)
    else:
        yield Finding(area, "steady writing", f"{value}, with its write cache full")
