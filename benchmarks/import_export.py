"""How fast a model goes in and out: its tensors one by one against plain reads and writes of the same files.

    python benchmarks/import_export.py --dir /nvme/scratch               Llama shape, 1.1B parameters, bf16: 2.2 GB
    python benchmarks/import_export.py --dir /nvme/scratch --layers 4    the same with less on the disk

Plain reading is one thread with O_DIRECT and large requests on huge pages; plain writing is the same bytes, written and synced.
Rounds are interleaved; every file's pages are dropped from the cache before it is read. Ratios are medians of paired rounds.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lohan.model.load import open_model
from lohan.model.weights_out import export

REQUEST_BYTES = 16 * 2**20


def make_model(folder: Path, num_layers: int) -> None:
    """The Llama of 1.1B parameters, random, written by Transformers in shards of 1 GB."""
    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
    config = AutoConfig.for_model("llama", vocab_size=32000, num_hidden_layers=num_layers, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)  # type: ignore[no-untyped-call]
    model.save_pretrained(folder, max_shard_size="1GB")


def drop_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def read_plainly(folder: Path) -> None:
    buffer = mmap.mmap(-1, REQUEST_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_HUGEPAGE)
    for path in sorted(folder.glob("*.safetensors")):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        at = 0
        while got := os.preadv(descriptor, [buffer], at):
            at += got
        os.close(descriptor)


def write_plainly(folder: Path, out: Path) -> None:
    for path in folder.glob("*.safetensors"):
        data = memoryview(bytearray(REQUEST_BYTES))
        with (out / path.name).open("wb", buffering=0) as file:
            left = path.stat().st_size
            os.posix_fallocate(file.fileno(), 0, left)
            while left:
                left -= file.write(data[: min(left, REQUEST_BYTES)])
            os.fsync(file.fileno())


def read_all(folder: Path) -> None:
    for _ in open_model(folder).values():
        pass


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="a folder on the drive, for some 7 GB")
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.dir) as scratch:
        source, plain, out = (Path(scratch) / name for name in ("source", "plain", "out"))
        plain.mkdir()
        make_model(source, options.layers)
        num_bytes = sum(path.stat().st_size for path in source.glob("*.safetensors"))
        opened = open_model(source)
        shapes = {name: parameter.shape for name, parameter in opened.model.named_parameters()}
        largest = torch.zeros(max(shape.numel() for shape in shapes.values()))

        def read_master(name: str) -> Tensor:
            """As from the engine's masters, but at no cost."""
            return largest[: shapes[name].numel()].view(shapes[name])

        works: dict[str, Callable[[], object]] = {
            "read plainly": lambda: read_plainly(source),
            "import": lambda: read_all(source),
            "write plainly": lambda: write_plainly(source, plain),
            "export": lambda: export(opened, read_master, out, max_shard_bytes=10**9),
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(options.rounds):
            for name, work in works.items():
                drop_cache(source)
                seconds[name].append(timed(work))
    rates = {name: num_bytes / statistics.median(times) / 1e9 for name, times in seconds.items()}
    print(f"{num_bytes / 1e9:.2f} GB; " + "; ".join(f"{name} {rate:.2f} GB/s" for name, rate in rates.items()))
    ratios = {
        one: statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True))
        for one, other in (("import", "read plainly"), ("export", "write plainly"))
    }
    print("; ".join(f"{one} takes {ratio:.2f} x the time of plain I/O" for one, ratio in ratios.items()))
    print(json.dumps({"bytes": num_bytes, "gb_per_s": rates, "ratios": ratios}))


if __name__ == "__main__":
    main()
