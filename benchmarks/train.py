"""Train a few steps with lohan and report times and peak memory: what `versus_deepspeed.py` compares with DeepSpeed.

    python benchmarks/train.py --shape 374m --batch 1 --seq 512 --steps 5 --json OUT

The same model, tokens and optimizer in each step as `deepspeed/train.py`. A process of its own, as its peak memory is
measured: VmHWM of all its processes, of which lohan has one, and of each phase. Steps follow each other without a pause.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from models import SHAPES, add_folders, make_tokens, model_folder
from quiet import quiet

from lohan import AdamW, Engine
from lohan.host.memory import peak_resident_bytes, reset_peak

NUM_WARM_UP = 2
"""left out of medians: the drive has not written all blocks before"""


def train(options: argparse.Namespace, ssd: str) -> dict[str, object]:
    folder = model_folder(options.shape, options.models)
    tokens = torch.tensor(make_tokens(options.batch, options.seq))
    began_s = time.perf_counter()
    optimizer = AdamW(lr=1e-4, weight_decay=0.01)
    clip = options.clip or None
    with Engine(folder, ssd=ssd, host_memory=options.host_memory, optimizer=optimizer, max_grad_norm=clip) as engine:
        initialize_s = time.perf_counter() - began_s
        peaks = {"import": _peak_until_now()}
        steps = [engine.step({"input_ids": tokens, "labels": tokens}) for _ in range(options.steps)]
        peaks["steps"] = _peak_until_now()
        export_s = 0.0
        if options.export:
            began_s = time.perf_counter()
            engine.save_pretrained(Path(ssd) / "export")
            export_s = time.perf_counter() - began_s
            peaks["export"] = _peak_until_now()
    return {
        "system": "lohan",
        "initialize_s": initialize_s,
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "steps_s": [step.step_s for step in steps],
        "step_s": statistics.median(step.step_s for step in steps[NUM_WARM_UP:]),
        "host_buffer_bytes": steps[-1].peak_host_bytes,
        "phase_peak_bytes": peaks,
        "peak_bytes": max(peaks.values()),
        "export_s": export_s,
    }


def _peak_until_now() -> int:
    """since the last call, where the kernel can tell"""
    peak_bytes = peak_resident_bytes()
    reset_peak()
    return peak_bytes


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_folders(parser)
    parser.add_argument("--shape", choices=SHAPES, default="374m")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--host-memory", default="1GiB")
    parser.add_argument("--clip", type=float, default=1.0, help="limit of the gradient's norm; 0: none")
    parser.add_argument("--export", action="store_true", help="save the model at the end, to a folder that is removed")
    parser.add_argument("--json", type=Path, help="file that gets the report")
    options = parser.parse_args()
    if options.steps <= NUM_WARM_UP:
        parser.error(f"--steps={options.steps}: the first {NUM_WARM_UP} are not counted; give at least {NUM_WARM_UP + 1}")
    options.dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=options.dir) as ssd:
        report = json.dumps(train(options, ssd))
    if options.json:
        options.json.write_text(report + "\n")
    print(report)


if __name__ == "__main__":
    main()
