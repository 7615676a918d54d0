"""How fast a drive is through lohan's own store: now, and after its write cache is full.

Files have no name while they are measured, so nothing stays however the process ends; folders that had to be made are removed.

    trial      the store's own checks on the folder: owner, rights, O_DIRECT, room
    now        write, read what was written, then both at once: SECONDS each
    cache      write on and on to fresh addresses, until the rate has fallen and is steady, or the bytes or seconds told before

A consumer SSD takes writes into fast cells first, up to a third of its free space, and then at a fraction of that rate.
Training writes longer than that lasts, so the second rate is the one that counts.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from lohan.host.pool import HostPool
from lohan.ssd.base import Request, Store, Ticket
from lohan.ssd.file_store import FileStore

MIB = 2**20
SECONDS = 2.0
"""that each direction is measured for"""
FILE_BYTES = 2 * 2**30
"""of the file that is measured on, where there is room"""
MOST_TIMES = 2
"""a file's bytes that one direction moves at most: a fast drive is not worn for a rate that is known"""
FREE_PART = 0.05
"""of the free space that filling the write cache may write to"""
FILL_S = 90.0
WINDOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """How large the pieces are that move."""

    tensor_bytes: int = 32 * MIB
    num_in_flight: int = 4
    """each way"""

    def usable(self, nbytes: float) -> int:
        """As much of `nbytes` as whole tensors take; 0 if not even one round of each way fits."""
        whole = int(nbytes) // (2 * self.tensor_bytes) * 2 * self.tensor_bytes
        return whole if whole >= 2 * self.num_in_flight * self.tensor_bytes else 0


@dataclass(frozen=True, slots=True)
class Rates:
    """GB/s as found."""

    read_gbps: float
    write_gbps: float
    mixed_gbps: float
    """read and written together"""


@dataclass(frozen=True, slots=True)
class Sustained:
    """What steady writing came to."""

    first_gbps: float
    gbps: float
    """at the end"""
    written_bytes: int
    seconds: float
    fell: bool
    """the rate fell and became steady: the write cache was full"""


class Plateau:
    """Whether a rate that is looked at every window has fallen from its start and become steady."""

    NUM_STEADY = 8
    """windows that have to be alike"""
    SPREAD = 0.2
    """between the fastest and the slowest of them, of their median"""
    FALLEN = 0.7
    """of the first rate"""

    def __init__(self) -> None:
        self._rates: list[float] = []

    def add(self, gbps: float) -> None:
        self._rates.append(gbps)

    @property
    def first_gbps(self) -> float:
        return median(self._rates[:3])

    @property
    def last_gbps(self) -> float:
        return median(self._rates[-self.NUM_STEADY :])

    @property
    def reached(self) -> bool:
        last = self._rates[-self.NUM_STEADY :]
        if len(last) < self.NUM_STEADY or self.last_gbps > self.FALLEN * self.first_gbps:
            return False
        return max(last) - min(last) <= self.SPREAD * self.last_gbps


@contextmanager
def scratch(folder: Path) -> Iterator[Path]:
    """A folder of our own inside `folder`, which is made if missing; whatever was made is removed."""
    with _existing(folder), tempfile.TemporaryDirectory(prefix=".lohan-doctor-", dir=folder) as inside:
        yield Path(inside)


def try_folder(folder: Path) -> None:
    """Make a small store in `folder` itself, as a run would. OptionError: with what is wrong, and the remedy."""
    with _existing(folder):
        FileStore.create([folder], MIB, unlinked=True).close()


def measure(folder: Path, nbytes: int, sizes: Sizes, tell: Callable[[str], None], seconds: float) -> Rates:
    """All three rates, on a file of `nbytes` in `folder`."""
    half, most_bytes = nbytes // 2, MOST_TIMES * nbytes
    with _open(folder, nbytes, sizes) as (store, reads, writes):
        tell("writing")
        write_gbps, written = _run([_Stream(store.submit_write, 0, nbytes, writes)], seconds, most_bytes)
        # blocks that were never written are read faster than a drive can
        tell("reading")
        read = _Stream(store.submit_read, 0, min(half, written), reads)
        read_gbps, _ = _run([read], seconds, most_bytes)
        tell("reading and writing")
        mixed_gbps, _ = _run([read, _Stream(store.submit_write, half, half, writes)], seconds, most_bytes)
    return Rates(read_gbps, write_gbps, mixed_gbps)


