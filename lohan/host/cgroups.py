"""The control groups (v1 or v2) that bound this process: its own, and all above it.

In a container the path that the kernel tells may be the host's and not exist below the mount, which then is our own group: so
folders are named whether they exist or not, and who reads them skips those that do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def folders(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The version (1 or 2) and folder of every group that may limit `controller`, from the process's own up to the root."""
    mounts: dict[int, Path] = {}
    for line in (root / "proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind == "cgroup" and controller in options.split(","):
            mounts.setdefault(1, root / point.lstrip("/"))
        elif kind == "cgroup2":
            mounts.setdefault(2, root / point.lstrip("/"))
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        version = 1 if controller in controllers.split(",") else 2 if controllers == "" else None
        if version in mounts:
            mount = mounts[version]
            for folder in (mount / path.lstrip("/"), *(mount / path.lstrip("/")).parents):
                yield version, folder
                if folder == mount:
                    break
