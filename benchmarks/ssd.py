"""How much of a drive the store reaches: 64 MiB tensors through FileStore against fio on the same file.

    python benchmarks/ssd.py --dir /nvme/scratch               read, write, mixed: the bar is 0.95 of fio
    python benchmarks/ssd.py --dir /nvme/scratch --grid        the same for other numbers of threads and piece sizes

fio (apt install fio; without it only lohan is measured) runs io_uring with O_DIRECT and buffers on reserved huge pages, which
needs root; without them it runs on ordinary pages, and the output says so. Rounds are interleaved; ratios are medians of
paired rounds. A rate is bytes moved over wall time; mixed reads one half of the file while it writes the other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from lohan.host.pool import HostPool
from lohan.ssd.base import Request, Ticket
from lohan.ssd.file_store import FileStore
from lohan.ssd.striped import CHUNK_BYTES, NUM_THREADS

MIB = 2**20
TENSOR_BYTES = 64 * MIB
NUM_IN_FLIGHT = 4
"""tensors on their way in each direction"""
FIO_BLOCK_MIB, FIO_DEPTH = 4, 8
FIO_HUGE_PAGES = 64
"""of 2 MiB: two jobs of eight 4 MiB buffers, twice"""
ACTIONS = ("read", "write", "mixed")


@dataclass(frozen=True, slots=True)
class Half:
    """The part of the store that one direction streams over, with its buffers."""

    submit: Callable[[Sequence[Request]], Ticket]
    first: int
    nbytes: int
    buffers: Sequence[Tensor]

    def stream(self) -> None:
        tickets: deque[Ticket] = deque()
        for num, address in enumerate(range(self.first, self.first + self.nbytes, TENSOR_BYTES)):
            if len(tickets) == len(self.buffers):
                tickets.popleft().wait()
            tickets.append(self.submit([(address, self.buffers[num % len(self.buffers)])]))
        while tickets:
            tickets.popleft().wait()


def lohan_gbps(action: str, reads: Half, writes: Half) -> float:
    """GB/s of the store."""
    halves = {"read": [reads], "write": [writes], "mixed": [reads, writes]}[action]
    start_s = time.perf_counter()
    with ThreadPoolExecutor(len(halves)) as executor:
        for stream in [executor.submit(half.stream) for half in halves]:
            stream.result()
    return sum(half.nbytes for half in halves) / (time.perf_counter() - start_s) / 1e9


def fio_gbps(action: str, path: Path, half_bytes: int, memory: str) -> float:
    """GB/s of fio over the same ranges."""
    command = ["fio", "--output-format=json", f"--filename={path}", f"--bs={FIO_BLOCK_MIB}m", f"--size={half_bytes}"]
    command += ["--direct=1", "--ioengine=io_uring", f"--iodepth={FIO_DEPTH}", f"--mem={memory}"]
    if action in ("read", "mixed"):
        command += ["--name=reads", "--rw=read", "--offset=0"]
    if action in ("write", "mixed"):
        command += ["--name=writes", "--rw=write", f"--offset={half_bytes}"]
    jobs = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)["jobs"]
    moved_bytes = sum(int(job[way]["io_bytes"]) for job in jobs for way in ("read", "write"))
    return moved_bytes / max(int(job[way]["runtime"]) for job in jobs for way in ("read", "write")) / 1e6


@contextmanager
def fio_memory() -> Iterator[str]:
    """What fio's buffers are made of: reserved huge pages, given back afterwards, where we may reserve them."""
    reserved = Path("/proc/sys/vm/nr_hugepages")
    before = reserved.read_text()
    try:
        reserved.write_text(str(int(before) + FIO_HUGE_PAGES))
    except OSError:
        print("fio: huge pages cannot be reserved here (not root); it uses ordinary pages, which are slower")
        yield "mmap"
        return
    try:
        yield "mmaphuge"
    finally:
        reserved.write_text(before)


def measure(folder: Path, half_bytes: int, rounds: int, num_threads: int, chunk_mib: int) -> dict[str, dict[str, float]]:
    """Medians over the rounds, and of the ratio within each round."""
    rates: dict[str, list[tuple[float, float | None]]] = {action: [] for action in ACTIONS}
    pool = HostPool(2 * NUM_IN_FLIGHT * TENSOR_BYTES)
    buffers = [pool.allocate(TENSOR_BYTES, f"tensor {num}").random_(0, 256) for num in range(2 * NUM_IN_FLIGHT)]
    store = FileStore.create([folder], 2 * half_bytes, threads=num_threads, chunk_bytes=chunk_mib * MIB)
    with closing(pool), closing(store), fio_memory() as memory:
        reads = Half(store.submit_read, 0, half_bytes, buffers[:NUM_IN_FLIGHT])
        writes = Half(store.submit_write, half_bytes, half_bytes, buffers[NUM_IN_FLIGHT:])
        Half(store.submit_write, 0, 2 * half_bytes, buffers).stream()  # blocks never written read faster than a drive can
        for _ in range(rounds):
            for action in ACTIONS:
                ours = lohan_gbps(action, reads, writes)
                theirs = fio_gbps(action, folder / "store", half_bytes, memory) if shutil.which("fio") else None
                rates[action].append((ours, theirs))
    return {action: summarise(pairs) for action, pairs in rates.items()}


def summarise(pairs: Sequence[tuple[float, float | None]]) -> dict[str, float]:
    result = {"lohan_gbps": statistics.median(ours for ours, _ in pairs)}
    if all(theirs is not None for _, theirs in pairs):
        result["fio_gbps"] = statistics.median(theirs for _, theirs in pairs if theirs is not None)
        result["ratio"] = statistics.median(ours / theirs for ours, theirs in pairs if theirs is not None)
    return result


def report(num_threads: int, chunk_mib: int, results: dict[str, dict[str, float]]) -> None:
    for action, result in results.items():
        against = f"fio {result['fio_gbps']:5.2f} GB/s   ratio {result['ratio']:.2f}" if "ratio" in result else "no fio here"
        print(f"{num_threads} x {chunk_mib:2d} MiB   {action:5s}   lohan {result['lohan_gbps']:5.2f} GB/s   {against}")
    print(json.dumps({"benchmark": "ssd", "threads": num_threads, "chunk_mib": chunk_mib, **results}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path(".bench"), help="a folder on the drive (default: .bench)")
    parser.add_argument("--size-gib", type=float, default=4.0, help="of the file, half of it read, half written (default: 4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grid", action="store_true", help="try other numbers of threads and piece sizes")
    options = parser.parse_args()
    half_bytes = int(options.size_gib * 2**30 / 2) // TENSOR_BYTES * TENSOR_BYTES
    settings = [(NUM_THREADS, CHUNK_BYTES // MIB)]
    if options.grid:
        settings = [(num_threads, chunk_mib) for num_threads in (1, 2, 4) for chunk_mib in (4, 8, 16)]
    if shutil.which("fio") is None:
        print("fio is not installed (apt install fio): nothing to compare with")
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for num_threads, chunk_mib in settings:
            report(num_threads, chunk_mib, measure(Path(folder), half_bytes, options.rounds, num_threads, chunk_mib))


if __name__ == "__main__":
    main()