def fill_cache(
    folder: Path, nbytes: int, sizes: Sizes, tell: Callable[[str], None], seconds: float, window_s: float = WINDOW_S
) -> Sustained:
    """Write up to `nbytes`, each address once, for up to `seconds`."""
    tell("filling the write cache")
    plateau, written = Plateau(), 0
    with _open(folder, nbytes, sizes) as (store, _, writes):
        last_bytes = nbytes - sizes.num_in_flight * sizes.tensor_bytes  # the rest is on its way then
        began_s = window_start_s = time.perf_counter()
        window_bytes = 0
        with closing(_Stream(store.submit_write, 0, nbytes, writes).steps()) as steps:
            for moved in steps:
                written, window_bytes = written + moved, window_bytes + moved
                now_s = time.perf_counter()
                is_over = written >= last_bytes or now_s - began_s >= seconds
                if now_s - window_start_s >= window_s or (is_over and window_bytes == written):
                    plateau.add(window_bytes / (now_s - window_start_s) / 1e9)
                    window_start_s, window_bytes = now_s, 0
                    tell(f"filling the write cache: {written / 1e9:.1f} of {nbytes / 1e9:.1f} GB, {plateau.last_gbps:.2f} GB/s")
                if is_over or plateau.reached:
                    break
    return Sustained(plateau.first_gbps, plateau.last_gbps, written, now_s - began_s, plateau.reached)


@dataclass(frozen=True, slots=True)
class _Stream:
    """One direction over a range of the store, round and round, with its own buffers."""

    submit: Callable[[Sequence[Request]], Ticket]
    first: int
    nbytes: int
    buffers: Sequence[Tensor]

    def steps(self) -> Generator[int]:
        """The bytes that have just moved, again and again. Closing it waits for what is on its way."""
        tickets: deque[Ticket] = deque()
        tensor_bytes = self.buffers[0].numel()
        try:
            for num in count():
                if len(tickets) == len(self.buffers):
                    tickets.popleft().wait()
                    yield tensor_bytes
                address = self.first + num * tensor_bytes % self.nbytes
                tickets.append(self.submit([(address, self.buffers[num % len(self.buffers)])]))
        finally:
            for ticket in tickets:
                ticket.wait()


@contextmanager
def _existing(folder: Path) -> Iterator[None]:
    """The folder is there, and afterwards only if it was before."""
    made = [path for path in (folder, *folder.parents) if not os.path.exists(path)]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield
    finally:
        for path in made:
            path.rmdir()


@contextmanager
def _open(folder: Path, nbytes: int, sizes: Sizes) -> Iterator[tuple[Store, list[Tensor], list[Tensor]]]:
    """A store of `nbytes`, buffers to read into, and buffers of random bytes to write, which no drive can compress."""
    num = 2 * sizes.num_in_flight
    with closing(HostPool(num * sizes.tensor_bytes)) as pool:
        pool.reserve(num * sizes.tensor_bytes)
        buffers = [pool.allocate(sizes.tensor_bytes, f"buffer {index}") for index in range(num)]
        for buffer in buffers[sizes.num_in_flight :]:
            buffer.view(torch.int64).random_()
        with closing(FileStore.create([folder], nbytes, unlinked=True)) as store:
            yield store, buffers[: sizes.num_in_flight], buffers[sizes.num_in_flight :]


def _run(streams: Sequence[_Stream], seconds: float, most_bytes: int) -> tuple[float, int]:
    """All streams side by side: their rates together, and the bytes of the first."""

    def run(stream: _Stream) -> tuple[int, float]:
        began_s, moved_bytes = time.perf_counter(), 0
        with closing(stream.steps()) as steps:
            for moved in steps:
                moved_bytes += moved
                elapsed_s = time.perf_counter() - began_s
                if elapsed_s >= seconds or moved_bytes >= most_bytes:
                    break
        return moved_bytes, elapsed_s

    with ThreadPoolExecutor(len(streams)) as executor:
        results = list(executor.map(run, streams))
    return sum(moved / elapsed_s for moved, elapsed_s in results) / 1e9, results[0][0]
