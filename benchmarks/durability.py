"""What it costs that a store never loses: steps with checksums and commits against steps without, taken in turns.

    python benchmarks/durability.py                              374M, 1 x 512: the bar is 0.95 of the speed without
    python benchmarks/durability.py --shape 1.1b --batch 4       the bar is 0.97
    python benchmarks/durability.py --store log --clipping always

Two engines on the same drive train the same model on the same tokens. One is as everybody has it: every grain that is read is
compared, every step is flushed and committed. The other compares nothing, flushes nothing and keeps no record. They take turns
of some steps each; the first step of a turn is not counted, and a turn ends when all is written. What the first one writes
beyond the second is shown: checksums and records, and gradients where they are the redo log.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from figures import Figure, publish
from models import SHAPES, add_folders, make_tokens, model_folder
from quiet import quiet
from step import CLIPPING

from lohan import AdamW, Engine
from lohan.optim.worker import UpdateWorker
from lohan.ssd.base import Store
from lohan.ssd.file_store import FileStore

BARS = {("374m", 1): 0.95, ("1.1b", 4): 0.97}


def make_store(folder: Path, nbytes: int, name: str, vanishes: bool) -> Store:
    return FileStore.create([folder], nbytes, file_name=name, unlinked=vanishes)


def check_nothing(engine: Engine) -> None:
    """From now on this engine takes whatever it reads."""
    assert engine._storage is not None
    for store in (engine._storage.units, engine._storage.spill):
        if store is not None:
            store.verify = store._note = lambda *_: None  # type: ignore[method-assign]
    training = engine._ready().training
    make_worker = training._worker

    def worker_without_checks(*arguments: Any) -> UpdateWorker:
        worker = make_worker(*arguments)
        worker._checks = None
        return worker

    training._worker = worker_without_checks  # type: ignore[method-assign]


def turn(engine: Engine, batch: dict[str, torch.Tensor], num_steps: int) -> tuple[list[float], int]:
    """Seconds of the counted steps, and the bytes that one step wrote."""
    engine.step(batch)
    reports = [engine.step(batch) for _ in range(num_steps)]
    engine._ready().training.settle()
    return [report.step_s for report in reports], reports[-1].ssd_write_bytes


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folders(parser)
    parser.add_argument("--shape", choices=SHAPES, default="374m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--store", choices=("double", "log", "single"), default="double")
    parser.add_argument("--clipping", choices=CLIPPING, default="never")
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="counted in each turn")
    options = parser.parse_args()
    folder = model_folder(options.shape, options.models)
    tokens = torch.tensor(make_tokens(options.batch, options.seq))
    batch = {"input_ids": tokens, "labels": tokens}
    options.dir.mkdir(parents=True, exist_ok=True)
    settings = {"host_memory": options.host_memory, "optimizer": AdamW(lr=1e-5), "store": options.store}
    settings["max_grad_norm"] = CLIPPING[options.clipping]
    with (
        tempfile.TemporaryDirectory(dir=options.dir) as one,
        tempfile.TemporaryDirectory(dir=options.dir) as other,
        Engine(folder, ssd=one, **settings) as kept,
        Engine(folder, ssd=other, make_store=partial(make_store, Path(other)), **settings) as bare,
    ):
        for engine in (kept, bare):
            turn(engine, batch, 1)  # both places of every unit are written
        check_nothing(bare)
        ratios, seconds, written = [], [], (0, 0)
        for _ in range(options.rounds):
            with_s, with_bytes = turn(kept, batch, options.steps)
            without_s, without_bytes = turn(bare, batch, options.steps)
            ratios.append(statistics.median(without_s) / statistics.median(with_s))
            seconds.append((statistics.median(with_s), statistics.median(without_s)))
            written = (with_bytes, without_bytes)
            print(f"with {seconds[-1][0]:.2f} s, without {seconds[-1][1]:.2f} s: {ratios[-1]:.3f} of the speed", flush=True)
        meta_bytes = (Path(one) / "store.meta").stat().st_size
    setting = f"{options.shape} {options.batch}x{options.seq}, {options.store}, clipping {options.clipping}"
    print(f"{setting}: {written[0] / 1e9:.3f} GB a step with, {written[1] / 1e9:.3f} without; record file {meta_bytes} bytes")
    bar = BARS.get((options.shape, options.batch), 0.0)
    figure = Figure(f"speed with checksums and commits, {setting}", statistics.median(ratios), bar, at_least=True)
    publish("durability", [figure], ratios=ratios, seconds=seconds, written_bytes=written)


if __name__ == "__main__":
    main()
