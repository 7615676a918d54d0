"""Machines made of files, to examine: a sound one, and what can be wrong with it, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from lohan.machine.findings import Finding, Level
from lohan.machine.system import System

GIB = 2**30
CARD, PORT = "0000:01:00.0", "0000:00:01.0"
DISK_CARD, DISK_PORT = "0000:02:00.0", "0000:00:02.0"
GENERATION_4, GENERATION_3, GENERATION_1 = "16.0 GT/s PCIe", "8.0 GT/s PCIe", "2.5 GT/s PCIe"


class FakeMachine:
    """Sixteen cores, 64 GiB, one NVMe drive under /nvme, huge pages and no limits; everything below `root`."""

    def __init__(self, root: Path) -> None:
        self.root, self.answers = root, dict[str, str]()
        self.write("proc/cpuinfo", "processor : 0\nmodel name\t: Imagined 9000\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
        self.write("proc/self/status", "Name: python\nCpus_allowed_list:\t0-15\n")
        self.write("sys/devices/system/cpu/online", "0-15\n")
        self.write("proc/meminfo", f"MemTotal: {64 * 2**20} kB\nMemAvailable: {48 * 2**20} kB\n")
        self.write("proc/self/mounts", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n")
        self.write("proc/self/cgroup", "0::/user/job\n")
        self.write("proc/self/limits", "Limit  Soft Limit  Hard Limit  Units\nMax locked memory  unlimited  unlimited  bytes\n")
        self.write("proc/loadavg", "0.10 0.20 0.30 1/400 4242\n")
        self.huge_pages("always [madvise] never", "always defer defer+madvise [madvise] never")
        self.mounts("29 1 259:2 / / rw - ext4 /dev/nvme0n1p2 rw", "30 29 259:2 / /nvme rw - ext4 /dev/nvme0n1p2 rw")
        self.pci(DISK_CARD, DISK_PORT, kind="0x010802", vendor="0x144d", width=4)
        self.disk("nvme0n1", f"{DISK_PORT}/{DISK_CARD}", "Imagined SSD 990", "259:2")

    @property
    def system(self) -> System:
        return System(self.root, self.ask)

    def ask(self, command: Sequence[str]) -> str | None:
        return self.answers.get(command[0])

    def write(self, name: str, text: object) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{str(text).rstrip()}\n")

    def huge_pages(self, enabled: str, defrag: str) -> None:
        self.write("sys/kernel/mm/transparent_hugepage/enabled", enabled)
        self.write("sys/kernel/mm/transparent_hugepage/defrag", defrag)

    def mounts(self, *lines: str) -> None:
        self.write("proc/self/mountinfo", "\n".join(lines))

    def cgroup(self, **files: str) -> None:
        for name, text in {"memory_max": "max", "memory_current": str(GIB), "memory_stat": "inactive_file 0", **files}.items():
            self.write(f"sys/fs/cgroup/user/job/{name.replace('_', '.', 1)}", text)

    def pci(
        self,
        address: str,
        port: str,
        *,
        kind: str = "0x030000",
        vendor: str = "0x10de",
        speed: str = GENERATION_4,
        width: int = 16,
        max_speed: str = GENERATION_4,
        max_width: int | None = None,
        port_speed: str = GENERATION_4,
    ) -> None:
        """A device behind a port, as /sys shows them."""
        bus = "sys/devices/pci0000:00"
        now = {"current_link_speed": speed, "current_link_width": width}
        most = {"max_link_speed": max_speed, "max_link_width": max_width or width}
        for name, value in {"class": kind, "vendor": vendor, "device": "0x2684", **now, **most}.items():
            self.write(f"{bus}/{port}/{address}/{name}", value)
        for name, value in {**now, "max_link_speed": port_speed, "max_link_width": 16}.items():
            self.write(f"{bus}/{port}/{name}", value)
        self.link(f"sys/bus/pci/devices/{address}", f"{bus}/{port}/{address}")

    def gpu(self, *, driver: bool = True, **link: object) -> None:
        """An NVIDIA card, and its driver."""
        self.pci(CARD, PORT, **link)  # type: ignore[arg-type]
        if driver:
            self.write("proc/driver/nvidia/version", "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22")
            self.write(f"proc/driver/nvidia/gpus/{CARD}/information", "Model: \t\t NVIDIA Imagined 4090\nIRQ: 60")

    def disk(self, name: str, place: str, model: str, number: str, *, spins: int = 0) -> None:
        """A disk with one partition, whose device number is `number`."""
        folder = f"sys/devices/pci0000:00/{place}/block/{name}"
        self.write(f"{folder}/device/model", model)
        self.write(f"{folder}/queue/rotational", spins)
        self.write(f"{folder}/{name}p2/partition", 2)
        self.link(f"sys/dev/block/{number}", f"{folder}/{name}p2")
        self.link(f"sys/class/block/{name}p2", f"{folder}/{name}p2")

    def stacked(self, name: str, number: str, below: str, files: Mapping[str, str]) -> None:
        """A device made of another: dm-crypt, LVM, md."""
        folder = f"sys/devices/virtual/block/{name}"
        for file, text in files.items():
            self.write(f"{folder}/{file}", text)
        self.link(f"{folder}/slaves/{Path(below).name}", below)
        self.link(f"sys/dev/block/{number}", folder)

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(self.root / target)


def bad(findings: Iterable[Finding]) -> dict[str, Level]:
    """What is not ok, by name."""
    return {finding.name: finding.level for finding in findings if finding.level is not Level.OK}


def one(findings: Iterable[Finding], name: str) -> Finding:
    """The finding of that name."""
    (found,) = [finding for finding in findings if finding.name == name]
    return found
