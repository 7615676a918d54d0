"""One examination of a machine: everything that is looked at, in the order in which it is known.

    told       what the system tells at once: processor, versions, memory, GPUs, drives
    measured   what takes torch and seconds: memory, kernels, each GPU, each drive now and with its write cache full
    trained    with selftest: a tiny model on every device, in memory and from the SSD, compared bit for bit

What cannot be measured is a finding like any other: one broken part does not hide the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from lohan.errors import LohanError
from lohan.machine import gpus as gpu
from lohan.machine import processor as cpu
from lohan.machine.console import Console
from lohan.machine.drives import MEMORY_FILESYSTEMS, Drive, find_drive, shared_findings
from lohan.machine.findings import Finding, Level, failed
from lohan.machine.machine import DriveRates, GpuRates, HostRates, Machine
from lohan.machine.memory import memory_findings, read_memory
from lohan.machine.pci import link_findings, read_link
from lohan.machine.rate_findings import AREA as RATES
from lohan.machine.rate_findings import (
    gpu_rate_findings,
    host_findings,
    is_busy,
    kernel_finding,
    load_findings,
)
from lohan.machine.software import AREA as SOFTWARE
from lohan.machine.software import read_software, software_findings
from lohan.machine.system import System

FORMAT = 1
"""of the JSON"""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for."""

    folders: tuple[Path, ...] = ()
    """one on each drive; none: the current folder, whose drive is not written to for long"""
    rated_bytes: tuple[int | None, ...] = (None,)
    """for each folder, what its drive is rated for"""
    quick: bool = False
    selftest: bool = False


