"""The drive behind a folder: from the folder to its mount, to the block device, through encryption and RAID, to the hardware.

folder   the longest mount point above it (/proc/self/mountinfo)
mount    filesystem and source; memory, the network and a container's own layer are no drives
device   /sys/dev/block by number, or by the source's name where a filesystem numbers itself (btrfs)
leaves   what dm-crypt, LVM and md are made of, down to drives: model, kind, PCI link, age
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from lohan.machine.findings import Finding, Level, gb
from lohan.machine.pci import Link, link_findings, read_link
from lohan.machine.system import System
from lohan.machine.wear import Wear, read_wear, wear_findings

MEMORY_FILESYSTEMS = ("tmpfs", "ramfs")
NETWORK_FILESYSTEMS = ("nfs", "nfs4", "cifs", "smb3", "9p", "virtiofs", "fuse.sshfs", "ceph", "lustre", "beegfs")
LITTLE_BYTES = 20 * 10**9
"""of free space: the state of a model of a billion parameters takes 12 to 14 GB"""
_VIRTUAL = ("vd", "xvd", "QEMU", "VMware", "Virtual")
"""how virtual disks are called: most of them claim to spin"""
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Disk:
    """One piece of hardware."""

    device: str
    """nvme0n1"""
    model: str
    spins: bool
    link: Link | None
    wear: Wear | None


@dataclass(frozen=True, slots=True)
class Drive:
    """What a folder's bytes end up on."""

    folder: Path
    filesystem: str
    source: str
    free_bytes: int
    total_bytes: int
    layers: tuple[str, ...]
    """between filesystem and disks: crypt, raid0, lvm"""
    disks: tuple[Disk, ...]
    """empty where the system does not tell"""

    @property
    def area(self) -> str:
        return f"drive {shown(self.folder)}"


def shown(folder: Path) -> str:
    """A path for a report that others may read: without the user's name."""
    home = Path.home()
    return (
        f"~/{folder.relative_to(home)}" if home != Path("/") and folder.is_relative_to(home) and folder != home else str(folder)
    )


def find_drive(system: System, folder: Path) -> Drive:
    """The drive of a folder, which need not exist yet."""
    real = Path(os.path.realpath(folder))
    number, mount_type, source = _mount(system, real)
    layers: list[str] = []
    disks = tuple(_disk(system, device) for device in _leaves(system, _block(system, number, source), layers))
    space = os.statvfs(_existing(real))
    free, total = space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize
    return Drive(folder, mount_type, source, free, total, tuple(dict.fromkeys(layers)), disks)


def drive_findings(drive: Drive, rated_bytes: int | None) -> Iterator[Finding]:
    """All that can be said without writing."""
    yield from _disk_findings(drive, rated_bytes)
    yield _filesystem(drive)
    if drive.layers:
        yield Finding(drive.area, "layers", ", ".join(drive.layers), *_layer_notes(drive.layers))
    free = f"{gb(drive.free_bytes)} of {gb(drive.total_bytes)}"
    if drive.free_bytes < LITTLE_BYTES:
        wrong = "A model's state takes 12 to 14 bytes for each of its parameters, and activations come on top."
        yield Finding(drive.area, "free", free, Level.WARNING, wrong, "Free space there, or name a folder on another drive")
    else:
        yield Finding(drive.area, "free", free)


def shared_findings(drives: Sequence[Drive]) -> Iterator[Finding]:
    """Folders that are thought to be on different drives, and are not."""
    seen: dict[str, Drive] = {}
    for drive in drives:
        for disk in drive.disks:
            first = seen.setdefault(disk.device, drive)
            if first is not drive:
                yield Finding(
                    drive.area,
                    "shares",
                    f"{disk.device} with {shown(first.folder)}",
                    Level.WARNING,
                    "Both folders are on the same drive: it moves the bytes of both, and has to jump between them.",
                    "Name one folder on each drive",
                )


