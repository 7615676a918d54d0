"""How little memory suffices.

    python benchmarks/memory.py limited       1.1B, batch 4 x 512: import, 5 steps, export in a memory cgroup of 2.5 GiB (root)
    python benchmarks/memory.py smallest      the smallest host_memory that works for 11, 22 and 44 layers of that shape

*limited* starts `train.py` in a cgroup of its own, which is removed afterwards. The limit may be met, as page cache counts in
a cgroup and is given back there; what matters is that the kernel killed nothing, and VmHWM of the process.

*smallest* asks the engine: with a host_memory of one byte a step is refused, and the error names the smallest that works, with
boundaries and waiting gradients on the SSD. Weights that nobody wrote and a store that goes nowhere spare an import. With
exactly the memory that was named, 11 layers then train a step for real.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from cgroup import MemoryCgroup
from figures import Figure, publish
from models import SHAPES, add_folders, hollow_model, make_tokens, model_folder
from quiet import quiet

from lohan import Engine
from lohan.config import parse_bytes
from lohan.errors import BudgetError
from lohan.ssd.striped import CHUNK_BYTES, STALL_S, STRIPE_BYTES, StripedStore
from lohan.ssd.stripes import Stripes

BATCH, SEQ = 4, 512
NUM_STEPS = 5
GROWING = ("1.1b-half", "1.1b", "1.1b-double")
RUN_FOR_REAL = GROWING[0]
SPREAD_BAR = 1.05
MIB = 2**20


class NowhereStore(StripedStore):
    """Forgets what is written."""

    def __init__(self, nbytes: int, name: str, vanishes: bool) -> None:
        super().__init__(nbytes, Stripes(1, STRIPE_BYTES, CHUNK_BYTES), threads=1, stall_s=STALL_S, throttle=None)

    def read_piece(self, file: int, offset: int, buffer: memoryview) -> None: ...

    def write_piece(self, file: int, offset: int, buffer: memoryview) -> None: ...

    def sync_file(self, file: int) -> None: ...

    def release(self) -> None: ...


def limited(options: argparse.Namespace) -> None:
    """Import, steps and export below the limit."""
    if os.geteuid() != 0:
        sys.exit("a memory cgroup needs root")
    limit_bytes = parse_bytes("--limit", options.limit)
    model_folder(options.shape, options.models)
    command = [sys.executable, str(Path(__file__).with_name("train.py")), "--shape", options.shape, "--export"]
    command += ["--batch", str(BATCH), "--seq", str(SEQ), "--steps", str(NUM_STEPS), "--host-memory", options.host_memory]
    command += ["--dir", str(options.dir), "--models", str(options.models)]
    with MemoryCgroup(limit_bytes) as group:
        done = subprocess.run(command, preexec_fn=group.join, stdout=subprocess.PIPE, text=True)
        killed, refused = group.killed, group.refused
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with {done.returncode}; processes killed for want of memory: {killed}")
    report = json.loads(done.stdout.splitlines()[-1])
    phases = ", ".join(f"{phase} {nbytes / MIB:.0f}" for phase, nbytes in report["phase_peak_bytes"].items())
    print(f"{options.shape} {BATCH}x{SEQ}, host_memory {options.host_memory}, in a cgroup of {limit_bytes / MIB:.0f} MiB:")
    print(f"    VmHWM in MiB: {phases}; {killed} killed, limit met {refused} times")
    print(f"    import {report['initialize_s']:.1f} s, step {report['step_s']:.1f} s, export {report['export_s']:.1f} s")
    figure = Figure(f"peak memory / limit, {options.shape} {BATCH}x{SEQ}", report["peak_bytes"] / limit_bytes, 1.0)
    publish("memory limited", [figure], limit_bytes=limit_bytes, killed=killed, refused=refused, **report)


def smallest(options: argparse.Namespace) -> None:
    """Host memory does not grow with layers."""
    needed = {name: smallest_host_bytes(name) for name in GROWING}
    for name, nbytes in needed.items():
        print(f"{SHAPES[name].num_layers} layers, {BATCH}x{SEQ}: {nbytes / MIB:.1f} MiB")
    run_one_step(RUN_FOR_REAL, needed[RUN_FOR_REAL], options)
    layers = ", ".join(str(SHAPES[name].num_layers) for name in GROWING)
    growth = max(needed.values()) / min(needed.values())
    figure = Figure(f"largest / smallest host_memory that works, {layers} layers", growth, SPREAD_BAR)
    publish("memory smallest", [figure], needed_bytes=needed)


def batch() -> dict[str, torch.Tensor]:
    tokens = torch.tensor(make_tokens(BATCH, SEQ))
    return {"input_ids": tokens, "labels": tokens}


def smallest_host_bytes(name: str) -> int:
    with Engine(hollow_model(SHAPES[name]), host_memory=1, ssd=["nowhere"], make_store=NowhereStore) as engine:
        try:
            engine.step(batch())
        except BudgetError as error:
            return error.needed_bytes
    raise AssertionError("a step ran in one byte")


def run_one_step(name: str, host_bytes: int, options: argparse.Namespace) -> None:
    folder = model_folder(name, options.models)
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as ssd, Engine(folder, ssd=ssd, host_memory=host_bytes) as engine:
        report = engine.step(batch())
    print(f"{SHAPES[name].num_layers} layers in {host_bytes} bytes: {report}")


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("limited", "smallest"))
    add_folders(parser)
    parser.add_argument("--shape", choices=SHAPES, default="1.1b", help="that limited trains")
    parser.add_argument("--limit", default="2.5GiB", help="of the cgroup")
    parser.add_argument("--host-memory", default="1.5GiB", help="lohan's buffers within it")
    options = parser.parse_args()
    limited(options) if options.what == "limited" else smallest(options)


if __name__ == "__main__":
    main()
