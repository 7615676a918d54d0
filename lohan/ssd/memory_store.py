"""A store in RAM: for tests, and for machines without an SSD. It behaves as the one on drives does, at the speed of memory."""

from __future__ import annotations

import mmap

import numpy as np
from numpy.typing import NDArray

from lohan.ssd.striped import CHUNK_BYTES, NUM_THREADS, STALL_S, STRIPE_BYTES, StripedStore
from lohan.ssd.stripes import Stripes
from lohan.ssd.throttle import Throttle


class MemoryStore(StripedStore):
    """Bytes in anonymous memory, zero at first, populated when written."""

    def __init__(
        self,
        nbytes: int,
        *,
        num_files: int = 1,
        stripe_bytes: int = STRIPE_BYTES,
        threads: int = NUM_THREADS,
        chunk_bytes: int = CHUNK_BYTES,
        stall_s: float = STALL_S,
        throttle: Throttle | None = None,
    ) -> None:
        stripes = Stripes(num_files, stripe_bytes, chunk_bytes)
        self._files = [_anonymous(stripes.file_bytes(nbytes)) for _ in range(num_files)]
        super().__init__(nbytes, stripes, threads=threads, stall_s=stall_s, throttle=throttle)

    # numpy copies without the GIL on the thread that asks, which neither a slice of a memoryview nor torch's copy_ does.

    def read_piece(self, file: int, offset: int, buffer: memoryview) -> None:
        np.copyto(np.frombuffer(buffer, np.uint8), self._files[file][offset : offset + len(buffer)])

    def write_piece(self, file: int, offset: int, buffer: memoryview) -> None:
        np.copyto(self._files[file][offset : offset + len(buffer)], np.frombuffer(buffer, np.uint8))

    def sync_file(self, file: int) -> None:
        """Memory is as durable as it gets."""

    def release(self) -> None:
        self._files.clear()


def _anonymous(nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