def _disk_findings(drive: Drive, rated_bytes: int | None) -> Iterator[Finding]:
    for disk in drive.disks:
        if disk.spins:
            wrong = "A disk that spins moves 0.1 to 0.3 GB/s, and far less when it reads and writes at once."
            yield Finding(
                drive.area, "device", f"{disk.model} ({disk.device})", Level.WARNING, wrong, "Name a folder on an SSD"
            )
        else:
            yield Finding(drive.area, "device", f"{disk.model} ({disk.device})")
        if disk.device.startswith("nvme"):
            yield from link_findings(drive.area, disk.link)
        yield from wear_findings(drive.area, disk.wear, rated_bytes, is_known=not disk.device.startswith("vd"))
    if not drive.disks:
        yield Finding(
            drive.area, "device", "not told by this machine", Level.NOTE, f"The source of the mount is {drive.source}."
        )


def _filesystem(drive: Drive) -> Finding:
    area, kind = drive.area, drive.filesystem
    if kind in MEMORY_FILESYSTEMS:
        wrong = "This folder is in RAM: state kept there frees no memory, and is gone when the machine stops."
        return Finding(area, "filesystem", kind, Level.PROBLEM, wrong, "Name a folder on an SSD, with ext4 or XFS")
    if kind in NETWORK_FILESYSTEMS:
        wrong = "This folder is on another machine: its network bounds every step."
        return Finding(area, "filesystem", kind, Level.WARNING, wrong, "Name a folder on a drive of this machine")
    if kind == "overlay":
        wrong = "This folder is in a container's own layer: it is slower than the drive below, and gone with the container."
        return Finding(area, "filesystem", kind, Level.WARNING, wrong, "Mount a folder of the host: docker run -v /nvme:/nvme")
    if kind in ("btrfs", "bcachefs", "zfs"):
        wrong = (
            f"{kind} copies on write and adds checksums, through the page cache in some versions: slower, and more is written."
        )
        remedy = "On btrfs: chattr +C on the empty folder before the first run" if kind == "btrfs" else "ext4 or XFS are faster"
        return Finding(area, "filesystem", kind, Level.NOTE, wrong, remedy)
    return Finding(area, "filesystem", kind)


def _layer_notes(layers: Sequence[str]) -> tuple[Level, str]:
    if "crypt" in layers:
        return Level.NOTE, "Encryption takes time of the cores for every byte that is read or written."
    return Level.OK, ""


def _mount(system: System, folder: Path) -> tuple[str, str, str]:
    """Device number, filesystem and source of the mount that a folder is in: the last and longest above it."""
    best, found = -1, ("", "unknown", "unknown")
    for line in (system.text("proc/self/mountinfo") or "").splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, source, *_) = before.split(" "), after.split(" ")
        point = _ESCAPE.sub(lambda match: chr(int(match[1], 8)), fields[4])
        if folder.is_relative_to(point) and len(point) >= best:
            best, found = len(point), (fields[2], kind, source)
    return found


def _block(system: System, number: str, source: str) -> Path | None:
    """The folder of a block device in /sys."""
    for path in (system.path(f"sys/dev/block/{number}"), _named(system, source)):
        if path is not None and path.exists():
            return path.resolve()
    return None


def _named(system: System, source: str) -> Path | None:
    if not source.startswith("/dev/"):
        return None
    return system.path(f"sys/class/block/{Path(os.path.realpath(system.path(source))).name}")


def _leaves(system: System, block: Path | None, layers: list[str]) -> Iterator[Path]:
    """The disks under a block device, and what lies between."""
    if block is None:
        return
    if (block / "partition").exists():
        block = block.parent
    slaves = sorted(block.glob("slaves/*"))
    if slaves:
        uuid = system.text(block / "dm/uuid") or ""
        layers.append(system.text(block / "md/level") or uuid.partition("-")[0].lower() or block.name)
    for slave in slaves:
        yield from _leaves(system, slave.resolve(), layers)
    if not slaves:
        yield block


def _disk(system: System, block: Path) -> Disk:
    model = system.text(block / "device/model") or ("virtual disk" if block.name.startswith("vd") else "unknown model")
    addresses = _PCI_ADDRESS.findall(str(block.resolve()))
    link = read_link(system, addresses[-1]) if block.name.startswith("nvme") and addresses else None
    is_virtual = any(name.startswith(_VIRTUAL) for name in (block.name, model))
    spins = system.number(block / "queue/rotational") == 1 and not is_virtual
    return Disk(block.name, model, spins, link, read_wear(system, block.name))


def _existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder, *folder.parents) if os.path.exists(path))
