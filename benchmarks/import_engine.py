"""How long an import takes, against reading its source and writing its store plainly; and opening an engine in all.

    python benchmarks/import_engine.py                       1.1B: the bar is 1.25 x the longer of the two
    python benchmarks/import_engine.py --shape 374m

A round reads the source with O_DIRECT and large requests, opens an engine, and writes as many bytes as that wrote to a fresh
preallocated file; the source is dropped from the page cache before it is read. The import is what comes after the store's file
is there; opening is everything: the object, its units and their order, too, which takes as long for a model of any size.

A drive that serves one request after the other, as a virtual one may, takes the sum of both, however an import is made. So a
round also copies the source plainly, to a fresh preallocated file, and the import is compared with that, too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from figures import Figure, publish
from import_export import drop_cache, read_plainly, timed
from models import SHAPES, add_folders, model_folder
from quiet import quiet
from ssd import NUM_IN_FLIGHT, TENSOR_BYTES, Half
from torch import Tensor

from lohan import Engine
from lohan.host.pool import HostPool
from lohan.ssd.base import Store
from lohan.ssd.file_store import FileStore

BAR = 1.25
COPIERS, COPY_BYTES = 3, 2 * 2**20


@dataclass(frozen=True, slots=True)
class Round:
    """Seconds of one round."""

    read_s: float
    write_s: float
    copy_s: float
    """reading the source and writing as much, side by side"""
    open_s: float
    import_s: float
    """of `open_s`, after the store's file was there"""
    written_bytes: int

    @property
    def ratio(self) -> float:
        return self.import_s / max(self.read_s, self.write_s)

    @property
    def ratio_to_copy(self) -> float:
        return self.import_s / self.copy_s


def open_engine(source: Path, folder: Path, host_memory: str) -> tuple[float, float, int]:
    """Seconds in all, seconds once the store was there, bytes written."""
    stores: list[Store] = []
    ready_s: list[float] = []

    def make_store(nbytes: int, name: str, vanishes: bool) -> Store:
        stores.append(FileStore.create([folder], nbytes, file_name=name, unlinked=True))
        ready_s.append(time.perf_counter())
        return stores[-1]

    began_s = time.perf_counter()
    with Engine(source, ssd=folder, host_memory=host_memory, make_store=make_store):
        ended_s = time.perf_counter()
        return ended_s - began_s, ended_s - ready_s[0], sum(store.written_bytes for store in stores)


def write_seconds(nbytes: int, folder: Path) -> float:
    """What plain writing of about so many bytes takes, as in `ssd.py`."""
    whole_bytes = -(-nbytes // TENSOR_BYTES) * TENSOR_BYTES
    pool = HostPool(NUM_IN_FLIGHT * TENSOR_BYTES)
    buffers = [pool.allocate(TENSOR_BYTES, f"tensor {number}").random_(0, 256) for number in range(NUM_IN_FLIGHT)]
    store = FileStore.create([folder], whole_bytes, unlinked=True)
    with closing(pool), closing(store):
        return timed(Half(store.submit_write, 0, whole_bytes, buffers).stream) * nbytes / whole_bytes


def copy_plainly(source: Path, folder: Path) -> float:
    """Seconds that COPIERS threads take, each reading a piece and writing it."""
    reads = [(path, at) for path in source.glob("*.safetensors") for at in range(0, path.stat().st_size, COPY_BYTES)]
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in source.glob("*.safetensors")}
    store = FileStore.create([folder], len(reads) * COPY_BYTES, unlinked=True)
    pool = HostPool(COPIERS * COPY_BYTES)
    buffers: SimpleQueue[Tensor] = SimpleQueue()
    for number in range(COPIERS):
        buffers.put(pool.allocate(COPY_BYTES, f"piece {number}").random_(0, 256))

    def copy(address: int, path: Path, at: int) -> None:
        buffer = buffers.get()
        os.preadv(files[path], [buffer.numpy().data], at)
        store.submit_write([(address, buffer)]).wait()
        buffers.put(buffer)

    with closing(pool), closing(store), ThreadPoolExecutor(COPIERS) as threads:
        places = range(0, len(reads) * COPY_BYTES, COPY_BYTES)
        seconds = timed(lambda: list(threads.map(copy, places, *zip(*reads, strict=True))))
    for file in files.values():
        os.close(file)
    return seconds


def measure(source: Path, folder: Path, host_memory: str) -> Round:
    drop_cache(source)
    read_s = timed(lambda: read_plainly(source))
    drop_cache(source)
    open_s, import_s, written_bytes = open_engine(source, folder, host_memory)
    write_s = write_seconds(written_bytes, folder)
    drop_cache(source)
    return Round(read_s, write_s, copy_plainly(source, folder), open_s, import_s, written_bytes)


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folders(parser)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    source = model_folder(options.shape, options.models)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        open_engine(source, Path(folder), options.host_memory)  # imports modules
        rounds = [measure(source, Path(folder), options.host_memory) for _ in range(options.rounds)]
    for one in rounds:
        plain = f"read {one.read_s:.2f} s, write {one.written_bytes / 1e9:.2f} GB {one.write_s:.2f} s, copy {one.copy_s:.2f} s"
        print(f"{options.shape}: {plain}; engine open after {one.open_s:.2f} s, import {one.import_s:.2f} s of it")
    ratio, to_copy = (
        statistics.median(ratios) for ratios in zip(*((one.ratio, one.ratio_to_copy) for one in rounds), strict=True)
    )
    print(f"import / plain copy, {options.shape}: {to_copy:.2f}, reported")
    figure = Figure(f"import / max(read source, write store), {options.shape}", ratio, BAR)
    publish("import_engine", [figure], to_copy=to_copy, rounds=[asdict(one) for one in rounds])


if __name__ == "__main__":
    main()
