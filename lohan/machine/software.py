"""Versions: read from what is installed, without importing it."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

from lohan.machine.findings import Finding, Level

AREA = "software"
PACKAGES = ("lohan", "torch", "transformers", "safetensors")
POPULATE_KERNEL = (5, 14)
"""the first that populates memory in one call (MADV_POPULATE_WRITE)"""


@dataclass(frozen=True, slots=True)
class Software:
    """What runs lohan."""

    kernel: str
    python: str
    packages: Mapping[str, str | None]
    """None: not installed"""
    needed: Mapping[str, str]
    """the least version that lohan works with"""


def read_software() -> Software:
    """This process's."""
    return Software(platform.release(), platform.python_version(), {name: _installed(name) for name in PACKAGES}, _needed())


def software_findings(software: Software) -> Iterator[Finding]:
    """Each version, and those that are too old."""
    for name, installed in software.packages.items():
        least = software.needed.get(name)
        remedy = f"pip install --upgrade '{name}{f'>={least}' if least else ''}'"
        if installed is None:
            yield Finding(AREA, name, "not installed", Level.PROBLEM, "lohan does not run without it.", remedy)
        elif least is not None and _numbers(installed) < _numbers(least):
            yield Finding(AREA, name, installed, Level.PROBLEM, f"lohan needs {least} or newer.", remedy)
        else:
            yield Finding(AREA, name, installed)
    yield Finding(AREA, "Python", software.python)
    if _numbers(software.kernel) < POPULATE_KERNEL:
        wrong = "Before Linux 5.14 buffers are populated page by page: a run starts later, and is as fast then."
        yield Finding(AREA, "Linux", software.kernel, Level.NOTE, wrong)
    else:
        yield Finding(AREA, "Linux", software.kernel)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _needed() -> dict[str, str]:
    """From lohan's own metadata: `torch>=2.6`."""
    try:
        lines = requires("lohan") or []
    except PackageNotFoundError:
        return {}
    matches = [re.match(r"([A-Za-z0-9_.-]+)\s*>=\s*([0-9.]+)\s*$", line) for line in lines]
    return {match[1]: match[2] for match in matches if match}


def _numbers(text: str) -> tuple[int, ...]:
    """(2, 13, 0) of 2.13.0+cpu."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(map(int, match[0].split("."))) if match else ()
