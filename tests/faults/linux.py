"""Parts of Linux that make faults: disks in files that lose power or are full, control groups, and strace. They need root."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

EXT4_IOC_SHUTDOWN = 0x8004587D
_NO_LOG_FLUSH = 2
_CGROUPS = Path("/sys/fs/cgroup")

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and control groups need root")
needs_strace = pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")


class Disk:
    """An ext4 filesystem in a file, mounted."""

    def __init__(self, file: Path, at: Path, nbytes: int) -> None:
        self.at = at
        at.mkdir()
        with file.open("wb") as opened:
            opened.truncate(nbytes)
        # No reserved blocks: what the tests need is then what is free.
        _run("mkfs.ext4", "-q", "-F", "-m", "0", str(file))
        self.device = _run("losetup", "--find", "--show", str(file)).strip()
        self.mount()

    @property
    def number(self) -> str:
        """major:minor, as control groups name it."""
        status = os.stat(self.device)
        return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"

    @property
    def free_bytes(self) -> int:
        status = os.statvfs(self.at)
        return status.f_bavail * status.f_frsize

    def mount(self) -> None:
        _run("mount", self.device, str(self.at))

    def cut_power(self) -> None:
        """What the kernel has not written to the device, its journal too, is gone; the filesystem answers no more."""
        folder = os.open(self.at, os.O_RDONLY)
        try:
            fcntl.ioctl(folder, EXT4_IOC_SHUTDOWN, struct.pack("I", _NO_LOG_FLUSH))
        finally:
            os.close(folder)

    def mount_again(self) -> None:
        _run("umount", str(self.at))
        self.mount()

    def close(self) -> None:
        _run("umount", str(self.at))
        _run("losetup", "--detach", self.device)


@contextmanager
def disk(folder: Path, nbytes: int, name: str = "disk") -> Iterator[Disk]:
    made = Disk(folder / f"{name}.ext4", folder / name, nbytes)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def cgroup(controller: str, name: str) -> Iterator[Path]:
    """A control group (version 1), gone again at the end; what is left in it is moved out."""
    root = _CGROUPS / controller
    if not (root / "cgroup.procs").exists():
        pytest.skip(f"no control group {controller} of version 1")
    folder = root / f"lohan-{name}-{os.getpid()}"
    folder.mkdir()
    try:
        yield folder
    finally:
        for pid in (folder / "cgroup.procs").read_text().split():
            (root / "cgroup.procs").write_text(pid)
        folder.rmdir()


@contextmanager
def strace(pid: int, inject: str, log: Path) -> Iterator[None]:
    """Injects into all threads that a process has and will have. Inside, it is in place."""
    calls = inject.split(":")[0]
    command = ["strace", "-f", "-q", "-o", str(log), "-e", f"trace={calls}", "-e", f"inject={inject}", "-p", str(pid)]
    tracer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        until_s = time.monotonic() + 30
        while _tracer_of(pid) != tracer.pid:
            assert tracer.poll() is None and time.monotonic() < until_s, "strace could not attach"
            time.sleep(0.005)
        yield
        tracer.wait(60)
    finally:
        if tracer.poll() is None:
            tracer.kill()
        tracer.wait()


def has_injected(log: Path) -> bool:
    """Whether strace did what it was told to."""
    return "(INJECTED" in log.read_text() or "+++ killed by SIGKILL" in log.read_text()


def _tracer_of(pid: int) -> int:
    match = re.search(r"TracerPid:\s*(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(match[1]) if match else 0


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


_HOG = """
import os, sys
pid, most = int(sys.argv[1]), int(sys.argv[2])
held = []
while os.path.exists(f"/proc/{pid}/fd/0") and len(held) < most:
    held.append(b"x" * 2**20)
"""


def oom_kill(group: Path, pid: int, most_bytes: int = 2**29) -> None:
    """Something else in a memory control group eats what is left, until the kernel ends the process that has most of all."""
    Path(f"/proc/{pid}/oom_score_adj").write_text("500")  # rather than the other one
    used = int((group / "memory.usage_in_bytes").read_text())
    (group / "memory.limit_in_bytes").write_text(str(used + 16 * 2**20))
    command = ["/bin/sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group)]
    subprocess.run([*command, sys.executable, "-S", "-E", "-c", _HOG, str(pid), str(most_bytes >> 20)], timeout=60)
    (group / "memory.limit_in_bytes").write_text("-1")


def num_oom_kills(group: Path) -> int:
    counts = dict(line.split() for line in (group / "memory.oom_control").read_text().splitlines())
    return int(counts["oom_kill"])


def move(group: Path, pid: int) -> None:
    """A process into a control group, with all threads that it will have."""
    (group / "cgroup.procs").write_text(str(pid))


def throttle(group: Path, device: str, rate: int) -> None:
    """Bytes per second, to and from a device, of the processes in a blkio control group; 0: as many as there are."""
    for way in ("read", "write"):
        (group / f"blkio.throttle.{way}_bps_device").write_text(f"{device} {rate}")