class Examination:
    """What was found, and the machine in numbers."""

    def __init__(self, request: Request, console: Console, system: System | None = None) -> None:
        self.findings: list[Finding] = []
        self.machine: Machine | None = None
        self._request, self._console, self._system = request, console, system or System()

    def run(self) -> None:
        """All of it."""
        if self._request.selftest:
            self._console.line("```text")
        system, folders = self._system, self._request.folders or (Path.cwd(),)
        processor = cpu.read_processor(system)
        self._show(cpu.processor_findings(processor))
        self._show(software_findings(read_software()))
        with self._console.doing("asking for GPUs and drives"):
            cards = gpu.find_gpus(system)
            drives = [find_drive(system, folder) for folder in folders]
        memory = read_memory(system)
        self._show(memory_findings(memory, has_gpu=bool(cards)))

        self.machine = Machine(processor.cores, memory.limit_bytes, memory.available_bytes)
        if self._imports("torch"):
            host = self._measure_host(processor)
            gpus = self._measure_gpus(cards)
            rates = self._measure_drives(drives)
            self._show(shared_findings(drives))
            self.machine = replace(self.machine, host=host, drives=tuple(rates), gpus=tuple(gpus))
            if self._request.selftest and self._imports("transformers", "lohan.engine"):
                self._selftest(drives, len(gpus))
        self._summarise()

    def num(self, level: Level) -> int:
        return sum(finding.level is level for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For --json."""
        findings = [{**asdict(finding), "level": finding.level.value} for finding in self.findings]
        counts = {level.value: self.num(level) for level in Level}
        machine = None if self.machine is None else asdict(self.machine)
        return {"format": FORMAT, "counts": counts, "findings": findings, "machine": machine}

    def _imports(self, *modules: str) -> bool:
        """Whether they can be imported; a finding if not."""
        for module in modules:
            with self._console.doing(f"importing {module}"):
                try:
                    import_module(module)
                except (ImportError, OSError, LohanError) as error:
                    self._fail(
                        SOFTWARE, module, error, "Install lohan anew in an environment of its own: it says what it needs"
                    )
                    return False
        return True

    # ---------------------------------------------------------------- measured

    def _measure_host(self, processor: cpu.Processor) -> HostRates:
        with self._console.doing("measuring memory, kernels and matrix products"):
            try:
                from lohan import native
                from lohan.machine.rates import host_rates, num_threads

                text = self._system.text("proc/loadavg")
                load = float(text.split()[0]) if text else None
                rates = host_rates(processor.cores)
            except (LohanError, RuntimeError) as error:
                self._fail(RATES, "kernels", error, "Install lohan anew where there is a C++ compiler: pip install -e .")
                return HostRates()
        self._show(load_findings(load, processor.cores, num_threads()))
        self._show([kernel_finding(native.INSTRUCTION_SETS)])
        self._show(host_findings(rates, processor.cores, busy=is_busy(load, processor.cores)))
        return rates

    def _measure_gpus(self, cards: Sequence[gpu.Gpu]) -> list[GpuRates]:
        """Of the GPUs that torch can use; of the others their links, as they idle."""
        from torch import version

        from lohan.device import cuda

        num = cuda.num_gpus()
        self._show(gpu.torch_findings(cards, gpu.TorchGpus(version.cuda or version.hip, num)))
        for place, card in enumerate(cards):
            self._show(gpu.gpu_findings(gpu.area_of(place), card))
            if not num:
                self._show(link_findings(gpu.area_of(place), card.link))
        addresses, rates = [card.address for card in cards], []
        for index in range(num):
            address = cuda.pci_address(index) or (addresses[index] if index < len(addresses) else "")
            place = addresses.index(address) if address in addresses else index
            if (measured := self._measure_gpu(index, address, gpu.area_of(place))) is not None:
                rates.append(measured)
        return rates

    def _measure_gpu(self, index: int, address: str, area: str) -> GpuRates | None:
        from lohan.device import open_device
        from lohan.machine.rates import gpu_rates

        with self._console.doing(f"measuring {area}: copies and matrix products"):
            try:
                device = open_device(f"cuda:{index}", None)
                try:
                    name = str(device.describe()["gpu"])
                    rates, link = gpu_rates(device, name, lambda: read_link(self._system, address))
                finally:
                    device.close()
            except (LohanError, RuntimeError) as error:
                self._fail(
                    area,
                    "copies",
                    error,
                    "End other programs on the card (nvidia-smi lists them), raise memlock, restart the machine",
                )
                return None
        self._show(link_findings(area, link))
        self._show(gpu_rate_findings(area, rates))
        return rates

    def _measure_drives(self, drives: Sequence[Drive]) -> list[DriveRates]:
        from lohan.machine.drive_visit import DriveVisit

        is_named = bool(self._request.folders)
        visit = DriveVisit(self._console, self._show, is_named, is_named and not self._request.quick)
        return [visit.examine(*pair) for pair in zip(drives, self._request.rated_bytes, strict=True)]

    # ---------------------------------------------------------------- trained

    def _selftest(self, drives: Sequence[Drive], num_gpus: int) -> None:
        from lohan.machine import selftest
        from lohan.machine.drive_rates import scratch

        usable = [drive for drive in drives if drive.filesystem not in MEMORY_FILESYSTEMS]
        if not usable:
            remedy = "Run it in a folder on an SSD, or name one with --ssd"
            self._show([Finding(selftest.AREA, "drive", "none", Level.PROBLEM, "There is no drive to train from.", remedy)])
            return
        selftest.use_fixed_workspaces()
        devices = ["cpu", "emulated", *(f"cuda:{index}" for index in range(num_gpus))]
        try:
            with scratch(usable[0].folder) as folder, self._console.doing("self-test"):
                self._show(selftest.selftest(devices, folder, self._console.tell))
        except OSError as error:
            self._fail(selftest.AREA, "drive", error, "Name a folder that you may write to, with --ssd")

    # ---------------------------------------------------------------- telling

    def _show(self, findings: Iterable[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            self._console.show(finding)

    def _fail(self, area: str, name: str, error: Exception, remedy: str) -> None:
        self._show([failed(area, name, error, remedy)])

    def _summarise(self) -> None:
        levels = (Level.PROBLEM, Level.WARNING, Level.NOTE)
        counts = [f"{num} {level.value}{'s' if num > 1 else ''}" for level in levels if (num := self.num(level))]
        self._console.line(f"\n{', '.join(counts) or 'Nothing is wrong'}.")
        if self._request.selftest:
            self._console.line("```")
            self._console.announce("Everything between the two lines of ``` can be pasted into an issue.")
