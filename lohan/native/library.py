"""The shared object built from kernels.cpp: loaded once, with one version of every kernel for each instruction set.

All instruction sets give the same bits, so the fastest that the processor runs is taken; `instruction_set()` forces one,
which is how the tests show that they do.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lohan.errors import NativeError

LIBRARY_PATH = Path(__file__).with_name("libkernels.so")


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(LIBRARY_PATH))
    except OSError as error:
        raise NativeError(f"lohan's kernels cannot be loaded ({error}). Build them with: pip install -e .") from error


def _read_instruction_sets(library: ctypes.CDLL) -> tuple[str, ...]:
    library.lohan_instruction_sets.restype = ctypes.c_char_p
    names: bytes = library.lohan_instruction_sets()
    return tuple(names.decode().split())


_library = _load()

INSTRUCTION_SETS = _read_instruction_sets(_library)
"""those that this processor runs, the fastest last"""

_selected = INSTRUCTION_SETS[-1]


def kernel(name: str, result: type[ctypes.c_double] | None = None) -> Any:
    """The kernel of that name for the selected instruction set; its arguments are ctypes values."""
    function = getattr(_library, f"lohan_{name}_{_selected}")
    function.restype = result
    return function


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Run the kernels on one of INSTRUCTION_SETS in this block, on every thread."""
    global _selected
    if name not in INSTRUCTION_SETS:
        raise NativeError(f"instruction set {name!r} is not one that this processor runs: {', '.join(INSTRUCTION_SETS)}")
    before, _selected = _selected, name
    try:
        yield
    finally:
        _selected = before
